"""Parquet files with a column of vectors: `embedding`, unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.build.items import VECTOR_COLUMN
from hivlp.index.build.vectors.source import RawBatch, files_of, part_rows
from hivlp.index.build.vectors.tables import (
    as_table,
    open_parquet,
    read_parts,
    row_count,
    schema_of,
    unified,
)
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import IMAGE_COLUMNS
from hivlp.index.snapshot.manifest import SourceKind
from hivlp.models.levels import FloatArray

READ_FOR_SAMPLE = 4
"""So many times the rows of a sample are read to take it: whole row groups, spread."""
LOOKED_AT = 1_024
"""Rows that tell how long vectors of a list without a declared length are."""


class ParquetSource:
    """Rows of one or several Parquet files, in the order of the numbers in their names."""

    kind: SourceKind = "parquet"

    def __init__(self, given: Path, column: str = VECTOR_COLUMN) -> None:
        """Raises CorpusError for files without such a column, or whose columns don't agree."""
        self.source = str(given.resolve())
        self.root = (given if given.is_dir() else given.parent).resolve()
        self._column = column
        self._files = files_of(given, ".parquet")
        for path in self._files:
            _check_vectors(path, schema_of(path), column)
        self.count = sum(row_count(path) for path in self._files)
        self.schema = unified(self._files, column)
        self.dim = self._dim()
        named = set(self.schema.names) & set(IMAGE_COLUMNS)
        self.pictures_inside = not named and all(map(_has_pictures, self._files))

    def sample(self, limit: int) -> Iterator[FloatArray]:
        """Every so many rows of row groups that are spread over all files."""
        groups = [(path, n) for path in self._files for n in range(_groups(path))]
        most = READ_FOR_SAMPLE * limit
        taken = max(1, min(len(groups), round(len(groups) * most / max(self.count, 1))))
        step = max(1, min(self.count, most) // limit)
        for place in np.unique(np.linspace(0, len(groups) - 1, taken).astype(np.int64)).tolist():
            path, group = groups[place]
            with open_parquet(path) as file:
                wanted = {"row_groups": [group], "columns": [self._column]}
                for batch in file.iter_batches(part_rows(self.dim), **wanted):
                    vectors, _ = self._vectors(batch.column(0))
                    with np.errstate(over="ignore"):  # a double too large is Inf, and left out
                        yield vectors[::step].astype(np.float32)

    def batches(self) -> Iterator[RawBatch]:
        """Every row once, in order."""
        columns = [*self.schema.names, self._column]
        for path in self._files:
            first = 0
            for batch in read_parts(path, columns, part_rows(self.dim)):
                vectors, reasons = self._vectors(batch.column(self._column))
                yield RawBatch(vectors, as_table(batch, self.schema), path, first, reasons)
                first += batch.num_rows

    def _dim(self) -> int:
        """The length of the vectors: the declared one, or what most of the first ones have."""
        for path in self._files:
            kind = schema_of(path).field(self._column).type
            if pa.types.is_fixed_size_list(kind):
                return int(kind.list_size)
            for batch in read_parts(path, [self._column], LOOKED_AT):
                lengths = pc.list_value_length(batch.column(0))
                known = lengths.filter(pc.fill_null(pc.greater(lengths, 0), False))
                if len(known):
                    return int(pc.mode(known)[0]["mode"].as_py())
        raise CorpusError(self.source, f"column {self._column!r} holds no vector")

    def _vectors(self, column: Any) -> tuple[npt.NDArray[Any], dict[int, str]]:
        """(n, dim) numbers, NaN where a row has no such vector, and why it hasn't."""
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        fit = lengths == self.dim
        whole = column if fit.all() else column.filter(pa.array(fit))
        numbers = whole.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.dim)
        if fit.all():
            return numbers, {}
        vectors = np.full((len(column), self.dim), np.nan, numbers.dtype)
        vectors[fit] = numbers
        bad = np.flatnonzero(~fit).tolist()
        return vectors, {i: _reason(int(lengths[i]), self.dim) for i in bad}


def _has_pictures(path: Path) -> bool:
    """Whether a file has a column of pictures' bytes, which is never read here."""
    return any(name in schema_of(path).names for name in IMAGE_COLUMNS)


def _reason(length: int, dim: int) -> str:
    return f"a vector of {length} numbers, {dim} are needed" if length else "no vector"


def _check_vectors(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise CorpusError(str(path), f"no column {column!r}; there are {schema.names}")
    kind = schema.field(column).type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_floating(kind.value_type):
        raise CorpusError(str(path), f"column {column!r} is {kind}; lists of floats are needed")


def _groups(path: Path) -> int:
    with open_parquet(path) as file:
        return int(file.metadata.num_row_groups)

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
from hivlp.index.build.vectors.fields import one_chunk
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

READ_FOR_SAMPLE = 4
"""So many times the rows of a sample are read to take it: whole row groups, spread."""
LOOKED_AT = 1_024
"""Rows that tell how long vectors of a list without a declared length are."""


class ParquetSource:
    """Rows of one or several Parquet files, in the order of the numbers in their names."""

    kind: SourceKind = "parquet"
    rooted = True

    def __init__(self, given: Path, column: str = VECTOR_COLUMN) -> None:
        """Raises CorpusError for files without such a column, or whose columns don't agree."""
        self.source = str(given.resolve())
        self.root = (given if given.is_dir() else given.parent).resolve()
        self._column = column
        self._files = files_of(given, ".parquet")
        for path in self._files:
            _check_vectors(path, schema_of(path), column)
        self.count = sum(row_count(path) for path in self._files)
        self.schema, self.left_out = unified(self._files, column)
        self.dim = self._dim()
        named = set(self.schema.names) & set(IMAGE_COLUMNS)
        self.pictures_inside = not named and all(map(_has_pictures, self._files))
        if self.pictures_inside:  # found where they lie, not lost
            self.left_out = tuple(name for name in self.left_out if name not in IMAGE_COLUMNS)

    def sample(self, limit: int) -> Iterator[npt.NDArray[Any]]:
        """Every so many rows of row groups that are spread over all files."""
        groups = [(path, *group) for path in self._files for group in enumerate(_groups(path))]
        most = READ_FOR_SAMPLE * limit
        some = max(1, min(len(groups), round(len(groups) * most / max(self.count, 1))))
        places = np.unique(np.linspace(0, len(groups) - 1, some).astype(np.int64)).tolist()
        total = sum(groups[place][2] for place in places)
        wanted = np.unique(np.linspace(0, total - 1, min(limit, total)).astype(np.int64))
        first = 0
        for path, number, _ in (groups[place] for place in places):
            for column in self._group(path, number):
                bounds = np.searchsorted(wanted, (first, first + len(column)))
                yield self._vectors(column)[0][wanted[slice(*bounds)] - first]
                first += len(column)

    def _group(self, path: Path, number: int) -> Iterator[Any]:
        """The vectors of a row group, some at a time. Raises CorpusError."""
        with open_parquet(path) as file:
            try:
                for batch in file.iter_batches(
                    part_rows(self.dim), row_groups=[number], columns=[self._column]
                ):
                    yield batch.column(0)
            except (OSError, pa.ArrowException) as error:
                raise CorpusError(str(path), f"unreadable: {error}") from error

    def batches(self) -> Iterator[RawBatch]:
        """Every row once, in order."""
        columns = [*self.schema.names, self._column]
        for path in self._files:
            first = 0
            for part in read_parts(path, columns, part_rows(self.dim), self._column):
                vectors, reasons = self._vectors(one_chunk(part.column(self._column)))
                yield RawBatch(vectors, as_table(part, self.schema, path), path, first, reasons)
                first += part.num_rows

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


def _groups(path: Path) -> list[int]:
    """Rows of each row group."""
    with open_parquet(path) as file:
        record = file.metadata
        return [record.row_group(number).num_rows for number in range(record.num_row_groups)]

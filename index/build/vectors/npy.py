""".npy files of vectors, and Parquet files of what belongs to them, row by row.

    source = NpySource(Path("img_emb/"), Path("metadata/"))   # img_emb_0.npy, metadata_0.parquet

Notable: parts are read, not mapped, so that the process never holds more than a part of a file of
any size; what was read is the system's to forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.build.items import VECTOR_COLUMN
from hivlp.index.build.vectors.source import (
    RawBatch,
    by_number,
    files_of,
    number_of,
    part_rows,
)
from hivlp.index.build.vectors.tables import as_table, read_parts, row_count, unified
from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.manifest import SourceKind

EMPTY = pa.schema([])
BLOCK = 64
"""Neighbours that a sample takes together: a read each, not one a row."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a .npy file says of its numbers; they begin at `offset`."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @staticmethod
    def read(path: Path) -> Header:
        """Raises CorpusError for whatever is no header of an array."""
        try:
            with path.open("rb") as stream:
                shape, fortran, dtype = _header(stream)
                offset = stream.tell()
        except Exception as error:  # numpy reads a Python literal, and raises whatever that does
            raise CorpusError(str(path), f"not a readable .npy file: {error}") from error
        if not all(type(length) is int and length >= 0 for length in shape):
            raise CorpusError(str(path), f"not a readable .npy file: its shape is {shape}")
        return Header(shape, fortran, dtype, offset)


@dataclass(frozen=True, slots=True)
class NpyFile:
    """One array of vectors, (count, dim): where its numbers begin and what they are."""

    path: Path
    count: int
    dim: int
    dtype: np.dtype[Any]
    offset: int

    @staticmethod
    def open(path: Path) -> NpyFile:
        """Read the header. Raises CorpusError for anything but rows of floats in C order."""
        header = Header.read(path)
        shape, dtype, offset = header.shape, header.dtype, header.offset
        if len(shape) != 2 or shape[1] < 1:
            raise CorpusError(str(path), f"an array of shape {shape}; (rows, numbers) is needed")
        if header.fortran and min(shape) > 1:
            raise CorpusError(str(path), "is in Fortran order; save it with np.ascontiguousarray")
        if dtype.kind != "f" or dtype.itemsize > 8:
            raise CorpusError(str(path), f"holds {dtype}; float16, float32 or float64 is needed")
        if path.stat().st_size < offset + shape[0] * shape[1] * dtype.itemsize:
            raise CorpusError(str(path), f"is cut short: its header says {shape[0]} rows")
        return NpyFile(path, shape[0], shape[1], dtype, offset)

    def read(self, first: int, count: int) -> npt.NDArray[Any]:
        """Rows from `first` on, (count, dim). Raises CorpusError."""
        begin = self.offset + first * self.dim * self.dtype.itemsize
        try:
            numbers = np.fromfile(self.path, self.dtype, count * self.dim, offset=begin)
        except OSError as error:
            raise CorpusError(str(self.path), f"unreadable: {error}") from error
        if len(numbers) != count * self.dim:
            raise CorpusError(str(self.path), f"was cut short at row {first}")
        native = numbers.astype(self.dtype.newbyteorder("="), copy=False)
        return native.reshape(count, self.dim)


class NpySource:
    """Pairs of arrays and tables, in the order of their numbers."""

    kind: SourceKind = "npy"
    pictures_inside = False
    rooted = True

    def __init__(self, vectors: Path, metadata: Path | None = None) -> None:
        """Raises CorpusError for files that can't be read or don't belong together."""
        self.source = str(vectors.resolve())
        self.root = (vectors if vectors.is_dir() else vectors.parent).resolve()
        arrays = [NpyFile.open(path) for path in files_of(vectors, ".npy")]
        self.dim = arrays[0].dim
        for array in arrays:
            if array.dim != self.dim:
                here = f"vectors of {array.dim} numbers; those of {arrays[0].path.name}"
                raise CorpusError(str(array.path), f"{here} have {self.dim}")
        self.count = sum(array.count for array in arrays)
        if not self.count:
            raise CorpusError(self.source, "holds no vectors")
        self._pairs = _paired(arrays, _tables_of(vectors, metadata))
        tables = [table for _, table in self._pairs if table is not None]
        self.schema, self.left_out = unified(tables, VECTOR_COLUMN) if tables else (EMPTY, ())

    def sample(self, limit: int) -> Iterator[npt.NDArray[Any]]:
        """Blocks of neighbours, spread over every file by its size."""
        for array, _ in self._pairs:
            blocks = -(-array.count // BLOCK)
            share = min(1.0, limit / self.count)
            wanted = np.linspace(0, blocks - 1, max(1, round(share * blocks))).astype(np.int64)
            for first in (wanted[:blocks] * BLOCK).tolist():
                yield array.read(first, min(BLOCK, array.count - first))

    def batches(self) -> Iterator[RawBatch]:
        """Every row once, in order."""
        step = part_rows(self.dim)
        for array, path in self._pairs:
            first = 0
            for rows, table in self._tables(path, array.count, step):
                yield RawBatch(array.read(first, rows), table, array.path, first)
                first += rows

    def _tables(self, path: Path | None, count: int, step: int) -> Iterator[tuple[int, Any]]:
        """Numbers of rows, and the tables that belong to them."""
        if path is not None and self.schema.names:
            for part in read_parts(path, self.schema.names, step):
                yield part.num_rows, as_table(part, self.schema, path)
            return
        for first in range(0, count, step):
            rows = min(step, count - first)
            columns = [pa.nulls(rows, kind) for kind in self.schema.types]
            yield rows, pa.table(columns, schema=self.schema)


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"format {version[0]}.{version[1]}; 1.0 or 2.0 is needed")


def _tables_of(vectors: Path, metadata: Path | None) -> list[Path]:
    """The tables asked for; else those that lie in the vectors' own folder."""
    if metadata is not None:
        return files_of(metadata, ".parquet")
    return files_of(vectors, ".parquet") if _has_tables(vectors) else []


def _has_tables(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix.lower() == ".parquet" for path in folder.iterdir())


def _paired(arrays: list[NpyFile], tables: list[Path]) -> list[tuple[NpyFile, Path | None]]:
    """Each array with its table: the only one, or that of the same number. Raises CorpusError."""
    if not tables:
        return [(array, None) for array in arrays]
    if len(arrays) == len(tables) == 1:
        pairs = [(arrays[0], tables[0])]
    else:
        by_number([array.path for array in arrays])
        named = by_number(tables)
        for array in arrays:
            if number_of(array.path) not in named:
                raise CorpusError(str(array.path), "has no table of the same number beside it")
        pairs = [(array, named[number_of(array.path)]) for array in arrays]
    for array, table in pairs:
        rows = row_count(table)
        if rows != array.count:
            raise CorpusError(str(table), f"{rows} rows for {array.count} of {array.path.name}")
    return list(pairs)

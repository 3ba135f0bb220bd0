"""Rows and items written as they come: a part in memory, the rest on the disk.

    with RowWriter(folder, "image", dims, "fp16", count) as rows, ItemWriter(folder, ...) as items:
        rows.add(turned); items.add(...)

What stays in memory besides is 8 bytes an item (the hash of its id), 4 a row and coarse level (the
norms), and 8 more while hashes are sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.backends.rows import LevelRows, StoredArray
from hivlp.index.candidates import RowArray
from hivlp.index.errors import CorpusError
from hivlp.index.level_index import RowsType
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import HashArray
from hivlp.models.levels import NORM_EPSILON, FloatArray, Modality

ID_HASH_BYTES = 8


class RowWriter:
    """rows.npy and inverse_norms.npy of one side."""

    def __init__(
        self, folder: Path, side: Modality, dims: Sequence[int], rows_type: RowsType, expected: int
    ) -> None:
        """`expected` is about how many rows there will be."""
        (folder / side).mkdir()
        self._folder, self._side, self._dims = folder, side, tuple(dims)
        self._dtype = np.dtype("<f2" if rows_type == "fp16" else "<f4")
        self._path = folder / layout.rows_file(side, "nested", len(dims))
        self._stream = self._path.open("wb")
        self._norms: list[FloatArray] = []
        self.count = expected
        self._head = self._write_header()
        self.count = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def add(self, rows: FloatArray) -> None:
        """(n, D) float32 unit rows, rotated."""
        stored = np.ascontiguousarray(rows, dtype=self._dtype)
        self._stream.write(stored.data)
        read_back = stored.astype(np.float32, copy=False)
        self._norms.append(_inverse_norms(read_back, self._dims))
        self.count += len(rows)

    def finish(self) -> dict[int, LevelRows]:
        """Say in the header how many rows there are; the levels, memory-mapped."""
        self._stream.seek(0)
        head = self._write_header()
        assert head == self._head, "numpy leaves room for the first axis to grow"
        self._stream.close()
        mapped = np.load(self._path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        matrix = cast(StoredArray, mapped)
        if len(self._dims) == 1:
            return {1: LevelRows(matrix, self._dims[0])}
        norms = np.concatenate(self._norms, axis=1)
        np.save(self._folder / layout.norms_file(self._side), norms, allow_pickle=False)
        levels = {
            level: LevelRows(matrix, dim, norms[level - 1])
            for level, dim in enumerate(self._dims[:-1], start=1)
        }
        return {**levels, len(self._dims): LevelRows(matrix, self._dims[-1])}

    def _write_header(self) -> int:
        header = {
            "descr": self._dtype.str,
            "fortran_order": False,
            "shape": (self.count, self._dims[-1]),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)
        return self._stream.tell()


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of a file that became items one after the other: `rows` are their numbers there."""

    first: int
    file: str
    rows: RowArray | range


class ItemWriter:
    """items.arrow, the id index and, for texts, texts.arrow."""

    def __init__(self, folder: Path, schema: Any, side: Modality) -> None:
        self._folder = folder
        self._schema = schema
        self._items = pa.ipc.new_file(str(folder / layout.ITEMS), schema)
        self._texts = None
        if side == "text":
            self._text_schema = pa.schema([("text", pa.string())])
            self._texts = pa.ipc.new_file(str(folder / layout.TEXTS), self._text_schema)
        self._hashes: list[HashArray] = []
        self._runs: list[_Run] = []
        self.count = 0

    def __enter__(self) -> ItemWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._items.close()
        if self._texts is not None:
            self._texts.close()

    def add(self, columns: Sequence[Any], texts: Any | None, file: str, rows: RowArray) -> None:
        """Items in the schema's columns, ids first; `rows` are their numbers in `file`."""
        batch = pa.record_batch(list(columns), schema=self._schema)
        self._items.write_batch(batch)
        if self._texts is not None:
            self._texts.write_batch(pa.record_batch([texts], schema=self._text_schema))
        self._hashes.append(id_hashes(batch.column(0)))
        whole = len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1
        kept = range(int(rows[0]), int(rows[-1]) + 1) if whole else rows
        self._runs.append(_Run(self.count, file, kept))
        self.count += batch.num_rows

    def write_index(self, table: Any) -> None:
        """The id index of the closed `table` of items. Raises CorpusError for an id that is there
        twice, with both places.
        """
        hashes = np.concatenate(self._hashes)
        self._hashes.clear()
        order = np.argsort(hashes, kind="stable").astype(np.int64)
        ascending = hashes[order]
        self._check_unique(ascending, order, table.column(0))
        np.save(self._folder / layout.ITEM_HASHES, ascending, allow_pickle=False)
        np.save(self._folder / layout.ITEM_ORDINALS, order, allow_pickle=False)

    def _check_unique(self, hashes: HashArray, ordinals: RowArray, ids: Any) -> None:
        for place in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            # Equal hashes lie together, as many as there are: each is held against all before it.
            last, first = place + 1, place
            while first >= 0 and hashes[first] == hashes[last]:
                a, b = int(ordinals[first]), int(ordinals[last])
                if ids[a].as_py() == ids[b].as_py():
                    here, there = self.place(max(a, b)), self.place(min(a, b))
                    raise CorpusError(here, f"id {ids[a].as_py()!r} is there twice: also {there}")
                first -= 1

    def place(self, ordinal: int) -> str:
        """Where an item came from."""
        firsts = [run.first for run in self._runs]
        run = self._runs[int(np.searchsorted(firsts, ordinal, side="right")) - 1]
        return f"{run.file} row {int(run.rows[ordinal - run.first])}"


def id_hashes(ids: Any) -> HashArray:
    """What `catalogue.id_hash` says of each of an Arrow array's strings: (n,) uint64."""
    blake2b = hashlib.blake2b
    texts = ids.cast(pa.binary()).to_pylist()
    joined = b"".join([blake2b(text, digest_size=ID_HASH_BYTES).digest() for text in texts])
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64)


def _inverse_norms(rows: FloatArray, dims: Sequence[int]) -> FloatArray:
    """1 / length of each coarse level's prefix: (L - 1, n) float32; 0 for a prefix of zeros."""
    squares: npt.NDArray[np.float32] = np.zeros(len(rows), np.float32)
    found = np.empty((len(dims) - 1, len(rows)), np.float32)
    for place, (begin, end) in enumerate(zip((0, *dims), dims[:-1], strict=False)):
        part = rows[:, begin:end]
        squares += np.einsum("ij,ij->i", part, part)
        norms = np.sqrt(squares)
        found[place] = 1.0 / np.where(norms > NORM_EPSILON, norms, np.inf)
    return found

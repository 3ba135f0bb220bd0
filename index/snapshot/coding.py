"""Coded columns, written in bounded memory.

A column comes in parts. Each part's different values, sorted, are a run, and its items' values are
numbered within the run; both go to a scratch file. All runs are then read side by side, range of
values by range, which gives every different value its number in the whole column; last, each part
is read again with the final numbers. In memory are, for every value that an item has, 8 bytes (the
list `items`), for every different value of a part 8 more, for every different value 16, and for
different numbers and dates themselves another 16; besides, one part and one range.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.candidates import RowArray
from hivlp.index.snapshot.catalogue import stored_column, table_writer
from hivlp.index.snapshot.coded_files import (
    FOLDER,
    Kind,
    coded_file,
    kind_of,
    number_values,
    save_part,
)
from hivlp.index.snapshot.scratch import Scratch, Span

PART = 65_536
"""Items numbered at a time."""
BLOCK = 1_024
BLOCK_BYTES = 256 * 2**10
"""Values of a run that are read at a time, and about how many bytes of them."""
KEY_BYTES = 1_024
"""How much of a block's first text is remembered, to cut ranges by: any text will do for that, and
only texts that begin with as many equal bytes can't be cut apart."""
RANGE = 64
"""A range ends after so many beginnings of blocks; it may hold a block of every run besides."""
Parts = Iterable[Any]
"""A column in the order of items: pyarrow Arrays of one type."""


@dataclass(frozen=True, slots=True)
class _Part:
    """`owners` (n,) uint32 within the part and `numbers` (n,) uint32 within the run, in items'
    order; the run's values in blocks, each with its first value's key, or how that begins.
    """

    items: int
    owners: Span
    numbers: Span
    blocks: Sequence[tuple[Any, Span]]


def write_coded(folder: Path, table: Any, names: Sequence[str]) -> None:
    """Write the coded form of a table's named columns: some files a column, by its place."""
    columns = {name: _cut(table.column(name).chunks) for name in names}
    _write_all(folder, {n: (table.schema.field(n).type, parts) for n, parts in columns.items()})


def write_coded_file(folder: Path, path: Path, names: Sequence[str]) -> None:
    """The same for columns of an Arrow IPC file, of which one record batch is read at a time."""
    with pa.OSFile(str(path), "rb") as source:
        schema = pa.ipc.open_file(source).schema
    columns = {name: _cut(stored_column(path, name)) for name in names}
    _write_all(folder, {n: (schema.field(n).type, parts) for n, parts in columns.items()})


def _write_all(folder: Path, columns: dict[str, tuple[Any, Parts]]) -> None:
    (folder / FOLDER).mkdir()
    for place, (kind, parts) in enumerate(columns.values()):
        with Scratch(folder) as scratch:
            _Column(folder, place, kind, scratch).write(parts)


def _cut(chunks: Iterable[Any]) -> Iterator[Any]:
    for chunk in chunks:
        for start in range(0, len(chunk), PART):
            yield chunk.slice(start, PART)


class _Column:
    def __init__(self, folder: Path, place: int, column_type: Any, scratch: Scratch) -> None:
        self._folder = folder
        self._place = place
        self._kind = kind_of(column_type)
        self._scratch = scratch
        self._type = _VALUE_TYPES.get(self._kind, column_type)
        self._key = _key_of(self._kind)

    def write(self, parts: Parts) -> None:
        numbered = [self._number(part) for part in parts]
        path = coded_file(self._folder, self._place, "values.arrow")
        mappings, count = self._merge(numbered, path)
        starts = self._starts(numbered, mappings, count)
        save_part(self._folder, self._place, "starts", starts)
        items = self._items(numbered, mappings, starts)
        save_part(self._folder, self._place, "items", items)

    def _number(self, part: Any) -> _Part:
        """One part's run and numbers, to the scratch file."""
        values, owners, numbers = number_values(part)
        if self._kind == "date":
            values = values.cast(pa.int64())
        blocks = []
        size = max(1, min(BLOCK, BLOCK_BYTES * len(values) // max(values.nbytes, 1)))
        for start in range(0, len(values), size):
            block = values.slice(start, size)
            batch = pa.RecordBatch.from_arrays([block], names=["value"])
            first = self._key(block[0])
            first = first[:KEY_BYTES] if isinstance(first, bytes) else first
            blocks.append((first, self._scratch.append(batch.serialize())))
        keep = self._scratch.append_array
        return _Part(
            len(part), keep(owners.astype(np.uint32)), keep(numbers.astype(np.uint32)), blocks
        )

    def _merge(self, parts: Sequence[_Part], path: Path) -> tuple[list[RowArray], int]:
        """Write all different values in order; for each part its numbers in them, and the count."""
        stored = pa.timestamp("us", "UTC") if self._kind == "date" else self._type
        runs = [_Run(self._blocks(part), self._key) for part in parts]
        found: list[list[RowArray]] = [[] for _ in runs]
        count = 0
        whole: list[Any] = []
        with table_writer(path, pa.schema({"value": stored})) as writer:
            for end in [*_ends(parts), None]:
                pieces = [run.until(end) for run in runs]
                merged, numbers = _merged([piece for piece in pieces if piece is not None])
                if merged is None:
                    continue
                at = 0
                for mapping, piece in zip(found, pieces, strict=True):
                    if piece is not None:
                        mapping.append(numbers[at : at + len(piece)] + count)
                        at += len(piece)
                count += len(merged)
                merged = merged.cast(stored)
                if self._kind in ("text", "list"):
                    writer.write_batch(pa.RecordBatch.from_arrays([merged], names=["value"]))
                else:  # of one width: searched as one array, which must not need a copy
                    whole.append(merged)
            if whole:
                batch = pa.RecordBatch.from_arrays([pa.concat_arrays(whole)], names=["value"])
                writer.write_batch(batch)
        empty = np.zeros(0, dtype=np.int64)
        return [np.concatenate(m) if m else empty for m in found], count

    def _starts(self, parts: Sequence[_Part], mappings: Sequence[RowArray], count: int) -> RowArray:
        """Where each value's items begin, (count + 1,); writes the codes on the way."""
        starts = np.zeros(count + 1, dtype=np.int64)
        if self._kind == "list":
            for part, mapping in zip(parts, mappings, strict=True):
                np.add.at(starts, mapping[self._numbers(part)] + 1, 1)
            return np.cumsum(starts, out=starts)
        total = sum(part.items for part in parts)
        narrow = np.dtype(np.min_scalar_type(count + 1))
        path = coded_file(self._folder, self._place, "codes.npy")
        with path.open("wb") as stream:
            header = {"descr": narrow.str, "fortran_order": False, "shape": (total,)}
            np.lib.format.write_array_header_1_0(stream, header)
            for part, mapping in zip(parts, mappings, strict=True):
                final = mapping[self._numbers(part)] + 1
                np.add.at(starts, final, 1)
                codes = np.zeros(part.items, dtype=narrow)
                codes[self._scratch.read_array(part.owners, np.uint32)] = final
                stream.write(codes.data)
        return np.cumsum(starts, out=starts)

    def _items(
        self, parts: Sequence[_Part], mappings: Sequence[RowArray], starts: RowArray
    ) -> RowArray:
        """The items of each value, one value after the other, ascending."""
        items = np.empty(int(starts[-1]), dtype=np.int64)
        cursor = starts[:-1].copy()
        base = 0
        for part, mapping in zip(parts, mappings, strict=True):
            final = mapping[self._numbers(part)]
            order = np.argsort(final, kind="stable")
            final = final[order]
            values, first, counts = np.unique(final, return_index=True, return_counts=True)
            within = np.arange(len(final)) - np.repeat(first, counts)
            owners = self._scratch.read_array(part.owners, np.uint32)
            items[cursor[final] + within] = owners[order].astype(np.int64) + base
            cursor[values] += counts
            base += part.items
        return items

    def _numbers(self, part: _Part) -> npt.NDArray[Any]:
        return self._scratch.read_array(part.numbers, np.uint32)

    def _blocks(self, part: _Part) -> Iterator[tuple[Any, Callable[[], Any]]]:
        schema = pa.schema({"value": self._type})

        def read(span: Span) -> Any:
            data = pa.py_buffer(self._scratch.read(span))
            return pa.ipc.read_record_batch(data, schema).column(0)

        for first, span in part.blocks:
            yield first, partial(read, span)


class _Run:
    """The sorted values of one part, taken from the front."""

    def __init__(
        self, blocks: Iterator[tuple[Any, Callable[[], Any]]], key: Callable[[Any], Any]
    ) -> None:
        self._blocks = blocks
        self._key = key
        self._left: Any = None
        self._next = next(blocks, None)

    def until(self, end: Any) -> Any:
        """The values before `end` (None: all that are left) as one Array, or None."""
        taken = []
        while True:
            if self._left is None or not len(self._left):
                if self._next is None or (end is not None and self._next[0] >= end):
                    break
                self._left = self._next[1]()
                self._next = next(self._blocks, None)
            size = len(self._left)
            place = size if end is None else bisect.bisect_left(self._left, end, key=self._key)
            taken.append(self._left.slice(0, place))
            self._left = self._left.slice(place)
            if place < size:
                break
        return pa.concat_arrays(taken) if taken else None


def _ends(parts: Sequence[_Part]) -> list[Any]:
    """Values at which ranges end, ascending: beginnings of blocks, few enough between two."""
    return sorted(first for part in parts for first, _ in part.blocks)[RANGE::RANGE]


def _merged(pieces: Sequence[Any]) -> tuple[Any, RowArray]:
    """The different values of some sorted Arrays in order, and the place in them of each value."""
    if not pieces:
        return None, np.zeros(0, dtype=np.int64)
    coded = pa.concat_arrays(pieces).dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy(zero_copy_only=False)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return coded.dictionary.take(pa.array(order)), rank[coded.indices.to_numpy()]


_VALUE_TYPES: dict[Kind, Any] = {
    "text": pa.large_string(),
    "list": pa.large_string(),
    "boolean": pa.bool_(),
    "date": pa.int64(),
}


def _key_of(kind: Kind) -> Callable[[Any], Any]:
    if kind in ("text", "list"):
        return lambda value: value.as_py().encode()
    return lambda value: value.as_py()

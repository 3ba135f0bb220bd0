"""Items of a snapshot: id to ordinal and back, metadata, captions; memory-mapped Arrow.

An id is found by a binary search over 64-bit hashes, so a catalogue of any size opens at once and
needs no dictionary in memory; two ids of one hash are told apart by looking at both.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.candidates import RowArray
from hivlp.index.errors import NoSuchItem, PlanError
from hivlp.index.snapshot import layout

HashArray = npt.NDArray[np.uint64]
ID, IMAGE = "id", "image"
OWN_COLUMNS = (ID, IMAGE)
NO_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowException)
"""What pyarrow raises for a cell that Python has no value for; LookupError: an unknown zone."""


class Catalogue:
    """`table` has the columns `id`, `image` (both string; image may be null) and metadata."""

    def __init__(self, table: Any, hashes: HashArray, ordinals: RowArray) -> None:
        self._table = table
        self._ids = table.column(ID)
        self._images = table.column(IMAGE)
        self._hashes = hashes
        self._ordinals = ordinals
        self.metadata_names: tuple[str, ...] = tuple(
            name for name in table.column_names if name not in OWN_COLUMNS
        )

    @property
    def table(self) -> Any:
        """The Arrow table, memory-mapped."""
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def ordinal(self, item_id: str) -> int:
        """Position of an item, from 0. Raises NoSuchItem."""
        wanted = id_hash(item_id)
        place = int(np.searchsorted(self._hashes, np.uint64(wanted)))
        while place < len(self._hashes) and int(self._hashes[place]) == wanted:
            ordinal = int(self._ordinals[place])
            if self._ids[ordinal].as_py() == item_id:
                return ordinal
            place += 1
        raise NoSuchItem(item_id)

    def holds(self, item_id: str) -> bool:
        """Whether an item has this id."""
        try:
            self.ordinal(item_id)
        except NoSuchItem:
            return False
        return True

    def holds_any(self, hashes: HashArray) -> bool:
        """Whether an item has an id of one of these hashes, (n,)."""
        begins = np.searchsorted(self._hashes, hashes, side="left")
        return bool((np.searchsorted(self._hashes, hashes, side="right") > begins).any())

    def known(self, item_ids: Sequence[str], hashes: HashArray) -> RowArray:
        """Ordinals of those of some ids that it holds, unordered; `hashes` are theirs, (n,)."""
        begins = np.searchsorted(self._hashes, hashes, side="left")
        ends = np.searchsorted(self._hashes, hashes, side="right")
        found = [
            int(self._ordinals[place])
            for i in np.flatnonzero(ends > begins).tolist()
            for place in range(int(begins[i]), int(ends[i]))
            if self._ids[int(self._ordinals[place])].as_py() == item_ids[i]
        ]
        return np.array(found, dtype=np.int64)

    def ids(self, ordinals: RowArray) -> list[str]:
        """Ids at given positions."""
        return [self._ids[int(ordinal)].as_py() for ordinal in ordinals]

    def image_ref(self, item_id: str) -> str | None:
        """The picture's reference as the corpus gave it, or None. Raises NoSuchItem."""
        found: str | None = self._images[self.ordinal(item_id)].as_py()
        return found

    def metadata(
        self, item_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """All or the named columns of given items, in order; null values are left out.

        Raises NoSuchItem, and PlanError for a column that the catalogue lacks.
        """
        wanted = self.metadata_names if names is None else tuple(names)
        unknown = [name for name in wanted if name not in self.metadata_names]
        if unknown:
            raise PlanError(
                f"no metadata column {unknown[0]!r}; there are {list(self.metadata_names)}",
                param="with_metadata",
            )
        columns = {name: self._table.column(name) for name in wanted}
        ordinals = [self.ordinal(item_id) for item_id in item_ids]
        return [_values(columns, ordinal) for ordinal in ordinals]

    def column(self, name: str) -> list[Any]:
        """One metadata column for every item. Raises PlanError for an unknown name."""
        if name not in self.metadata_names:
            raise PlanError(f"no metadata column {name!r}", param="metadata")
        column = self._table.column(name)
        try:
            values: list[Any] = column.to_pylist()
        except NO_VALUE:
            values = [_value(cell) for cell in column]
        return values

    def images(self) -> list[str | None]:
        """Every item's picture reference."""
        refs: list[str | None] = self._images.to_pylist()
        return refs


def id_hash(item_id: str) -> int:
    """64-bit hash of an id: the first 8 bytes, little-endian, of its BLAKE2b-64."""
    return int.from_bytes(hashlib.blake2b(item_id.encode(), digest_size=8).digest(), "little")


def id_index(ids: Iterable[str]) -> tuple[HashArray, RowArray]:
    """Hashes in ascending order, (n,) uint64, and the ordinal of each, (n,) int64."""
    return hash_index(array("Q", (id_hash(item_id) for item_id in ids)))


def hash_index(hashes: Any) -> tuple[HashArray, RowArray]:
    """The same of the hashes of ids in the order of items: anything with the buffer protocol."""
    found = np.frombuffer(hashes, dtype=np.uint64) if len(hashes) else np.zeros(0, dtype=np.uint64)
    order = np.argsort(found, kind="stable").astype(np.int64)
    return found[order], order


def open_catalogue(folder: Path) -> Catalogue:
    """A snapshot's items, mapped. Raises OSError, ValueError, pyarrow.ArrowInvalid."""
    hashes, ordinals = (
        np.load(folder / name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        for name in (layout.ITEM_HASHES, layout.ITEM_ORDINALS)
    )
    return Catalogue(open_table(folder / layout.ITEMS), hashes, ordinals)


def open_table(path: Path) -> Any:
    """Memory-map an Arrow IPC file as a table. Raises OSError, pyarrow.ArrowInvalid."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def write_table(path: Path, table: Any) -> None:
    """Write an Arrow IPC file, uncompressed so that it can be memory-mapped."""
    with table_writer(path, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def table_writer(path: Path, schema: Any) -> Iterator[Any]:
    """Write such a file batch by batch: a pyarrow RecordBatchFileWriter."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        yield writer


def stored_column(path: Path, name: str) -> Iterator[Any]:
    """The parts of one column of an Arrow IPC file, read, not mapped: one at a time in memory."""
    with pa.OSFile(str(path), "rb") as source:
        place = pa.ipc.open_file(source).schema.get_field_index(name)
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[place]))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).column(0)


def _values(columns: dict[str, Any], ordinal: int) -> dict[str, Any]:
    found = {name: _value(column[ordinal]) for name, column in columns.items()}
    return {name: value for name, value in found.items() if value is not None}


def _value(cell: Any) -> Any:
    """A cell as Python's value, None where Python has none, as for a year after 9999.

    Bytes that are no UTF-8 become question marks. A version of any age is read by requests that
    must not fail for one value of it.
    """
    try:
        return cell.as_py()
    except NO_VALUE:
        if pa.types.is_string(cell.type):
            return bytes(cell.as_buffer()).decode("utf-8", "replace")
        return [_value(part) for part in cell.values] if pa.types.is_list(cell.type) else None

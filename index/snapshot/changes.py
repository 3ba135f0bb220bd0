"""Items that came, changed or went since the levels of a version were built: one file a segment.

    name = write_segment(folder, change_table(numbered, shape))      # changes/<first>-<last>.arrow
    segment = open_segment(folder, name, shape)

A segment speaks of items by their ids, never by their rows, so the same file fits whatever levels
stand beside it: a version with one change more shares all other files with the version before, and
a build that was overtaken by changes takes them over as they are. A later change of an id replaces
the earlier one. Vectors are mapped, not read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import RowArray
from hivlp.index.masks import BoolArray
from hivlp.index.snapshot.catalogue import HashArray, id_hash, open_table, write_table
from hivlp.index.snapshot.manifest import SegmentRecord
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec, Modality

FOLDER = "changes"
SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),
        ("id", pa.string()),
        ("hash", pa.uint64()),
        ("deleted", pa.bool_()),
        ("own", pa.string()),
        ("image", pa.string()),
        ("metadata", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("image_vector", pa.list_(pa.float32())),
        ("text_vectors", pa.large_list(pa.float32())),
        ("keys", pa.list_(pa.binary())),
        ("uploads", pa.list_(pa.string())),
    ]
)
_EVER = ("keys", "uploads")
"""Columns that a later change of an item adds to."""


@dataclass(frozen=True, slots=True)
class Upsert:
    """An item as it is from now on, encoded: everything it was before is forgotten.

    `image_vector` (W,) float32 or None, `text_vectors` (n, W), one a text: rows as the gallery
    keeps them, of W numbers (`Shape.width`). `image` is the picture's reference. `own`: the vectors
    were given, not encoded: the gallery space that they lie in. `keys` are those of its vectors in
    the embedding cache, `uploads` its pictures': where it has left something, should it be erased.
    """

    id: str
    image: str | None = None
    texts: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image_vector: FloatArray | None = None
    text_vectors: FloatArray | None = None
    own: str | None = None
    keys: tuple[bytes, ...] = ()
    uploads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """An item that is there no longer, wherever it came from."""

    id: str


Change = Upsert | Delete


@dataclass(frozen=True, slots=True)
class Shape:
    """How a gallery cuts vectors into levels."""

    levels: tuple[LevelSpec, ...]
    gallery: GalleryKind

    @property
    def width(self) -> int:
        """Numbers of one row: the finest level's when nested, all levels' when per_exit."""
        dims = [spec.dim for spec in self.levels]
        return dims[-1] if self.gallery == "nested" else sum(dims)

    def cut(self, matrix: FloatArray) -> dict[int, LevelRows]:
        """The rows of every level of (n, width) float32."""
        found: dict[int, LevelRows] = {}
        start, finest = 0, self.levels[-1]
        for spec in self.levels:
            if self.gallery == "nested":
                norms = inverse_norms(matrix, spec.dim) if spec is not finest else None
                found[spec.level] = LevelRows(matrix, spec.dim, norms)
            else:
                own = np.ascontiguousarray(matrix[:, start : start + spec.dim])
                found[spec.level] = LevelRows(own, spec.dim)
                start += spec.dim
        return found


@dataclass(frozen=True, slots=True)
class SegmentSide:
    """Rows of one side: `owners` (n,) int64 are the places, in the segment, of their items."""

    rows: Mapping[int, LevelRows]
    owners: RowArray
    texts: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.owners)


class Segment:
    """An opened segment: changes in the order they were made, each id once.

    What is worked out of its table is worked out when first needed, and kept. `lazy` is for what
    others work out of it, over one and the same catalogue.
    """

    def __init__(self, name: str, table: Any, shape: Shape | None) -> None:
        """`shape` None: it can only be read, not searched."""
        self.name = name
        self.table = table
        self.lazy: dict[str, Any] = {}
        self._shape = shape

    @property
    def size(self) -> int:
        """Number of changes."""
        return int(self.table.num_rows)

    @cached_property
    def id_column(self) -> Any:
        """The ids, as an Arrow array."""
        return one_chunk(self.table.column("id"))

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The ids."""
        return tuple(self.id_column.to_pylist())

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where each id stands."""
        return {item_id: place for place, item_id in enumerate(self.ids)}

    @cached_property
    def hashes(self) -> HashArray:
        """(n,) uint64: the ids' hashes, as in a catalogue."""
        return cast(HashArray, one_chunk(self.table.column("hash")).to_numpy())

    @cached_property
    def deleted(self) -> BoolArray:
        """(n,): which changes are deletions."""
        return cast(
            BoolArray, one_chunk(self.table.column("deleted")).to_numpy(zero_copy_only=False)
        )

    @cached_property
    def sides(self) -> Mapping[Modality, SegmentSide]:
        """Its rows by side. Raises ValueError where they are not those of its shape."""
        return {} if self._shape is None else _sides(self.table, self._shape)

    def image(self, place: int) -> str | None:
        """Reference of an item's picture."""
        found: str | None = self.table.column("image")[place].as_py()
        return found

    def metadata(self, place: int) -> dict[str, Any]:
        """An item's metadata, as JSON has it: dates are texts."""
        found: dict[str, Any] = json.loads(self.table.column("metadata")[place].as_py() or "{}")
        return found

    def change(self, place: int) -> Change:
        """One change, as it was written; `text_vectors` (n, W)."""
        row = {name: self.table.column(name)[place].as_py() for name in _PLAIN}
        if row["deleted"]:
            return Delete(row["id"])
        texts = tuple(row["texts"] or ())
        rows = self._vectors("text_vectors", place)
        return Upsert(
            row["id"],
            row["image"],
            texts,
            self.metadata(place),
            self._vectors("image_vector", place),
            None if rows is None else rows.reshape(len(texts), -1),
            row["own"],
            tuple(row["keys"] or ()),
            tuple(row["uploads"] or ()),
        )

    def left(self, place: int) -> tuple[list[bytes], list[str]]:
        """Keys of vectors in the embedding cache, and uploads, that an item ever had here."""
        keys, uploads = (self.table.column(name)[place].as_py() or [] for name in _EVER)
        return keys, uploads

    def _vectors(self, name: str, place: int) -> FloatArray | None:
        value = self.table.column(name)[place].values
        if value is None or not len(value):
            return None
        return cast(FloatArray, value.to_numpy(zero_copy_only=False).astype(np.float32, copy=False))


_PLAIN = ("id", "deleted", "own", "image", "texts", *_EVER)


def segment_name(first: int, last: int) -> str:
    """The file of the changes from one sequence number to another, relative to the snapshot."""
    return f"{FOLDER}/{first:019d}-{last:019d}.arrow"


def next_number(last: int) -> int:
    """A sequence number after `last`, and after all that were ever given, here or elsewhere.

    Nanoseconds of the clock: so that a version that is gone back to never gives a number again.
    """
    return max(last + 1, time.time_ns())


def change_table(numbered: Iterable[tuple[int, Change]], shape: Shape) -> Any:
    """Changes with their sequence numbers, ascending, as an Arrow table of `SCHEMA`."""
    values = [
        (
            number,
            change.id,
            id_hash(change.id),
            isinstance(change, Delete),
            *_values(change, shape.width),
        )
        for number, change in numbered
    ]
    columns = zip(*values, strict=True) if values else ([] for _ in SCHEMA)
    arrays = [pa.array(list(c), type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def joined(older: Any, newer: Any) -> Any:
    """A table of changes and one of later ones as one table: the last change of each id.

    What a replaced change had left elsewhere is added to the one that replaces it.
    """
    again = pc.is_in(older.column("id"), value_set=newer.column("id"))
    replaced = older.filter(again).select(["id", *_EVER])
    if replaced.num_rows:
        newer = _inheriting(newer, replaced.to_pylist())
    return pa.concat_tables([older.filter(pc.invert(again)), newer])


def _inheriting(newer: Any, replaced: Sequence[Mapping[str, Any]]) -> Any:
    before = {row["id"]: row for row in replaced}
    ids = newer.column("id").to_pylist()
    for name in _EVER:
        values = [
            list(dict.fromkeys([*(before.get(item_id, {}).get(name) or []), *(own or [])]))
            for item_id, own in zip(ids, newer.column(name).to_pylist(), strict=True)
        ]
        place = newer.schema.get_field_index(name)
        newer = newer.set_column(
            place, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type)
        )
    return newer


def all_joined(segments: Iterable[Segment], after: int = 0) -> Any:
    """What holds of several segments, oldest first, as one table: numbers above `after` only."""
    found = SCHEMA.empty_table()
    for segment in segments:
        later = pc.greater(segment.table.column("sequence"), after)
        found = joined(found, segment.table.filter(later))
    return found


def without_vectors(table: Any) -> Any:
    """A table of changes without the vectors that an encoder can make again.

    For changes that are in the levels: they are kept for the next build, which encodes.
    """
    given = table.column("own").is_valid().to_numpy()
    kept = pa.array(np.arange(table.num_rows), mask=~given)
    for name in ("image_vector", "text_vectors"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), table.column(name).take(kept))
    return table


def without_ids(table: Any, ids: Iterable[str]) -> Any:
    """A table of changes without those of some items."""
    gone = pc.is_in(table.column("id"), value_set=pa.array(sorted(ids), pa.string()))
    return table.filter(pc.invert(gone))


def write_segment(folder: Path, table: Any) -> str:
    """Write a table of changes, oldest first; returns the file's name."""
    numbers = table.column("sequence")
    name = segment_name(numbers[0].as_py(), numbers[-1].as_py())
    (folder / FOLDER).mkdir(exist_ok=True)
    write_table(folder / name, table.combine_chunks())
    return name


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as they are kept."""
    return json.dumps(dict(metadata), ensure_ascii=False, sort_keys=True)


def record_of(table: Any, name: str) -> SegmentRecord:
    """What the manifest says of a segment's file."""
    numbers, deletes = table.column("sequence"), sum(table.column("deleted").to_pylist())
    return SegmentRecord(
        file=name,
        first=numbers[0].as_py(),
        last=numbers[-1].as_py(),
        upserts=table.num_rows - deletes,
        deletes=deletes,
    )


def _values(change: Change, width: int) -> tuple[Any, ...]:
    if isinstance(change, Delete):
        return (None,) * 8
    texts = np.empty((0, width), np.float32) if change.text_vectors is None else change.text_vectors
    texts = texts.reshape(-1, width)
    assert len(texts) == len(change.texts), (len(texts), len(change.texts))
    image = change.image_vector
    assert image is None or image.shape == (width,), image.shape
    metadata = metadata_text(change.metadata)
    vectors = (image, texts.reshape(-1))
    left = (list(change.keys), list(change.uploads))
    return (change.own, change.image, metadata, list(change.texts), *vectors, *left)


def read_segment(path: Path, name: str) -> Segment:
    """Map a segment to read what it says. Raises as `open_segment`."""
    return open_segment(path, name, None)


def open_segment(path: Path, name: str, shape: Shape | None) -> Segment:
    """Map a segment, to be searched in levels of this shape (None: only to be read).

    Raises OSError, pyarrow.ArrowInvalid, ValueError for what is none.
    """
    table = open_table(path / name)
    if not table.schema.equals(SCHEMA):
        raise ValueError("its columns are not those of a segment")
    if not table.num_rows:
        raise ValueError("it holds no change")
    segment = Segment(name, table, shape)
    assert isinstance(segment.sides, Mapping)  # looked at now, so that what is wrong is said now
    return segment


def one_chunk(column: Any) -> Any:
    """A column as one Arrow array; copied only where it lies in several."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _sides(table: Any, shape: Shape) -> dict[Modality, SegmentSide]:
    sides: dict[Modality, SegmentSide] = {}
    for side, column in (("image", "image_vector"), ("text", "text_vectors")):
        matrix, owners = _rows(table.column(column), shape.width)
        if len(owners):
            own = _texts_of(table, owners) if side == "text" else ()
            sides[cast(Modality, side)] = SegmentSide(shape.cut(matrix), owners, own)
    return sides


def _texts_of(table: Any, owners: RowArray) -> tuple[str, ...]:
    """The text of each row. Raises ValueError for an item with other texts than vectors."""
    counts = np.bincount(owners, minlength=table.num_rows)
    found: list[str] = []
    for place, texts in enumerate(table.column("texts").to_pylist()):
        if counts[place] and len(texts or ()) != counts[place]:
            raise ValueError(f"{len(texts or ())} texts for {counts[place]} text vectors")
        found += texts if counts[place] else ()
    return tuple(found)


def _rows(column: Any, width: int) -> tuple[FloatArray, RowArray]:
    """The vectors of a list column as (n, width), and the place of the item of each."""
    chunk = one_chunk(column)
    lengths = chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    if (lengths % width).any():
        raise ValueError(f"a vector has not the {width} numbers of this index")
    flat = chunk.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(flat).all():
        raise ValueError("a vector holds NaN or Inf")
    owners = np.repeat(np.arange(len(chunk)), lengths // width).astype(np.int64)
    return flat.reshape(-1, width), owners


def last_changes(segments: Iterable[Segment], after: int = 0) -> Iterator[tuple[int, Change]]:
    """What holds of several segments, oldest first: the last change of each id, by its number.

    Only changes with a sequence number above `after`.
    """
    latest: dict[str, tuple[int, Segment, int]] = {}
    for segment in segments:
        numbers = segment.table.column("sequence").to_pylist()
        for place, (item_id, number) in enumerate(zip(segment.ids, numbers, strict=True)):
            if number > after:
                latest.pop(item_id, None)
                latest[item_id] = (number, segment, place)
    for number, segment, place in latest.values():
        yield number, segment.change(place)

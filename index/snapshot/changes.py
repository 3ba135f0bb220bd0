"""Items that came, changed or went since the levels of a version were built: one file a segment.

    name = write_segment(folder, table)      # changes/<first>-<last>.arrow; see change_tables.py
    segment = open_segment(folder, name, shape)

A segment speaks of items by their ids, never by their rows, so the same file fits whatever levels
stand beside it: a version with one change more shares all other files with the version before, and
a build that was overtaken by changes takes them over as they are. A later change of an id replaces
the earlier one. Vectors are mapped, not read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import RowArray
from hivlp.index.masks import BoolArray
from hivlp.index.snapshot.catalogue import HashArray, open_table, write_table
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
EVER = ("keys", "uploads")
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
        keys, uploads = (self.table.column(name)[place].as_py() or [] for name in EVER)
        return keys, uploads

    def _vectors(self, name: str, place: int) -> FloatArray | None:
        value = self.table.column(name)[place].values
        if value is None or not len(value):
            return None
        return cast(FloatArray, value.to_numpy(zero_copy_only=False).astype(np.float32, copy=False))


_PLAIN = ("id", "deleted", "own", "image", "texts", *EVER)


def segment_name(first: int, last: int) -> str:
    """The file of the changes from one sequence number to another, relative to the snapshot."""
    return f"{FOLDER}/{first:019d}-{last:019d}.arrow"


def next_number(last: int) -> int:
    """A sequence number after `last`, and after all that were ever given, here or elsewhere.

    Nanoseconds of the clock: so that a version that is gone back to never gives a number again.
    """
    return max(last + 1, time.time_ns())


def write_segment(folder: Path, table: Any) -> str:
    """Write a table of changes, oldest first; returns the file's name."""
    numbers = table.column("sequence")
    name = segment_name(numbers[0].as_py(), numbers[-1].as_py())
    (folder / FOLDER).mkdir(exist_ok=True)
    write_table(folder / name, table.combine_chunks())
    return name


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

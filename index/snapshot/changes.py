"""Items that came, changed or went since the levels of a version were built: one file a segment.

    write_segment(folder, change_table(changes, 7, shape))      # changes/000000000007-...arrow
    segment = open_segment(folder, name, shape)

A segment speaks of items by their ids, never by their rows, so the same file fits whatever levels
stand beside it: a version with one change more shares all other files with the version before, and
a build that was overtaken by changes takes them over as they are. A later change of an id replaces
the earlier one. Vectors are mapped, not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import RowArray
from hivlp.index.masks import BoolArray
from hivlp.index.snapshot.catalogue import HashArray, id_hash, open_table, write_table
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec, Modality

FOLDER = "changes"
SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),
        ("id", pa.string()),
        ("deleted", pa.bool_()),
        ("own", pa.bool_()),
        ("image", pa.string()),
        ("metadata", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("image_vector", pa.list_(pa.float32())),
        ("text_vectors", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True)
class Upsert:
    """An item as it is from now on, encoded: everything it was before is forgotten.

    `image_vector` (W,) float32 or None, `text_vectors` (n, W), one a text: rows as the gallery
    keeps them, of W numbers (`Shape.width`). `image` is the picture's reference. `own`: the vectors
    were given, not encoded, and no encoder can make them again.
    """

    id: str
    image: str | None = None
    texts: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image_vector: FloatArray | None = None
    text_vectors: FloatArray | None = None
    own: bool = False


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


@dataclass(frozen=True, slots=True)
class Segment:
    """An opened segment: changes in the order they were made, `size` of them.

    `lazy` keeps what is worked out of it when first needed.
    """

    name: str
    ids: tuple[str, ...]
    hashes: HashArray
    deleted: BoolArray
    sides: Mapping[Modality, SegmentSide]
    table: Any
    lazy: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of changes."""
        return len(self.ids)

    @property
    def places(self) -> Mapping[str, int]:
        """Where each id stands."""
        known: Mapping[str, int] | None = self.lazy.get("places")
        if known is None:
            known = self.lazy["places"] = {name: place for place, name in enumerate(self.ids)}
        return known

    def image(self, place: int) -> str | None:
        """Reference of an item's picture."""
        found: str | None = self.table.column("image")[place].as_py()
        return found

    def metadata(self, place: int) -> dict[str, Any]:
        """An item's metadata, as JSON has it: dates are texts."""
        found: dict[str, Any] = json.loads(self.table.column("metadata")[place].as_py() or "{}")
        return found

    def change(self, place: int) -> Change:
        """One change, as it was written."""
        item_id = self.ids[place]
        if self.deleted[place]:
            return Delete(item_id)
        row = {name: self.table.column(name)[place].as_py() for name in ("image", "texts")}
        return Upsert(
            item_id,
            row["image"],
            tuple(row["texts"] or ()),
            self.metadata(place),
            self._vectors("image_vector", place),
            self._vectors("text_vectors", place),
            own=bool(self.table.column("own")[place].as_py()),
        )

    def _vectors(self, name: str, place: int) -> FloatArray | None:
        value = self.table.column(name)[place].values
        if value is None:
            return None
        return cast(FloatArray, value.to_numpy(zero_copy_only=False).astype(np.float32, copy=False))


def segment_name(first: int, last: int) -> str:
    """The file of the changes from one sequence number to another, relative to the snapshot."""
    return f"{FOLDER}/{first:012d}-{last:012d}.arrow"


def change_table(changes: Sequence[Change], first: int, shape: Shape) -> Any:
    """Changes as an Arrow table of `SCHEMA`, numbered from `first` on."""
    values = [
        (number, change.id, isinstance(change, Delete), *_values(change, shape.width))
        for number, change in enumerate(changes, start=first)
    ]
    columns = zip(*values, strict=True) if values else ([] for _ in SCHEMA)
    arrays = [pa.array(list(c), type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def joined(older: Any, newer: Any) -> Any:
    """A table of changes and one of later ones as one table: the last change of each id."""
    again = pc.is_in(older.column("id"), value_set=newer.column("id"))
    return pa.concat_tables([older.filter(pc.invert(again)), newer])


def without_vectors(table: Any) -> Any:
    """A table of changes without the vectors that an encoder can make again.

    For changes that are in the levels: they are kept for the next build, which encodes.
    """
    given = table.column("own").to_numpy()
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


def _values(change: Change, width: int) -> tuple[Any, ...]:
    if isinstance(change, Delete):
        return (False, *(None,) * 5)
    texts = np.empty((0, width), np.float32) if change.text_vectors is None else change.text_vectors
    texts = texts.reshape(-1, width)
    assert len(texts) == len(change.texts), (len(texts), len(change.texts))
    image = change.image_vector
    assert image is None or image.shape == (width,), image.shape
    metadata = json.dumps(dict(change.metadata), ensure_ascii=False, sort_keys=True)
    vectors = (image, texts.reshape(-1))
    return (change.own, change.image, metadata, list(change.texts), *vectors)


def open_segment(path: Path, name: str, shape: Shape) -> Segment:
    """Map a segment. Raises OSError, pyarrow.ArrowInvalid, ValueError for what is none."""
    table = open_table(path / name)
    if not table.schema.equals(SCHEMA):
        raise ValueError("its columns are not those of a segment")
    if not table.num_rows:
        raise ValueError("it holds no change")
    table = table.combine_chunks()
    ids = tuple(table.column("id").to_pylist())
    hashes = np.fromiter((id_hash(item_id) for item_id in ids), np.uint64, count=len(ids))
    deleted = table.column("deleted").to_numpy(zero_copy_only=False)
    sides: dict[Modality, SegmentSide] = {}
    for side, column in (("image", "image_vector"), ("text", "text_vectors")):
        matrix, owners = _rows(table.column(column), shape.width)
        if len(owners):
            texts = tuple(t for ts in table.column("texts").to_pylist() if ts for t in ts)
            own = texts if side == "text" else ()
            if side == "text" and len(own) != len(owners):
                raise ValueError(f"{len(own)} texts for {len(owners)} text vectors")
            sides[cast(Modality, side)] = SegmentSide(shape.cut(matrix), owners, own)
    return Segment(name, ids, hashes, deleted, sides, table)


def _rows(column: Any, width: int) -> tuple[FloatArray, RowArray]:
    """The vectors of a list column as (n, width), and the place of the item of each."""
    chunk = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    lengths = chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    if (lengths % width).any():
        raise ValueError(f"a vector has not the {width} numbers of this index")
    flat = chunk.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(flat).all():
        raise ValueError("a vector holds NaN or Inf")
    owners = np.repeat(np.arange(len(chunk)), lengths // width).astype(np.int64)
    return flat.reshape(-1, width), owners


def last_changes(segments: Iterable[Segment], after: int = 0) -> Iterator[Change]:
    """What holds of several segments, oldest first: the last change of each id.

    Only changes with a sequence number above `after`.
    """
    latest: dict[str, tuple[Segment, int]] = {}
    for segment in segments:
        numbers = segment.table.column("sequence").to_pylist()
        for place, (item_id, number) in enumerate(zip(segment.ids, numbers, strict=True)):
            if number > after:
                latest.pop(item_id, None)
                latest[item_id] = (segment, place)
    for segment, place in latest.values():
        yield segment.change(place)

"""Taking changes into a build: what was put or deleted since, over what the corpus says.

    folding = Folding.begin(store, "default")        # before the corpus is read
    ... build, with folding.overlay() ...
    publish_folded(store, made, folding)             # while nobody else can change the index

Changes outlive builds: the corpus doesn't know of them, so each build applies them again. Those
made while the build ran are carried over beside the new levels, encoded again where the model is
another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.errors import BuildError, CorpusError, SnapshotMissing
from hivlp.index.masks import BoolArray
from hivlp.index.pictures import read_picture
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.amend import Held, hold, turn
from hivlp.index.snapshot.catalogue import OWN_COLUMNS, open_table
from hivlp.index.snapshot.change_tables import (
    all_joined,
    change_table,
    last_changes,
    metadata_text,
    without_vectors,
)
from hivlp.index.snapshot.changes import (
    Change,
    Segment,
    Shape,
    Upsert,
    open_segment,
    record_of,
    write_segment,
)
from hivlp.index.snapshot.durable import sync_tree
from hivlp.index.snapshot.erasures import erased_since, is_erased, read_erased, short_hash
from hivlp.index.snapshot.manifest import (
    ChangesRecord,
    SegmentRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.metadata import MetadataError, fitted, loosened
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.staging import Staging
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.artifact import file_record
from hivlp.models.levels import FloatArray, Modality, normalise


class Encode(Protocol):
    """How changes get vectors of a space that is not the one they were made in."""

    @property
    def shape(self) -> Shape:
        """How the gallery that is built cuts vectors."""

    @property
    def gallery_space(self) -> str:
        """The space that is built."""

    def again(self, change: Upsert, held: Held, folding: Folding) -> Upsert | None:
        """The same item in this space, or None where that can't be."""


@dataclass(frozen=True, slots=True)
class ByModel:
    """With the model of the build, from texts and pictures."""

    workshop: Workshop

    @property
    def shape(self) -> Shape:
        """The model's."""
        return self.workshop.shape

    @property
    def gallery_space(self) -> str:
        """The model's."""
        return self.workshop.gallery_space

    def again(self, change: Upsert, held: Held, folding: Folding) -> Upsert | None:  # noqa: ARG002
        """Encoded anew; given vectors can't be."""
        picture = folding.picture_of(change)
        if change.own or isinstance(picture, BadItem):
            return None
        draft = Draft(change.id, change.texts, picture, change.metadata)
        (made,) = encode_drafts([draft], self.workshop)
        return made if isinstance(made, Upsert) else None


@dataclass(frozen=True, slots=True)
class ByTurning:
    """Turned back by the rotation of the import before, and by that of this one."""

    shape: Shape
    gallery_space: str
    rotation: FloatArray | None

    def again(self, change: Upsert, held: Held, folding: Folding) -> Upsert | None:  # noqa: ARG002
        """Turned, where both imports have vectors of as many numbers."""
        imported = held.manifest.imported
        if imported is None or imported.dim != self.shape.width:
            return None
        before = None
        if imported.rotated:
            before = np.load(held.path / layout.ROTATION, allow_pickle=False)
        if change.image_vector is None and change.text_vectors is None:
            return None
        image = self._turned(change.image_vector, before)
        texts = self._turned(change.text_vectors, before)
        own = self.gallery_space if change.own else None
        return replace(change, image_vector=image, text_vectors=texts, own=own)

    def _turned(self, rows: FloatArray | None, before: FloatArray | None) -> FloatArray | None:
        if rows is None or not rows.size:
            return rows
        found = np.atleast_2d(rows)
        if before is not None:
            found = found @ before.T
        if self.rotation is not None:
            found = found @ self.rotation
        return normalise(found).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class Folding:
    """The changes of an index, and what was erased of it, as they were when a build began.

    `beside`: the build takes none of the changes in; all are carried over beside its levels.
    `forget`: it takes none in, and those made before it are dropped.
    """

    store: SnapshotStore
    held: Held
    erased: Mapping[str, int]
    beside: bool = False
    forget: bool = False

    @staticmethod
    def begin(
        store: SnapshotStore, name: str, *, beside: bool = False, forget: bool = False
    ) -> Folding | None:
        """None for an index without a version. Raises SnapshotError."""
        erased = read_erased(store.folder(name))
        try:
            held = hold(store, name, whole=True)
        except SnapshotMissing:
            return None
        return Folding(store, held, erased, beside, forget)

    @property
    def last(self) -> int:
        """The sequence number of the last change that the build answers for."""
        return 0 if self.beside and not self.forget else self.held.changes.last

    @property
    def taken_in(self) -> tuple[Segment, ...]:
        """The segments whose changes are in the levels."""
        return () if self.beside or self.forget else self.held.segments

    def overlay(self, gallery_space: str, *, texts: bool = False) -> Overlay:
        """What of the corpus to leave out, and which items to add.

        `texts`: all values of the corpus's metadata are texts, as in CSV, so that those of the
        items added must be too.
        """
        latest: dict[str, bool] = {}  # whether it is an item, which comes after the corpus
        for segment in self.taken_in:
            numbers = segment.table.column("sequence").to_pylist()
            for item_id, number, gone in zip(segment.ids, numbers, segment.deleted, strict=True):
                latest[item_id] = not (gone or is_erased(item_id, number, self.erased))

        def hides(item_id: str) -> bool:
            return item_id in latest or (bool(self.erased) and short_hash(item_id) in self.erased)

        return Overlay(
            hides,
            self._items(gallery_space, texts),
            hidden=len(latest) + len(self.erased),
            added=sum(latest.values()),
        )

    def finish(
        self, folder: Path, version: str, types: Mapping[str, Any], encode: Encode
    ) -> tuple[ChangesRecord | None, list[str]]:
        """Write the changes of the version being built, those made meanwhile included.

        For whoever holds the index's turn, until the version is published. `types` are its metadata
        columns. Returns the record (None without changes), and notes on what could not be kept.
        Raises BuildError where something in `folder` was erased while it was built.
        """
        index = self.store.folder(self.held.manifest.index)
        erased = read_erased(index)
        hashes = np.load(folder / layout.ITEM_HASHES, mmap_mode="r", allow_pickle=False)
        if np.isin(erased_since(index, self.erased), hashes).any():
            raise BuildError(
                f"index {index.name!r}: items were erased while it was being built, and are in "
                "what was built: build it again"
            )
        now = hold(self.store, self.held.manifest.index, whole=True)
        notes: list[str] = []
        tables = [
            without_vectors(without_erased(all_joined(self.taken_in), erased)),
            self._later(now, types, encode, notes),
        ]
        records = [_write(folder, table) for table in tables if table.num_rows]
        if not records:
            return None, notes
        columns = {n: kind for n, kind in now.changes.columns.items() if n not in types}
        return (
            ChangesRecord(
                since=version, folded=self.last, segments=tuple(records), columns=columns
            ),
            notes,
        )

    def _later(self, now: Held, types: Mapping[str, Any], encode: Encode, notes: list[str]) -> Any:
        """The table of changes that are not in the levels, fit for what was built."""
        table = all_joined(now.segments, after=self.last)
        same = now.manifest.gallery_space == encode.gallery_space
        as_is = pc.or_(table.column("deleted"), pa.array(_has_vectors(table, same)))
        kept = _refitted(table.filter(as_is), types, notes)
        fresh: list[tuple[int, Change]] = []
        rest = Segment("", table.filter(pc.invert(as_is)), None)
        for number, change in last_changes([rest]):
            assert isinstance(change, Upsert), "deletions are kept as they are"
            again = encode.again(change, now, self)
            if again is None:
                notes.append(f"item {change.id!r} could not be carried over: no vector of it is")
            else:
                fresh.append((number, again))
        made = _refitted(change_table(fresh, encode.shape), types, notes)
        return pa.concat_tables([kept, made]).sort_by("sequence")

    def _items(self, gallery_space: str, texts: bool) -> Iterator[Item | BadItem]:
        for number, change in last_changes(self.taken_in):
            if isinstance(change, Upsert) and not is_erased(change.id, number, self.erased):
                yield self._item(change, gallery_space, texts)

    def _item(self, change: Upsert, gallery_space: str, texts: bool) -> Item | BadItem:
        if change.own not in (None, gallery_space):
            reason = "its vector is of another model's space, and can't be made again"
            return BadItem("changes", change.id, reason)
        picture = self.picture_of(change)
        if isinstance(picture, BadItem):
            return picture
        types = self.held.types
        metadata = {n: _as_read(v, types.get(n), texts) for n, v in change.metadata.items()}
        return Item(
            change.id,
            change.image,
            change.texts,
            metadata,
            picture,
            place="changes",
            vectors=_own_vectors(change),
        )

    def picture_of(self, change: Upsert) -> bytes | BadItem | None:
        """The bytes of an item's uploaded picture; None where it has none."""
        folder = self.store.folder(self.held.manifest.index)
        root, reference = picture_roots(folder, "").find(change.image)
        if root is None or reference is None or change.own:
            return None
        try:
            return read_picture(root, reference)
        except CorpusError as error:
            return BadItem("changes", change.id, f"its picture: {error.reason}")


@dataclass(frozen=True, slots=True)
class Made:
    """A version that is built but for its changes, and how those get vectors of its space."""

    staging: Staging
    manifest: SnapshotManifest
    encode: Encode


def publish_folded(
    store: SnapshotStore, made: Made, folding: Folding | None, *, activate: bool = True
) -> tuple[Path, list[str]]:
    """Publish a built version with the changes of its index; returns its folder, and notes.

    It is verified and flushed before anybody else must wait. Raises SnapshotError.
    """
    staging, manifest = made.staging, made.manifest
    write_manifest(staging.path, manifest)
    if folding is None:
        return store.publish(staging, activate=activate), []
    Snapshot.open(staging.path, staging.index, staging.version).close()
    sync_tree(staging.path)
    table = staging.path / layout.ITEMS
    types = {f.name: f.type for f in open_table(table).schema if f.name not in OWN_COLUMNS}
    with turn(store, staging.index):
        changes, notes = folding.finish(staging.path, staging.version, types, made.encode)
        if changes is not None:
            files = {s.file: file_record(staging.path / s.file) for s in changes.segments}
            update = {"changes": changes, "files": {**manifest.files, **files}}
            write_manifest(staging.path, manifest.model_copy(update=update))
            for record in changes.pending:
                open_segment(staging.path, record.file, made.encode.shape)
        path = store.publish(staging, activate=activate, verified=manifest.files, verify=False)
    return path, notes


def _write(folder: Path, table: Any) -> SegmentRecord:
    return record_of(table, write_segment(folder, table))


def without_erased(table: Any, erased: Mapping[str, int]) -> Any:
    """A table of changes without those made before their item was erased."""
    if not erased or not table.num_rows:
        return table
    pairs = zip(table.column("id").to_pylist(), table.column("sequence").to_pylist(), strict=True)
    return table.filter(pa.array([not is_erased(i, number, erased) for i, number in pairs]))


def _has_vectors(table: Any, same: bool) -> BoolArray:
    """Which changes have vectors of the space that is built; `same`: the space of their version."""
    if not same:
        return np.zeros(table.num_rows, np.bool_)
    found = np.zeros(table.num_rows, np.bool_)
    for name in ("image_vector", "text_vectors"):
        lengths = pc.list_value_length(table.column(name)).fill_null(0)
        found |= lengths.to_numpy() > 0
    return found


def _refitted(table: Any, types: Mapping[str, Any], notes: list[str]) -> Any:
    """The changes with metadata that fit other columns; values that don't are left out."""
    texts = []
    ids, given = (table.column(name).to_pylist() for name in ("id", "metadata"))
    for item_id, text in zip(ids, given, strict=True):
        kept: dict[str, Any] = {}
        for name, value in loosened(json.loads(text or "{}"), types).items():
            try:
                kept |= fitted({name: value}, types, {})
            except MetadataError as error:
                notes.append(f"item {item_id!r}, put during the build: {error.message}")
        texts.append(None if text is None else metadata_text(kept))
    place = table.schema.get_field_index("metadata")
    return table.set_column(place, table.schema.field(place), pa.array(texts, pa.string()))


def _as_read(value: Any, arrow: Any, texts: bool) -> Any:
    """A kept value as the corpus's reader would have given it."""
    if arrow is not None and pa.types.is_date(arrow):
        return date.fromisoformat(value)
    if arrow is not None and pa.types.is_timestamp(arrow):
        return datetime.fromisoformat(value)
    if texts and isinstance(value, (bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _own_vectors(change: Upsert) -> dict[Modality, FloatArray]:
    if not change.own:
        return {}
    found = {"image": change.image_vector, "text": change.text_vectors}
    return {
        cast(Modality, side): rows for side, rows in found.items() if rows is not None and rows.size
    }

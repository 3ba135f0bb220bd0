"""Taking changes into a build: what was put or deleted since, over what the corpus says.

    folding = Folding.begin(store, "default")        # before the corpus is read
    ... build, with folding.overlay() ...
    publish_folded(store, made, folding)             # while nobody else can change the index

Changes outlive builds: the corpus doesn't know of them, so each build applies them again. Those
made while the build ran are carried over beside the new levels, encoded again where the model is
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.errors import CorpusError, SnapshotMissing
from hivlp.index.pictures import read_picture
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.amend import Held, hold, turn
from hivlp.index.snapshot.catalogue import OWN_COLUMNS, id_hash, open_table
from hivlp.index.snapshot.changes import (
    Change,
    Delete,
    Shape,
    Upsert,
    change_table,
    joined,
    last_changes,
    without_vectors,
    write_segment,
)
from hivlp.index.snapshot.durable import sync_tree
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
        return replace(
            change,
            image_vector=self._turned(change.image_vector, before),
            text_vectors=self._turned(change.text_vectors, before),
        )

    def _turned(self, rows: FloatArray | None, before: FloatArray | None) -> FloatArray | None:
        if rows is None or not rows.size:
            return rows
        found = rows.reshape(-1, self.shape.width)
        if before is not None:
            found = found @ before.T
        if self.rotation is not None:
            found = found @ self.rotation
        return normalise(found).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class Folding:
    """The changes of an index as they were when a build began.

    `beside`: the build takes none of them in; all are carried over beside its levels.
    """

    store: SnapshotStore
    held: Held
    beside: bool = False

    @staticmethod
    def begin(store: SnapshotStore, name: str, *, beside: bool = False) -> Folding | None:
        """None for an index without a version. Raises SnapshotError."""
        try:
            return Folding(store, hold(store, name, whole=True), beside)
        except SnapshotMissing:
            return None

    @property
    def last(self) -> int:
        """The sequence number of the last change that the build takes in."""
        return 0 if self.beside else self.held.changes.last

    def overlay(self, gallery_space: str, *, texts: bool = False) -> Overlay:
        """What of the corpus to leave out, and which items to add.

        `texts`: all values of the corpus's metadata are texts, as in CSV, so that those of the
        items added must be too.
        """
        latest = {item_id for segment in self.held.segments for item_id in segment.ids}
        erased = set(self.held.changes.erased)

        def hides(item_id: str) -> bool:
            return item_id in latest or (bool(erased) and f"{id_hash(item_id):016x}" in erased)

        return Overlay(hides, self._items(gallery_space, texts))

    def finish(
        self, folder: Path, version: str, types: Mapping[str, Any], encode: Encode
    ) -> tuple[ChangesRecord, list[str]]:
        """Write the changes of the version being built, those made meanwhile included.

        For whoever holds the index's turn, until the version is published. `types` are its metadata
        columns. Returns the record, and notes on what could not be kept.
        """
        now = hold(self.store, self.held.manifest.index, whole=True)
        taken_in = self.held.segments and not self.beside
        records = [self._folded(folder)] if taken_in else []
        later, notes = self._later(now, types, encode)
        if later:
            records.append(_write(folder, change_table(later, self.last + 1, encode.shape)))
        changed = now.changes.model_copy(
            update={"since": version, "folded": self.last, "segments": tuple(records)}
        )
        own = {name: kind for name, kind in changed.columns.items() if name not in types}
        return changed.model_copy(update={"columns": own}), notes

    def _folded(self, folder: Path) -> SegmentRecord:
        """One segment of all that the levels hold now, without the vectors that can be remade."""
        first, *others = self.held.segments
        table = first.table
        for segment in others:
            table = joined(table, segment.table)
        return _write(folder, without_vectors(table))

    def _later(
        self, now: Held, types: Mapping[str, Any], encode: Encode
    ) -> tuple[list[Change], list[str]]:
        """Changes that are not in the levels, fit for what was built."""
        notes: list[str] = []
        found: list[Change] = []
        fit = (
            change if isinstance(change, Delete) else _refitted(change, types, notes)
            for change in last_changes(now.segments, after=self.last)
        )
        if now.manifest.gallery_space == encode.gallery_space:
            return list(fit), notes
        for change in fit:
            fresh = change if isinstance(change, Delete) else encode.again(change, now, self)
            if fresh is None:
                notes.append(f"item {change.id!r} could not be carried over: no vector of it is")
            else:
                found.append(fresh)
        return found, notes

    def _items(self, gallery_space: str, texts: bool) -> Iterator[Item | BadItem]:
        same = gallery_space == self.held.manifest.gallery_space
        for change in last_changes(self.held.segments):
            if isinstance(change, Upsert):
                yield self._item(change, same, texts)

    def _item(self, change: Upsert, same: bool, texts: bool) -> Item | BadItem:
        if change.own and not same:
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
            vectors=_own_vectors(change, self.held.shape.width),
        )

    def picture_of(self, change: Upsert) -> bytes | BadItem | None:
        """The bytes of an item's uploaded picture; None where it has none."""
        folder = self.store.root / self.held.manifest.index
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
        if changes.segments or changes.erased:
            files = {s.file: file_record(staging.path / s.file) for s in changes.segments}
            update = {"changes": changes, "files": {**manifest.files, **files}}
            write_manifest(staging.path, manifest.model_copy(update=update))
        path = store.publish(staging, activate=activate, verified=manifest.files, verify=False)
    return path, notes


def _write(folder: Path, table: Any) -> SegmentRecord:
    name = write_segment(folder, table)
    numbers, deleted = table.column("sequence"), table.column("deleted")
    deletes = sum(deleted.to_pylist())
    return SegmentRecord(
        file=name,
        first=numbers[0].as_py(),
        last=numbers[-1].as_py(),
        upserts=table.num_rows - deletes,
        deletes=deletes,
    )


def _refitted(change: Upsert, types: Mapping[str, Any], notes: list[str]) -> Upsert:
    """The change with metadata that fit other columns; values that don't are left out."""
    kept: dict[str, Any] = {}
    for name, value in loosened(change.metadata, types).items():
        try:
            kept |= fitted({name: value}, types, {})
        except MetadataError as error:
            notes.append(f"item {change.id!r}, put during the build: {error.message}")
    return replace(change, metadata=kept)


def _as_read(value: Any, arrow: Any, texts: bool) -> Any:
    """A kept value as the corpus's reader would have given it."""
    if arrow is not None and pa.types.is_date(arrow):
        return date.fromisoformat(value)
    if arrow is not None and pa.types.is_timestamp(arrow):
        return datetime.fromisoformat(value)
    if texts and isinstance(value, (bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _own_vectors(change: Upsert, width: int) -> dict[Modality, FloatArray]:
    if not change.own:
        return {}
    found: dict[Modality, FloatArray | None] = {
        "image": change.image_vector,
        "text": None if change.text_vectors is None else change.text_vectors.reshape(-1, width),
    }
    return {side: rows for side, rows in found.items() if rows is not None and rows.size}

"""Publishing changes: a version that shares every built file with the one before.

    amended = amend(store, "default", [Upsert(...), Delete("old")])

Whoever changes an index first waits for its turn (`.changes.lock`), reads the active version,
writes its changes as one more segment beside hard links to everything else, and points at that.
Small segments are joined to larger ones, so that n changes make about log n files. The version
that was active is removed once nobody has it open: it was a step, not a state to go back to.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from hivlp.index.errors import BuildError, SnapshotCorrupt, SnapshotError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import OWN_COLUMNS, Catalogue, open_catalogue, open_table
from hivlp.index.snapshot.changes import (
    Change,
    Delete,
    Segment,
    Shape,
    change_table,
    joined,
    open_segment,
    write_segment,
)
from hivlp.index.snapshot.coded_files import Kind
from hivlp.index.snapshot.manifest import (
    FORMAT_VERSION,
    ChangesRecord,
    SegmentRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.metadata import MetadataError, fitted
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.staging import Staging
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import file_record
from hivlp.models.errors import SpaceMismatch

LOCK = ".changes.lock"
JOIN = 2
"""A segment is joined to the next where it is at most so many times as large."""
MOST_PENDING = 200_000
"""Changes beside the levels: more make every search slow, and a build is due."""


@dataclass(frozen=True, slots=True)
class Amended:
    """What was published; `version` is the active one, a new one where anything changed.

    `created` are the ids that there were not before, `unknown` those that could not be deleted, and
    `refused` those whose metadata don't fit.
    """

    version: str
    upserts: int = 0
    deletes: int = 0
    created: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    refused: Mapping[str, MetadataError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """The active version, as far as changes must know it."""

    path: Path
    manifest: SnapshotManifest
    catalogue: Catalogue
    segments: tuple[Segment, ...]

    @property
    def changes(self) -> ChangesRecord:
        """What changed so far since it was built."""
        return self.manifest.changes or ChangesRecord(since=self.manifest.version, segments=())

    @property
    def shape(self) -> Shape:
        """How its gallery cuts vectors."""
        return Shape(self.manifest.specs, self.manifest.gallery)

    @property
    def types(self) -> dict[str, Any]:
        """The Arrow type of each built metadata column."""
        schema = self.catalogue.table.schema
        return {f.name: f.type for f in schema if f.name not in OWN_COLUMNS}

    def texts(self) -> Any:
        """The text of each row of the text side, as an Arrow column. Raises SnapshotCorrupt."""
        try:
            return open_table(self.path / layout.TEXTS).column("text")
        except (OSError, pa.ArrowInvalid) as error:
            index, version = self.manifest.index, self.manifest.version
            raise SnapshotCorrupt(index, version, layout.TEXTS, str(error)) from error

    def has(self, item_id: str) -> bool:
        """Whether it holds an item of this id."""
        for segment in reversed(self.segments):
            if item_id in segment.places:
                return not segment.deleted[segment.places[item_id]]
        return self.catalogue.holds(item_id)


def amend(
    store: SnapshotStore, name: str, changes: Sequence[Change], gallery_space: str | None = None
) -> Amended:
    """Publish changes and make them active, in milliseconds.

    The last change of an id counts. Unknown ids are not deleted, and items whose metadata don't fit
    the columns are left out: both are named in the answer. `gallery_space` is that of the changes'
    vectors (None: there are none). Raises SpaceMismatch, SnapshotError, BuildError where it can't
    be written or too much is pending.
    """
    try:
        with turn(store, name):
            return _amend(store, name, changes, gallery_space)
    except OSError as error:  # a full disk, a folder that is read-only
        raise BuildError(f"index {name!r} can't be changed: {error}") from error


def _amend(
    store: SnapshotStore, name: str, changes: Sequence[Change], gallery_space: str | None
) -> Amended:
    held = hold(store, name)
    if gallery_space not in (None, held.manifest.gallery_space):
        raise SpaceMismatch(expected=held.manifest.gallery_space, received=str(gallery_space))
    latest = {change.id: change for change in changes}
    new = {item_id for item_id in latest if not held.has(item_id)}
    unknown = {c.id for c in latest.values() if isinstance(c, Delete) and c.id in new}
    kinds = cast(dict[str, Kind], dict(held.changes.columns))
    checked: list[Change] = []
    refused: dict[str, MetadataError] = {}
    for change in latest.values():
        try:
            if change.id not in unknown:
                checked.append(_fitted(change, held, kinds))
        except MetadataError as error:
            refused[change.id] = error
    if not checked:
        named = frozenset(unknown)
        return Amended(held.manifest.version, unknown=named, refused=refused)
    version = _publish(store, name, held, checked, kinds)
    deletes = sum(isinstance(change, Delete) for change in checked)
    return Amended(
        version,
        len(checked) - deletes,
        deletes,
        frozenset(new - unknown - refused.keys()),
        frozenset(unknown),
        refused,
    )


def _publish(
    store: SnapshotStore,
    name: str,
    held: Held,
    changes: Sequence[Change],
    kinds: dict[str, Kind],
) -> str:
    pending = sum(segment.size for segment in held.segments) + len(changes)
    if pending > MOST_PENDING:
        raise BuildError(
            f"index {name!r}: {pending} changes wait beside what was built, at most "
            f"{MOST_PENDING}: build it again"
        )
    with store.stage(name) as staging:
        manifest = _stage(staging, held, changes, kinds)
        shared = share_files(held.path, staging.path, manifest.files.keys() & held.manifest.files)
        write_manifest(staging.path, manifest)
        store.publish(
            staging,
            supersede=held.manifest.amended_from is not None,
            expected=held.manifest.version,
            shared=shared,
            verify=False,  # the levels are those that are open; of the rest, each byte is hashed
        )
    _remove_steps(store, name)
    return staging.version


def _remove_steps(store: SnapshotStore, name: str) -> None:
    """Remove versions that were steps to the active one, but for those that somebody has open."""
    history = store.history(name)
    for version in store.versions(name):
        if version in history or version > history[-1]:
            continue
        with contextlib.suppress(SnapshotError):
            if store.manifest(name, version).amended_from is not None:
                store.remove(name, version)


def hold(
    store: SnapshotStore, name: str, version: str | None = None, *, whole: bool = False
) -> Held:
    """A version's manifest, ids and changes (None: the active one). Raises SnapshotError.

    `whole`: those changes too that its levels hold already.
    """
    wanted = store.current(name) if version is None else version
    path = store.path(name, wanted)
    manifest = store.manifest(name, wanted)
    shape = Shape(manifest.specs, manifest.gallery)
    changes = manifest.changes
    records = () if changes is None else changes.segments if whole else changes.pending
    try:
        catalogue = open_catalogue(path)
        segments = tuple(open_segment(path, record.file, shape) for record in records)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise SnapshotError(name, wanted, f"can't be read: {error}") from error
    return Held(path, manifest, catalogue, segments)


def _fitted(change: Change, held: Held, kinds: dict[str, Kind]) -> Change:
    if isinstance(change, Delete):
        return change
    return replace(change, metadata=fitted(change.metadata, held.types, kinds))


def _stage(
    staging: Staging, held: Held, changes: Sequence[Change], kinds: dict[str, Kind]
) -> SnapshotManifest:
    """Write the new segment, link all that stays; returns the manifest."""
    old = held.manifest
    before = held.changes
    table = change_table(changes, before.last + 1, held.shape)
    segments = list(held.segments)
    while segments and segments[-1].size <= JOIN * table.num_rows:
        table = joined(segments.pop().table, table)
    own = write_segment(staging.path, table)
    gone = {s.name for s in held.segments} - {s.name for s in segments}
    kept = {name: record for name, record in old.files.items() if name not in gone}
    deletes = sum(table.column("deleted").to_pylist())
    first, last = (table.column("sequence")[i].as_py() for i in (0, -1))
    record = SegmentRecord(
        file=own, first=first, last=last, upserts=table.num_rows - deletes, deletes=deletes
    )
    stay = tuple(record for record in before.segments if record.file not in gone)
    update = {"segments": (*stay, record), "columns": dict(kinds)}
    return old.model_copy(
        update={
            "format_version": FORMAT_VERSION,
            "version": staging.version,
            "amended_from": old.version,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "changes": before.model_copy(update=update),
            "files": {**kept, own: file_record(staging.path / own)},
        }
    )


@contextlib.contextmanager
def turn(store: SnapshotStore, name: str) -> Iterator[None]:
    """One who changes an index at a time. Raises SnapshotMissing for an unknown index."""
    store.current(name)
    with (store.root / name / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

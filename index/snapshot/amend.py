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
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.errors import BuildError, IndexBusy, SnapshotCorrupt, SnapshotError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import (
    OWN_COLUMNS,
    Catalogue,
    HashArray,
    open_catalogue,
    open_table,
)
from hivlp.index.snapshot.change_tables import change_table, joined
from hivlp.index.snapshot.changes import (
    Change,
    Delete,
    Segment,
    Shape,
    Upsert,
    next_number,
    read_segment,
    record_of,
    write_segment,
)
from hivlp.index.snapshot.coded_files import Kind
from hivlp.index.snapshot.erasures import read_erased
from hivlp.index.snapshot.manifest import (
    FORMAT_VERSION,
    ChangesRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.metadata import MetadataError, fitted
from hivlp.index.snapshot.names import version_time
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.staging import Staging
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import upload_path
from hivlp.models.artifact import file_record
from hivlp.models.errors import SpaceMismatch

log = logging.getLogger("hivlp.index")
LOCK = ".changes.lock"
POLL_S = 0.02
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

    def mentions(self, hashes: HashArray) -> bool:
        """Whether it says anything of items with ids of these hashes, (n,), deleted ones too."""
        changed = any(np.isin(hashes, segment.hashes).any() for segment in self.segments)
        return changed or self.catalogue.holds_any(hashes)

    def holding(self, item_ids: Collection[str]) -> set[str]:
        """Those of some ids that it holds an item of."""
        wanted = pa.array(list(item_ids), pa.string())
        last: dict[str, bool] = {}
        for segment in self.segments:
            there = pc.is_in(segment.id_column, value_set=wanted)
            for place in np.flatnonzero(there.to_numpy(zero_copy_only=False)).tolist():
                last[segment.id_column[place].as_py()] = not segment.deleted[place]
        return {i for i in item_ids if last.get(i, i not in last and self.catalogue.holds(i))}


def amend(
    store: SnapshotStore,
    name: str,
    changes: Sequence[Change],
    gallery_space: str | None = None,
    *,
    wait_s: float | None = None,
) -> Amended:
    """Publish changes and make them active, in milliseconds.

    The last change of an id counts. Unknown ids are not deleted, and items whose metadata don't fit
    the columns are left out: both are named in the answer. `gallery_space` is that of the changes'
    vectors (None: there are none). Waits for its turn, at most `wait_s` (None: as long as that
    takes). Raises IndexBusy after that, SpaceMismatch, SnapshotError, BuildError where it can't be
    written or too much is pending.
    """
    try:
        with turn(store, name, wait_s):
            return _amend(store, name, changes, gallery_space)
    except OSError as error:  # a full disk, a folder that is read-only
        raise BuildError(f"index {name!r} can't be changed: {error}") from error


def _amend(
    store: SnapshotStore, name: str, changes: Sequence[Change], gallery_space: str | None
) -> Amended:
    held = hold(store, name)
    store.quarantine(name).refuse(held.manifest.version)
    if gallery_space not in (None, held.manifest.gallery_space):
        raise SpaceMismatch(expected=held.manifest.gallery_space, received=str(gallery_space))
    latest = {change.id: change for change in changes}
    new = latest.keys() - held.holding(latest.keys())
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
    _check_uploads(store.folder(name), changes)
    pending = sum(segment.size for segment in held.segments) + len(changes)
    if pending > MOST_PENDING:
        raise BuildError(
            f"index {name!r}: {pending} changes wait beside what was built, at most "
            f"{MOST_PENDING}: build it again"
        )
    # An item that is put again after it was erased must come after that, whatever the clock says.
    last = max(held.changes.last, *read_erased(store.folder(name)).values(), 0)
    table = change_table(enumerate(changes, next_number(last)), held.shape)
    step = held.manifest.amended_from is not None
    active = held.manifest.version
    version = publish_table(
        store, name, held, table, kinds, supersede=step, expected=active, amended_from=active
    )
    _remove_step(store, held.manifest)
    return version


def _check_uploads(folder: Path, changes: Sequence[Change]) -> None:
    """Raises BuildError for a picture that was removed since it came: an erasure had it too."""
    for change in changes:
        if isinstance(change, Upsert) and change.image is not None:
            path = upload_path(folder, change.image)
            if path is not None and not path.is_file():
                raise BuildError(f"item {change.id!r}: its picture was erased; put it again")


def publish_table(
    store: SnapshotStore,
    name: str,
    held: Held,
    table: Any,
    kinds: dict[str, Kind],
    *,
    supersede: bool,
    expected: str | None,
    amended_from: str | None,
) -> str:
    """Publish a version with more changes, sharing every other file; returns it.

    `amended_from` names the version that this one may be taken for a step from: see `_remove_step`.
    """
    with store.stage(name) as staging:
        manifest = _stage(staging, held, table, kinds, amended_from)
        shared = share_files(held.path, staging.path, manifest.files.keys() & held.manifest.files)
        write_manifest(staging.path, manifest)
        store.publish(
            staging,
            supersede=supersede,
            expected=expected,
            shared=shared,
            verify=False,  # the levels are those that are open; of the rest, each byte is hashed
        )
    return staging.version


def _remove_step(store: SnapshotStore, before: SnapshotManifest) -> None:
    """Remove the step that this one took the place of, and those that it came from itself.

    Steps that led elsewhere stay, and those that can be gone back to: somebody went back from them,
    or activated them by name. So do those that are open, until the next one; what can't be removed
    now is no reason to say that a change failed.
    """
    name, step = before.index, before
    while step.amended_from is not None:
        try:
            earlier = store.manifest(name, step.amended_from)
        except SnapshotError:
            earlier = None
        if step.version in store.history(name):
            return
        try:
            store.remove(name, step.version)
        except (SnapshotError, OSError) as error:
            log.info("index %s, version %s: not removed yet: %s", name, step.version, error)
        if earlier is None:
            return
        step = earlier


def hold(
    store: SnapshotStore, name: str, version: str | None = None, *, whole: bool = False
) -> Held:
    """A version's manifest, ids and changes (None: the active one). Raises SnapshotError.

    `whole`: those changes too that its levels hold already; all can only be read.
    """
    wanted = store.current(name) if version is None else version
    path = store.path(name, wanted)
    manifest = store.manifest(name, wanted)
    changes = manifest.changes or ChangesRecord(since=wanted, segments=())
    try:
        catalogue = open_catalogue(path)
        segments = tuple(
            read_segment(path, record.file)
            for record in (changes.segments if whole else changes.pending)
        )
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise SnapshotError(name, wanted, f"can't be read: {error}") from error
    return Held(path, manifest, catalogue, segments)


def holds_erased(store: SnapshotStore, name: str, version: str) -> bool:
    """Whether a version has anything of items that were erased since it was made.

    Raises SnapshotError.
    """
    made_ns = version_time(version).timestamp() * 1e9
    erased = read_erased(store.folder(name))
    since = [int(short, 16) for short, at_ns in erased.items() if at_ns > made_ns]
    hashes = np.array(since, np.uint64)
    return bool(since) and hold(store, name, version, whole=True).mentions(hashes)


def _fitted(change: Change, held: Held, kinds: dict[str, Kind]) -> Change:
    if isinstance(change, Delete):
        return change
    return replace(change, metadata=fitted(change.metadata, held.types, kinds))


def _stage(
    staging: Staging, held: Held, table: Any, kinds: dict[str, Kind], amended_from: str | None
) -> SnapshotManifest:
    """Write the new segment, joined to what it is to be joined to; returns the manifest."""
    old = held.manifest
    before = held.changes
    segments = list(held.segments)
    while segments and segments[-1].size <= JOIN * table.num_rows:
        table = joined(segments.pop().table, table)
    own = write_segment(staging.path, table)
    gone = {s.name for s in held.segments} - {s.name for s in segments}
    kept = {name: record for name, record in old.files.items() if name not in gone}
    record = record_of(table, own)
    stay = tuple(record for record in before.segments if record.file not in gone)
    update = {"segments": (*stay, record), "columns": dict(kinds)}
    return old.model_copy(
        update={
            "format_version": FORMAT_VERSION,
            "version": staging.version,
            "amended_from": amended_from,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "changes": before.model_copy(update=update),
            "files": {**kept, own: file_record(staging.path / own)},
        }
    )


@contextlib.contextmanager
def turn(store: SnapshotStore, name: str, wait_s: float | None = None) -> Iterator[None]:
    """One who changes an index at a time, among threads and processes.

    Raises IndexBusy where another one does for longer than `wait_s` (None: waits as long as it
    takes), SnapshotMissing for an unknown index.
    """
    store.current(name)
    until = None if wait_s is None else time.monotonic() + wait_s
    with (store.root / name / LOCK).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if until is None else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if until is not None and time.monotonic() > until:
                    raise IndexBusy(name, wait_s or 0.0) from None
                time.sleep(POLL_S)
        yield

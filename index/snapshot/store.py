"""Where versions live: published in one step, named by one pointer, rolled back by one more.

    HOME/indexes/NAME/VERSION/    immutable once published, leased by whoever has it open
    HOME/indexes/NAME/CURRENT     {"history": [..., previous, current]}
    HOME/indexes/NAME/QUARANTINE  versions that failed, until they are verified again

A build writes into `.building-VERSION`, flushes it to the disk and renames it; only then may the
pointer be replaced. Whatever dies in between leaves a hidden folder that the next build removes:
a live build holds a lock on it, a dead one can't.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from hivlp.index.backends.choose import Backend
from hivlp.index.errors import BuildError, SnapshotError, SnapshotMissing
from hivlp.index.snapshot import gc as collecting
from hivlp.index.snapshot import staging as stagings
from hivlp.index.snapshot.durable import sync, sync_tree
from hivlp.index.snapshot.gc import GcReport, Removed
from hivlp.index.snapshot.last_good import ATTEMPTS, open_last_good
from hivlp.index.snapshot.leases import Lease, in_use, share
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest, read_manifest
from hivlp.index.snapshot.names import NAME_PATTERN, POINTER, VERSION_PATTERN, versions_in
from hivlp.index.snapshot.names import check_index_name as check_index_name
from hivlp.index.snapshot.pointer import locked, read_history, write_history
from hivlp.index.snapshot.quarantine import Quarantine, Quarantined
from hivlp.index.snapshot.shared import Shared, check_shared
from hivlp.index.snapshot.snapshot import Snapshot, check_files
from hivlp.index.snapshot.staging import Staging as Staging
from hivlp.index.snapshot.uploads import unused_uploads

log = logging.getLogger("hivlp.index")
KEEP = 3
UPLOAD_S = 86_400.0
"""Activations that `gc` leaves by default, the active one among them."""


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One published version; `manifest` is None and `trouble` says why where it can't be read."""

    version: str
    current: bool
    manifest: SnapshotManifest | None
    trouble: str | None = None
    quarantined: Quarantined | None = None


class SnapshotStore:
    """Versions of every index under `home`/indexes. Safe for several processes at once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "indexes"
        self._quarantines: dict[str, Quarantine] = {}

    def names(self) -> list[str]:
        """Indexes with at least one published version, sorted."""
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        named = [folder.name for folder in folders if NAME_PATTERN.fullmatch(folder.name)]
        return [name for name in named if self.versions(name)]

    def folder(self, name: str) -> Path:
        """Where the versions of an index lie, whether there are any or not."""
        return self.root / check_index_name(name)

    def versions(self, name: str) -> list[str]:
        """Published versions, oldest first; empty where the index is unknown."""
        return versions_in(self.folder(name))

    def history(self, name: str) -> list[str]:
        """Activations, oldest first; the last is active. Raises SnapshotError."""
        return read_history(self.folder(name))

    def current(self, name: str) -> str:
        """The active version. Raises SnapshotMissing where there is none."""
        history = self.history(name)
        if not history:
            raise SnapshotMissing(name, POINTER, "no active version")
        return history[-1]

    def quarantine(self, name: str) -> Quarantine:
        """Versions of the index that failed, and were not verified since."""
        return self._quarantines.setdefault(name, Quarantine(self.folder(name)))

    def path(self, name: str, version: str) -> Path:
        """Folder of a published version. Raises SnapshotMissing."""
        folder = self.folder(name) / version
        if VERSION_PATTERN.fullmatch(version) is None or not folder.is_dir():
            raise SnapshotMissing(name, version, "no such version")
        return folder

    def manifest(self, name: str, version: str | None = None) -> SnapshotManifest:
        """Manifest of a version (None: the active one). Raises SnapshotError."""
        wanted = self.current(name) if version is None else version
        return read_manifest(self.path(name, wanted), name, wanted)

    def open(
        self,
        name: str,
        version: str | None = None,
        *,
        backend: Backend = "faiss-cpu",
        hash_up_to_bytes: int | None = None,
        like: Snapshot | None = None,
    ) -> Snapshot:
        """Open a version (None: the active one), verified, and leased until it is closed.

        `like` is an open snapshot whose built parts are shared where they are the same. Raises
        SnapshotError.
        """
        wanted, lease = self._lease(name, version)
        folder = self.folder(name) / wanted
        try:
            snapshot = Snapshot.open(
                folder, name, wanted, backend=backend, hash_up_to_bytes=hash_up_to_bytes, like=like
            )
        except BaseException:
            lease.release()
            raise
        snapshot.keep(lease)
        return snapshot

    def open_last_good(
        self, name: str, *, backend: Backend = "faiss-cpu", hash_up_to_bytes: int | None = None
    ) -> tuple[Snapshot, list[Quarantined]]:
        """Open the active version, or where it fails the newest that is whole: for serving.

        Activations come first, the latest before, then other versions by age. Quarantined ones
        are passed over, and what fails now is quarantined; both are returned too. A pointer that
        can't be read is logged as an error, and the newest whole version opened.
        Raises SnapshotMissing where nothing was ever activated, NoGoodVersion naming every version
        and its reason.
        """
        return open_last_good(self, name, backend=backend, hash_up_to_bytes=hash_up_to_bytes)

    def in_use(self, name: str, version: str) -> bool:
        """Whether any process has the version open. Raises SnapshotMissing."""
        return in_use(self.path(name, version))

    def verify(self, name: str, version: str | None = None) -> SnapshotManifest:
        """Hash every file and open every part; where all is right, lift a quarantine.

        Raises SnapshotCorrupt naming the file.
        """
        snapshot = self.open(name, version)
        snapshot.close()
        self.quarantine(name).lift(snapshot.manifest.version)
        return snapshot.manifest

    def listing(self, name: str) -> list[VersionInfo]:
        """Every published version, oldest first, unreadable ones included."""
        active = self.known(name)[-1:]
        bad = {entry.version: entry for entry in self.quarantine(name).entries()}
        return [
            self._info(name, version, version in active, bad.get(version))
            for version in self.versions(name)
        ]

    def stage(self, name: str) -> AbstractContextManager[Staging]:
        """A folder for a new version, removed on leaving unless it was published.

        Leftovers of builds and removals that died are removed first.
        """
        return stagings.stage(self.folder(name))

    def stage_pull(self, name: str, version: str) -> AbstractContextManager[Staging]:
        """A folder for a version from elsewhere, which stays where it isn't published.

        Raises SnapshotError where another process is pulling the same version.
        """
        return stagings.stage_pull(self.folder(name), version)

    def publish(
        self,
        staging: Staging,
        *,
        activate: bool = True,
        supersede: bool = False,
        expected: str | None = None,
        shared: Shared | None = None,
        verified: Collection[str] = (),
        verify: bool = True,
    ) -> Path:
        """Make a staged version permanent, in one step. Raises SnapshotError if it isn't whole.

        `supersede`: it takes the active version's place in the history instead of coming after it,
        for a version that only adds a little to it. `expected`: refused, the pointer untouched,
        unless this is the active version by then. `shared`: files of a published version that need
        be neither hashed nor flushed again; those in `verified` were hashed by the caller.
        `verify=False` compares the files with the manifest but doesn't open them, for whoever has
        just done so.
        """
        assert activate or not supersede, "what isn't activated can't supersede"
        path, name = staging.path, staging.index
        if not (path / MANIFEST_NAME).is_file():
            raise BuildError(f"{path.name}: nothing to publish, no {MANIFEST_NAME}")
        durable = frozenset[str]() if shared is None else self._checked(staging, shared)
        known = durable.union(verified)
        if verify:
            Snapshot.open(path, name, staging.version, verified=known).close()
        else:
            check_files(path, read_manifest(path, name, staging.version), None, known)
        sync_tree(path, durable)
        self._put_in_place(staging, activate, supersede, expected)
        return path.parent / staging.version

    def activate(self, name: str, version: str) -> None:
        """Point the index at a version, after verifying it. Raises SnapshotError.

        This mends a pointer that can't be read; what was active before is then forgotten.
        Raises SnapshotQuarantined for a version that failed and was not verified since.
        """
        self.path(name, version)
        self.quarantine(name).refuse(version)
        snapshot = self.open(name, version)  # its lease keeps it from being removed meanwhile
        try:
            with locked(self.folder(name)):
                history = [old for old in self.known(name) if old != version]
                write_history(self.folder(name), [*history, version])
        finally:
            snapshot.close()

    def rollback(self, name: str) -> str:
        """Point the index at the version that was active before; returns it. Raises SnapshotError.

        Versions that are gone are passed over; one that is corrupt or quarantined is refused by
        name.
        """
        earlier = self.earlier(name)
        self.quarantine(name).refuse(earlier[-1])
        snapshot = self.open(name, earlier[-1])  # its lease keeps it from being removed meanwhile
        try:
            with locked(self.folder(name)):
                if self.earlier(name) != earlier:
                    raise SnapshotError(name, POINTER, "moved meanwhile: look, and roll back again")
                write_history(self.folder(name), earlier)
        finally:
            snapshot.close()
        return earlier[-1]

    def remove(self, name: str, version: str) -> Removed:
        """Remove a version; its files go at once, the space of shared ones with their last name.

        Raises SnapshotMissing, and SnapshotError for the active version and for one in use.
        """
        with locked(self.folder(name)):
            path = self.path(name, version)
            if version in self.history(name)[-1:]:
                raise SnapshotError(name, version, "is active: activate another one first")
            doomed = collecting.retire(path)
            if doomed is None:
                raise SnapshotError(name, version, "is in use: some process has it open")
            self.quarantine(name).forget({version})
        size = collecting.freed([doomed.path])[0]
        collecting.delete(doomed)
        return Removed(version, size)

    def gc(
        self,
        name: str,
        *,
        keep: int = KEEP,
        older_than: timedelta | None = None,
        dry_run: bool = False,
    ) -> GcReport:
        """Remove versions nobody needs, and what dead builds, pulls and removals left behind.

        Kept are: the active version, the `keep` (at least 1) activated last that are not
        quarantined, those in use, those published or quarantined less than `older_than` ago, and
        without `older_than` those newer than the active one. Uploaded pictures that no version
        names any more go a day after they came.
        Raises SnapshotError where there is no such index, or its pointer can't be read.
        """
        assert keep >= 1, f"keep is {keep}, at least 1"
        if not self.folder(name).is_dir():
            raise SnapshotMissing(name, "any", "no such index")
        report = collecting.collect(
            self.folder(name),
            self.quarantine(name),
            keep=keep,
            older_than=older_than,
            dry_run=dry_run,
        )
        kept = [entry.version for entry in report.kept]
        unused = unused_uploads(self.folder(name), kept, UPLOAD_S)
        pictures = tuple(Removed(path.name, path.stat().st_size) for path in unused)
        for path in () if dry_run else unused:
            path.unlink(missing_ok=True)
        return replace(report, leftovers=(*report.leftovers, *pictures))

    def remove_leftovers(self, name: str) -> None:
        """Remove what builds and removals that died left in the index's folder."""
        if self.folder(name).is_dir():
            with locked(self.folder(name)):
                for leftover in collecting.leftovers(self.folder(name), pulls=False):
                    collecting.delete(leftover)

    def _lease(self, name: str, version: str | None) -> tuple[str, Lease]:
        """The version wanted (None: the active one) and a lease on it. Raises SnapshotMissing."""
        for attempt in range(1, ATTEMPTS + 1):
            wanted = self.current(name) if version is None else version
            try:
                return wanted, share(self.path(name, wanted))
            except (SnapshotMissing, FileNotFoundError) as error:
                # What was active may have been superseded and removed: then look again.
                if version is None and attempt < ATTEMPTS and self.current(name) != wanted:
                    continue
                raise SnapshotMissing(name, wanted, "no such version") from error
        raise AssertionError("unreachable")

    def earlier(self, name: str) -> list[str]:
        """Activations before the last that are still published. Raises SnapshotError for none."""
        published = set(self.versions(name))
        if not published:
            raise SnapshotMissing(name, POINTER, "no such index")
        earlier = [old for old in self.history(name)[:-1] if old in published]
        if not earlier:
            raise SnapshotError(name, POINTER, "no earlier version to roll back to")
        return earlier

    def _put_in_place(
        self, staging: Staging, activate: bool, supersede: bool, expected: str | None
    ) -> None:
        """Rename and point as one step to whoever else writes: nothing is removed in between."""
        folder, name = staging.path.parent, staging.index
        with locked(folder):
            strict = supersede or expected is not None
            history = self.history(name) if strict else self.known(name)
            if expected is not None and history[-1:] != [expected]:
                active = history[-1] if history else "none"
                reason = f"is not published: {expected} was to be active, {active} is"
                raise SnapshotError(name, staging.version, reason)
            staging.path.rename(folder / staging.version)
            sync(folder)
            if activate:
                earlier = history[:-1] if supersede else history
                try:
                    write_history(folder, [*earlier, staging.version])
                except OSError:  # the disk is full: then nothing was published
                    if self.known(name)[-1:] != [staging.version]:
                        (folder / staging.version).rename(staging.path)
                    raise
        staging.lease.release()

    def _checked(self, staging: Staging, shared: Shared) -> frozenset[str]:
        """Shared files, checked; none of a version that is quarantined."""
        name = staging.index
        if shared.version in {entry.version for entry in self.quarantine(name).entries()}:
            return frozenset()
        new = read_manifest(staging.path, name, staging.version)
        old = self.manifest(name, shared.version)
        check_shared(shared, staging.path, new, self.path(name, shared.version), old)
        return shared.files

    def _info(
        self, name: str, version: str, current: bool, quarantined: Quarantined | None
    ) -> VersionInfo:
        try:
            found = self.manifest(name, version)
        except SnapshotError as error:
            return VersionInfo(version, current, None, error.reason, quarantined)
        return VersionInfo(version, current, found, None, quarantined)

    def known(self, name: str) -> list[str]:
        """As `history`, for whoever can do without: nothing where the pointer can't be read."""
        try:
            return self.history(name)
        except SnapshotError as error:
            log.error("%s", error)
            return []


def default_home() -> Path:
    """`HIVLP_HOME`, or `.hivlp` in the working folder."""
    return Path(os.environ.get("HIVLP_HOME") or ".hivlp")

"""Where versions live: published in one step, named by one pointer, rolled back by one more.

    HOME/indexes/NAME/VERSION/    immutable once published
    HOME/indexes/NAME/CURRENT     {"history": [..., previous, current]}

A build writes into `.building-VERSION`, flushes it to the disk and renames it; only then may the
pointer be replaced. Whatever dies in between leaves a hidden folder that the next build removes:
a live build holds a lock on it, a dead one can't.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hivlp.index.backends.choose import Backend
from hivlp.index.errors import BuildError, SnapshotError, SnapshotMissing
from hivlp.index.snapshot.durable import replace_text, sync, sync_tree
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest, read_manifest
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.errors import InputError

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
VERSION_PATTERN = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9]{6}")
VERSION_FORMAT = "%Y%m%dT%H%M%S-%f"
POINTER = "CURRENT"
BUILDING = ".building-"
LOCK = ".lock"
HISTORY = 32
"""Activations remembered for rolling back."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A version being written: fill `path`, then give it to `SnapshotStore.publish`."""

    index: str
    version: str
    path: Path


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One published version; `manifest` is None and `trouble` says why where it can't be read."""

    version: str
    current: bool
    manifest: SnapshotManifest | None
    trouble: str | None = None


def check_index_name(name: str) -> str:
    """The name itself, or InputError."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise InputError(
            "invalid_index",
            f"{name!r} is no index name: lower-case letters, digits, - and _, at most 64, "
            "beginning with a letter or digit",
            param="index",
            limit=64,
        )
    return name


class SnapshotStore:
    """Versions of every index under `home`/indexes. Safe for several processes at once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "indexes"

    def names(self) -> list[str]:
        """Indexes with at least one published version, sorted."""
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        named = [folder.name for folder in folders if NAME_PATTERN.fullmatch(folder.name)]
        return [name for name in named if self.versions(name)]

    def versions(self, name: str) -> list[str]:
        """Published versions, oldest first; empty where the index is unknown."""
        folder = self.root / check_index_name(name)
        found = folder.iterdir() if folder.is_dir() else iter(())
        return sorted(path.name for path in found if VERSION_PATTERN.fullmatch(path.name))

    def current(self, name: str) -> str:
        """The active version. Raises SnapshotMissing where there is none."""
        history = self._history(name)
        if not history:
            raise SnapshotMissing(name, POINTER, "no active version")
        return history[-1]

    def path(self, name: str, version: str) -> Path:
        """Folder of a published version. Raises SnapshotMissing."""
        folder = self.root / check_index_name(name) / version
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
        """Open a version (None: the active one), verified. Raises SnapshotError.

        `like` is an open snapshot whose built parts are shared where they are the same.
        """
        wanted = self.current(name) if version is None else version
        folder = self.path(name, wanted)
        return Snapshot.open(
            folder, name, wanted, backend=backend, hash_up_to_bytes=hash_up_to_bytes, like=like
        )

    def verify(self, name: str, version: str | None = None) -> SnapshotManifest:
        """Hash every file and open every part. Raises SnapshotCorrupt naming the file."""
        snapshot = self.open(name, version)
        snapshot.close()
        return snapshot.manifest

    def listing(self, name: str) -> list[VersionInfo]:
        """Every published version, oldest first, unreadable ones included."""
        active = self._known(name)[-1:]
        return [self._info(name, version, version in active) for version in self.versions(name)]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Staging]:
        """A folder for a new version, removed on leaving unless it was published.

        Leftovers of builds that died are removed first.
        """
        folder = self.root / check_index_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        sync(self.root)
        sync(self.home)
        with self._locked(name):
            _clean(folder)
            version = self._new_version(name)
            staging = Staging(name, version, folder / f"{BUILDING}{version}")
            staging.path.mkdir()
            lock = os.open(staging.path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            if staging.path.exists():
                shutil.rmtree(staging.path)
            os.close(lock)

    def publish(
        self,
        staging: Staging,
        *,
        activate: bool = True,
        supersede: bool = False,
        expected: str | None = None,
        shared: object = None,
    ) -> Path:
        """Make a staged version permanent, in one step. Raises SnapshotError if it isn't whole."""
        if not (staging.path / MANIFEST_NAME).is_file():
            raise BuildError(f"{staging.path.name}: nothing to publish, no {MANIFEST_NAME}")
        Snapshot.open(staging.path, staging.index, staging.version).close()
        sync_tree(staging.path)
        target = staging.path.parent / staging.version
        staging.path.rename(target)
        sync(target.parent)
        if activate:
            with self._locked(staging.index):
                known = self._known(staging.index)
                self._point(staging.index, [*(known[:-1] if supersede else known), staging.version])
        return target

    def activate(self, name: str, version: str) -> None:
        """Point the index at a version, after verifying it. Raises SnapshotError.

        This mends a pointer that can't be read; what was active before is then forgotten.
        """
        self.verify(name, version)
        with self._locked(name):
            history = [old for old in self._known(name) if old != version]
            self._point(name, [*history, version])

    def rollback(self, name: str) -> str:
        """Point the index at the version that was active before; returns it. Raises SnapshotError.

        Versions that are gone are passed over; one that is corrupt is refused by name.
        """
        with self._locked(name):
            published = set(self.versions(name))
            earlier = [old for old in self._history(name)[:-1] if old in published]
            if not earlier:
                raise SnapshotError(name, POINTER, "no earlier version to roll back to")
            self.verify(name, earlier[-1])
            self._point(name, earlier)
        return earlier[-1]

    def _info(self, name: str, version: str, current: bool) -> VersionInfo:
        try:
            return VersionInfo(version, current, self.manifest(name, version))
        except SnapshotError as error:
            return VersionInfo(version, current, None, error.reason)

    def _history(self, name: str) -> list[str]:
        """Activations, oldest first; the last is active."""
        pointer = self.root / check_index_name(name) / POINTER
        try:
            history = json.loads(pointer.read_text(encoding="utf-8"))["history"]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(name, POINTER, f"unreadable pointer: {error}") from error
        if not isinstance(history, list) or not all(
            isinstance(v, str) and VERSION_PATTERN.fullmatch(v) for v in history
        ):
            raise SnapshotError(name, POINTER, "unreadable pointer: not a list of versions")
        return list(history)

    def _known(self, name: str) -> list[str]:
        """As `_history`, for whoever can do without: nothing where the pointer can't be read."""
        try:
            return self._history(name)
        except SnapshotError:
            return []

    def _point(self, name: str, history: list[str]) -> None:
        text = json.dumps({"history": history[-HISTORY:]}) + "\n"
        replace_text(self.root / name / POINTER, text)

    def _new_version(self, name: str) -> str:
        """Later than every version there is or is being built, whatever the clock says."""
        moment = datetime.now(UTC)
        folder = self.root / name
        begun = [path.name.removeprefix(BUILDING) for path in folder.glob(f"{BUILDING}*")]
        taken = [*self.versions(name), *filter(VERSION_PATTERN.fullmatch, begun)]
        if taken:
            last = datetime.strptime(max(taken), VERSION_FORMAT).replace(tzinfo=UTC)
            moment = max(moment, last + timedelta(microseconds=1))
        return moment.strftime(VERSION_FORMAT)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One writer of the pointer at a time."""
        folder = self.root / check_index_name(name)
        if not folder.is_dir():
            raise SnapshotMissing(name, POINTER, "no such index")
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _clean(folder: Path) -> None:
    """Remove what dead builds and dead writers of the pointer left behind."""
    for leftover in folder.glob(f"{BUILDING}*"):
        if _abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob(f".{POINTER}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _abandoned(folder: Path) -> bool:
    """Whether no living build holds the lock on the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # published, or removed by its own build, a moment ago
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def default_home() -> Path:
    """`HIVLP_HOME`, or `.hivlp` in the working folder."""
    return Path(os.environ.get("HIVLP_HOME") or ".hivlp")

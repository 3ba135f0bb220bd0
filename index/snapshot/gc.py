"""Removing versions that nobody needs, and what dead builds, pulls and removals left behind.

    report = store.gc("default", keep=3, older_than=timedelta(days=7))

Notable: a version leaves its name in one step, under the pointer's lock and an exclusive lease, so
that a reader either has all of it or is told that it is gone; its files go afterwards. A removal
that dies leaves a hidden folder, which the next one finishes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hivlp.index.snapshot.durable import sync
from hivlp.index.snapshot.leases import NO_LOCKS, Lease, in_use, take
from hivlp.index.snapshot.names import (
    BUILDING,
    ERASED,
    ERASING,
    POINTER,
    PULLING,
    QUARANTINE,
    REMOVING,
    versions_in,
)
from hivlp.index.snapshot.pointer import locked, read_history
from hivlp.index.snapshot.quarantine import Quarantine, Quarantined


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, or would be; `bytes_freed` leaves out what other versions share."""

    name: str
    bytes_freed: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that stays, and why."""

    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class GcReport:
    """What became of each version of an index, and of leftovers beside them."""

    index: str
    removed: tuple[Removed, ...]
    leftovers: tuple[Removed, ...]
    kept: tuple[Kept, ...]
    dry_run: bool

    @property
    def bytes_freed(self) -> int:
        """Of everything together."""
        return sum(gone.bytes_freed for gone in (*self.removed, *self.leftovers))


@dataclass(frozen=True, slots=True)
class Rules:
    """What an index's versions are judged by; `history` ends with the active one."""

    published: Sequence[str]
    history: Sequence[str]
    quarantined: Sequence[Quarantined]
    keep: int
    older_than: timedelta | None
    now: datetime

    def reason_to_keep(self, folder: Path) -> str | None:
        """Why a version stays, or None. Leases are another matter."""
        version = folder.name
        bad = {entry.version: entry for entry in self.quarantined}
        if self.history and version == self.history[-1]:
            return "active"
        if version in bad:
            return self._young(bad[version].time, "quarantined")
        there = set(self.published) - set(bad)
        good = [old for old in dict.fromkeys(reversed(self.history)) if old in there]
        if version in good[: self.keep]:
            return f"among the {self.keep} activated last"
        if self.older_than is None:
            waits = version not in self.history and version > max(self.history[-1:], default="")
            return "newer than the active version" if waits else None
        return self._young(datetime.fromtimestamp(folder.stat().st_mtime, UTC), "published")

    def _young(self, since: datetime, what: str) -> str | None:
        age = self.now - since
        if self.older_than is None or age >= self.older_than:
            return None
        return f"{what} {_span(age)} ago, less than {_span(self.older_than)}"


def _span(time: timedelta) -> str:
    seconds = max(0, round(time.total_seconds()))
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} seconds"


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is going to be removed: its name for a report, where it lies, and the lease on it.

    The lease is held until the files are gone, so that no other collection meddles; a plain file
    needs none, nor does what is only looked at.
    """

    name: str
    path: Path
    lease: Lease | None = None


def collect(
    folder: Path,
    quarantine: Quarantine,
    *,
    keep: int,
    older_than: timedelta | None,
    dry_run: bool,
) -> GcReport:
    """Collect the index in `folder`; see `SnapshotStore.gc`."""
    going: list[Doomed] = []
    kept: list[Kept] = []
    with contextlib.nullcontext() if dry_run else locked(folder):
        entries = quarantine.entries()
        published, history = versions_in(folder), read_history(folder)
        rules = Rules(published, history, entries, keep, older_than, datetime.now(UTC))
        dead = leftovers(folder, pulls=True)
        for version in published:
            reason = rules.reason_to_keep(folder / version)
            doomed = None if reason else _doom(folder / version, dry_run)
            if doomed is None:
                kept.append(Kept(version, reason or "in use"))
            else:
                going.append(doomed)
        if not dry_run:
            quarantine.forget({entry.version for entry in entries} - {k.version for k in kept})
    everything = (*going, *dead)
    sizes = freed([doomed.path for doomed in everything])
    end = let_be if dry_run else delete
    for doomed in everything:
        end(doomed)
    done = [Removed(doomed.name, size) for doomed, size in zip(everything, sizes, strict=True)]
    cut = len(going)
    return GcReport(folder.name, tuple(done[:cut]), tuple(done[cut:]), tuple(kept), dry_run)


def _doom(path: Path, dry_run: bool) -> Doomed | None:
    """A version that goes; None where somebody has it open."""
    if not dry_run:
        return retire(path)
    return None if in_use(path) else Doomed(path.name, path)


def retire(folder: Path) -> Doomed | None:
    """Take a version's name away, durably, if nobody has a lease on it; None where somebody has.

    By whoever holds the pointer's lock, and then deletes what is returned.
    """
    lease = _taken(folder)
    if lease is None:
        return None
    gone = folder.with_name(REMOVING + folder.name)
    while gone.exists():  # a removal died, or goes on, and the version was pulled again meanwhile
        gone = gone.with_name(f"{gone.name}+")
    try:
        folder.rename(gone)
        sync(folder.parent)
    except BaseException:
        lease.release()
        raise
    return Doomed(folder.name, gone, lease)


def leftovers(folder: Path, *, pulls: bool) -> list[Doomed]:
    """What the dead left in the folder of an index: builds, removals, pulls if asked, writers."""
    kinds = (BUILDING, REMOVING, PULLING) if pulls else (BUILDING, REMOVING)
    found = [path for kind in kinds for path in sorted(folder.glob(f"{kind}*"))]
    dead = [Doomed(path.name, path, lease) for path in found if (lease := _taken(path)) is not None]
    for name in (POINTER, QUARANTINE, ERASED, ERASING):
        dead += [Doomed(path.name, path) for path in sorted(folder.glob(f".{name}.*.tmp"))]
    return dead


def _taken(folder: Path) -> Lease | None:
    """A lease on a folder for oneself; None where anybody has one, may have one, or it is gone."""
    try:
        return take(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in NO_LOCKS:  # who reads can't be seen, so somebody may
            return None
        raise


def delete(doomed: Doomed) -> None:
    """Remove a folder, whose lease then ends, or a file."""
    if doomed.lease is None:
        doomed.path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(doomed.path)
    finally:
        doomed.lease.release()


def let_be(doomed: Doomed) -> None:
    """End the lease on what is not removed after all."""
    if doomed.lease is not None:
        doomed.lease.release()


def freed(paths: Sequence[Path]) -> list[int]:
    """Bytes that go when folders or files are removed one after the other.

    Those of a file with several names go with its last name.
    """
    gone: Counter[tuple[int, int]] = Counter()
    sizes = []
    for path in paths:
        size = 0
        for found in _files(path):
            key = (found.st_dev, found.st_ino)
            gone[key] += 1
            size += found.st_size if gone[key] == found.st_nlink else 0
        sizes.append(size)
    return sizes


def _files(path: Path) -> Iterator[os.stat_result]:
    """Of every file below a folder, or of a file; what goes meanwhile is left out."""
    inside = (Path(base) / name for base, _, names in os.walk(path) for name in names)
    for file in inside if path.is_dir() else iter((path,)):
        with contextlib.suppress(FileNotFoundError):
            yield file.lstat()

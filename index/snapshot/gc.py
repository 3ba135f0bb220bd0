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
from hivlp.index.snapshot.leases import NO_LOCKS, in_use, take
from hivlp.index.snapshot.names import (
    BUILDING,
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


def collect(
    folder: Path,
    quarantine: Quarantine,
    *,
    keep: int,
    older_than: timedelta | None,
    dry_run: bool,
) -> GcReport:
    """Collect the index in `folder`; see `SnapshotStore.gc`."""
    with contextlib.nullcontext() if dry_run else locked(folder):
        entries = quarantine.entries()
        published, history = versions_in(folder), read_history(folder)
        rules = Rules(published, history, entries, keep, older_than, datetime.now(UTC))
        going: list[Path] = []
        kept: list[Kept] = []
        for version in published:
            path = folder / version
            reason = rules.reason_to_keep(path)
            waiting = None if reason else _without_readers(path, dry_run)
            if waiting is None:
                kept.append(Kept(version, reason or "in use"))
            else:
                going.append(waiting)
        dead = leftovers(folder, pulls=True) if dry_run else _dead(folder, going)
        if not dry_run:
            quarantine.forget({entry.version for entry in entries} - {k.version for k in kept})
    sizes = freed([*going, *dead])
    for path in () if dry_run else (*going, *dead):
        delete(path)
    done = [
        Removed(path.name.removeprefix(REMOVING) if path in going else path.name, size)
        for path, size in zip((*going, *dead), sizes, strict=True)
    ]
    cut = len(going)
    return GcReport(folder.name, tuple(done[:cut]), tuple(done[cut:]), tuple(kept), dry_run)


def _without_readers(path: Path, dry_run: bool) -> Path | None:
    """Where the files of a version that goes lie now; None where somebody has it open."""
    if dry_run:
        return None if in_use(path) else path
    return retire(path)


def _dead(folder: Path, going: Sequence[Path]) -> list[Path]:
    return [path for path in leftovers(folder, pulls=True) if path not in going]


def retire(folder: Path) -> Path | None:
    """Take a version's name away, durably, if nobody has a lease on it; None where somebody has.

    By whoever holds the pointer's lock. Returns where its files wait to be removed.
    """
    try:
        lease = take(folder)
    except OSError as error:
        if error.errno in NO_LOCKS:  # who reads can't be seen, so somebody may
            return None
        raise
    if lease is None:
        return None
    try:
        gone = folder.with_name(REMOVING + folder.name)
        if gone.exists():  # a removal died, then the version was pulled again
            shutil.rmtree(gone)
        folder.rename(gone)
        sync(folder.parent)
    finally:
        lease.release()
    return gone


def leftovers(folder: Path, *, pulls: bool) -> list[Path]:
    """What the dead left in the folder of an index: builds, removals, pulls if asked, writers."""
    kinds = (BUILDING, REMOVING, PULLING) if pulls else (BUILDING, REMOVING)
    found = [path for kind in kinds for path in sorted(folder.glob(f"{kind}*"))]
    dead = [path for path in found if path.is_dir() and not in_use(path)]
    for name in (POINTER, QUARANTINE):
        dead += sorted(folder.glob(f".{name}.*.tmp"))
    return dead


def delete(path: Path) -> None:
    """Remove a folder or a file; what somebody else removes meanwhile doesn't matter."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        lease = take(path)
        if lease is not None:
            shutil.rmtree(path)
            lease.release()


def freed(folders: Sequence[Path]) -> list[int]:
    """Bytes that go when folders are removed one after the other: with a file's last name."""
    gone: Counter[tuple[int, int]] = Counter()
    sizes = []
    for folder in folders:
        size = 0
        for found in _files(folder):
            key = (found.st_dev, found.st_ino)
            gone[key] += 1
            size += found.st_size if gone[key] == found.st_nlink else 0
        sizes.append(size)
    return sizes


def _files(path: Path) -> Iterator[os.stat_result]:
    inside = path.rglob("*") if path.is_dir() else iter((path,))
    for file in inside:
        with contextlib.suppress(FileNotFoundError):
            if not file.is_dir():
                yield file.lstat()

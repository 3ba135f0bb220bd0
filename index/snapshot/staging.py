"""Folders in which versions are made: hidden, and locked while their process lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot import gc
from hivlp.index.snapshot.durable import sync
from hivlp.index.snapshot.leases import Lease, take
from hivlp.index.snapshot.names import (
    BUILDING,
    PULLING,
    VERSION_FORMAT,
    is_version,
    version_time,
    versions_in,
)
from hivlp.index.snapshot.pointer import locked


@dataclass(frozen=True, slots=True)
class Staging:
    """A version being written: fill `path`, then give it to `SnapshotStore.publish`.

    `lease` keeps others from taking the folder for a dead build's, until it is published.
    """

    index: str
    version: str
    path: Path
    lease: Lease = field(repr=False, compare=False)


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[Staging]:
    """As `SnapshotStore.stage`, for the index in `folder`."""
    _make(folder)
    with locked(folder):
        for leftover in gc.leftovers(folder, pulls=False):
            gc.delete(leftover)
        version = _new_version(folder)
        path = folder / f"{BUILDING}{version}"
        path.mkdir()
        staging = _staging(folder, version, path)
    mine = gc.Doomed(path.name, path, staging.lease)
    try:
        yield staging
    finally:
        if path.exists():
            gc.delete(mine)
        else:  # published
            gc.let_be(mine)


@contextlib.contextmanager
def stage_pull(folder: Path, version: str) -> Iterator[Staging]:
    """As `SnapshotStore.stage_pull`, for the index in `folder`."""
    _make(folder)
    path = folder / f"{PULLING}{version}"
    with locked(folder):
        path.mkdir(exist_ok=True)
        staging = _staging(folder, version, path)
    try:
        yield staging
    finally:
        staging.lease.release()


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)
    sync(folder.parent.parent)


def _staging(folder: Path, version: str, path: Path) -> Staging:
    lease = take(path)
    if lease is None:
        raise SnapshotError(folder.name, version, "another process is making it just now")
    return Staging(folder.name, version, path, lease)


def _new_version(folder: Path) -> str:
    """Later than every version there is or is being built, whatever the clock says."""
    moment = datetime.now(UTC)
    begun = [path.name.removeprefix(BUILDING) for path in folder.glob(f"{BUILDING}*")]
    taken = [version for version in (*versions_in(folder), *begun) if is_version(version)]
    if taken:
        moment = max(moment, version_time(max(taken)) + timedelta(microseconds=1))
    return moment.strftime(VERSION_FORMAT)

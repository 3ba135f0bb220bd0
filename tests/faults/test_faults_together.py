"""Readers, writers and collectors at once, each in a process of its own: nobody is in the way."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot

VERSIONS = 25
PATIENCE_S = 100.0


def write(home: Path, done: Event) -> None:
    """Supersede the active version again and again; remove the one before, unless it is read."""
    store = SnapshotStore(home)
    try:
        for _ in range(VERSIONS):
            active = store.current("default")
            manifest = store.manifest("default", active)
            with store.stage("default") as staging:
                shared = share_files(store.path("default", active), staging.path, manifest.files)
                new = manifest.model_copy(update={"version": staging.version})
                write_manifest(staging.path, new)
                store.publish(staging, supersede=True, expected=active, shared=shared)
            with contextlib.suppress(SnapshotError):  # in use, or collected
                store.remove("default", active)
    finally:
        done.set()


def read(home: Path, done: Event) -> None:
    """Open the active version: it is there each time, whole, and stays until it is closed."""
    store = SnapshotStore(home)
    opened = 0
    while not done.is_set() or not opened:
        snapshot = store.open("default")
        version = snapshot.manifest.version
        assert store.in_use("default", version)
        assert store.path("default", version).is_dir()
        assert snapshot.catalogue.ids(snapshot.sides["image"].row_items)[0] == "i0"
        snapshot.close()
        opened += 1


def collect(home: Path, done: Event) -> None:
    """Collect all that may be collected."""
    store = SnapshotStore(home)
    while not done.is_set():
        store.gc("default", keep=1, older_than=timedelta(0))


@pytest.mark.timeout(200)
def test_readers_writers_and_collectors_get_along(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(10, 16))
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    work: list[Callable[[Path, Event], None]] = [read, read, collect, write]
    processes = [context.Process(target=each, args=(tmp_path, done)) for each in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * len(work)
    store.verify("default")
    store.gc("default", keep=1, older_than=timedelta(0))
    assert store.versions("default") == [store.current("default")]
    hidden = {p.name for p in store.folder("default").iterdir() if p.name.startswith(".")}
    assert hidden == {".lock"}

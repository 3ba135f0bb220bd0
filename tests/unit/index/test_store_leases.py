"""Leases: seen by threads, by other opens of one process, and by other processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hivlp.index.errors import SnapshotError, SnapshotMissing
from hivlp.index.snapshot import leases
from hivlp.index.snapshot.leases import in_use, share, take
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def publish(store: SnapshotStore, seed: int = 0) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed))


def test_a_version_is_in_use_until_its_last_opening_is_closed(store: SnapshotStore) -> None:
    version = publish(store)
    assert not store.in_use("default", version)
    first, second = store.open("default"), store.open("default")
    assert store.in_use("default", version)
    first.close()
    assert store.in_use("default", version)
    second.close()
    second.close()
    assert not store.in_use("default", version)


def test_a_snapshot_that_is_dropped_unclosed_ends_its_lease(store: SnapshotStore) -> None:
    version = publish(store)
    snapshot = store.open("default")
    assert store.in_use("default", version)
    del snapshot
    gc.collect()
    assert not store.in_use("default", version)


def test_opening_that_fails_leaves_no_lease(store: SnapshotStore) -> None:
    version = publish(store)
    (store.path("default", version) / "image" / "rows.npy").write_bytes(b"x")
    with pytest.raises(SnapshotError):
        store.open("default")
    assert not store.in_use("default", version)


def test_only_the_versions_that_are_open_are_in_use(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    snapshot = store.open("default", first)
    assert [store.in_use("default", v) for v in (first, second)] == [True, False]
    snapshot.close()
    with pytest.raises(SnapshotMissing):
        store.in_use("default", "20200101T000000-000000")


def _hold(home: Path, pipe: Connection) -> None:
    snapshot = SnapshotStore(home).open("default")
    pipe.send(snapshot.manifest.version)
    pipe.recv()


def test_a_lease_of_another_process_is_seen_and_ends_with_a_kill(store: SnapshotStore) -> None:
    version = publish(store)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(store.home, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == version
    assert store.in_use("default", version)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not store.in_use("default", version)


def test_probing_never_makes_an_opening_fail(store: SnapshotStore) -> None:
    version = publish(store)
    folder = store.path("default", version)
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            in_use(folder)

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        lease = share(folder)
        assert lease.held
        lease.release()
    done.set()
    for thread in threads:
        thread.join()
    assert not in_use(folder)


def test_a_lease_taken_alone_excludes_and_is_excluded(tmp_path: Path) -> None:
    reader = share(tmp_path)
    assert take(tmp_path) is None
    reader.release()
    alone = take(tmp_path)
    assert alone is not None
    assert take(tmp_path) is None
    alone.release()
    assert not alone.held


def test_a_folder_that_was_moved_away_while_it_was_locked_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "version"
    folder.mkdir()
    real = leases.fcntl.flock

    def moved_first(descriptor: int, how: int) -> None:
        folder.rename(tmp_path / "gone")
        real(descriptor, how)

    monkeypatch.setattr(leases.fcntl, "flock", moved_first)
    with pytest.raises(FileNotFoundError, match="removed"):
        share(folder)
    monkeypatch.undo()
    assert not in_use(tmp_path / "gone")
    assert not in_use(folder)


def test_a_file_system_without_locks_is_read_and_counts_as_in_use(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    version = publish(store)

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(leases.errno.ENOLCK, "no locks here")

    monkeypatch.setattr(leases.fcntl, "flock", no_locks)
    store.open("default").close()
    assert "without a lease" in caplog.text
    assert store.in_use("default", version)


def test_a_removal_that_overtakes_an_opening_is_told_as_missing(store: SnapshotStore) -> None:
    version = publish(store)
    shutil.rmtree(store.path("default", version))
    with pytest.raises(SnapshotMissing, match="no such version"):
        store.open("default")


def test_an_active_version_that_is_superseded_while_it_is_opened_is_followed(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store), publish(store, 1)
    store.remove("default", first)
    answers = iter([first, second, second])
    monkeypatch.setattr(SnapshotStore, "current", lambda self, name: next(answers))
    assert store.open("default").manifest.version == second

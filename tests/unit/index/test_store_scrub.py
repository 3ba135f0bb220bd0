"""Scrubbing: what opening left out is read, slowly, once, and what is wrong is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.scrub import BLOCK, Pace, Scrubber
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot

ROWS = "image/rows.npy"
FAST = float(1 << 40)
Make = Callable[..., Scrubber]


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


@pytest.fixture
def found() -> list[tuple[str, str, str]]:
    return []


@pytest.fixture
def scrubber(store: SnapshotStore, found: list[tuple[str, str, str]]) -> Iterator[Make]:
    made: list[Scrubber] = []

    def make(**options: object) -> Scrubber:
        given: dict[str, object] = {"hash_up_to_bytes": 0, "bytes_per_s": FAST}
        given |= {"on_corrupt": lambda *told: found.append(told)}
        made.append(Scrubber(store, **(given | options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def publish(store: SnapshotStore, seed: int = 0, rows: int = 10) -> str:
    return write_snapshot(store, images=unit_vectors(rows, 16, seed))


def shared_version(store: SnapshotStore, source: str) -> str:
    manifest = store.manifest("default", source)
    with store.stage("default") as staging:
        shared = share_files(store.path("default", source), staging.path, manifest.files)
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        store.publish(staging, shared=shared)
    return staging.version


def spoil(store: SnapshotStore, version: str, name: str = ROWS) -> None:
    file = store.path("default", version) / name
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_byte_that_opening_did_not_read_is_found_quarantined_and_told(
    store: SnapshotStore, scrubber: Make, found: list[tuple[str, str, str]]
) -> None:
    version = publish(store)
    spoil(store, version)
    store.open("default", hash_up_to_bytes=0).close()
    scrub = scrubber()
    scrub.watch("default", version)
    assert scrub.wait_idle(30)
    assert found == [("default", version, ROWS)]
    (entry,) = store.quarantine("default").entries()
    assert (entry.version, entry.file) == (version, ROWS)
    assert "sha256" in entry.reason


def test_a_whole_version_is_read_once_and_nothing_is_told(
    store: SnapshotStore, scrubber: Make, found: list[tuple[str, str, str]]
) -> None:
    read: list[float] = []
    version = publish(store)
    scrub = scrubber(bytes_per_s=1.0, sleep=read.append, clock=lambda: 0.0)
    for _ in range(2):
        scrub.watch("default", version)
        assert scrub.wait_idle(30)
    files = store.manifest("default", version).files.items()
    assert len(read) == sum(not name.endswith(".arrow") for name, _ in files)
    assert found == []
    assert store.quarantine("default").entries() == []


def test_what_opening_hashes_is_left_out(store: SnapshotStore, scrubber: Make) -> None:
    read: list[float] = []
    version = publish(store)
    scrub = scrubber(hash_up_to_bytes=1 << 30, bytes_per_s=1.0, sleep=read.append)
    scrub.watch("default", version)
    assert scrub.wait_idle(30)
    assert read == []


def test_files_shared_with_the_version_before_are_not_read_again(
    store: SnapshotStore, scrubber: Make
) -> None:
    read: list[float] = []
    first = publish(store)
    scrub = scrubber(bytes_per_s=1.0, sleep=read.append, clock=lambda: 0.0)
    scrub.watch("default", first)
    assert scrub.wait_idle(30)
    count = len(read)
    scrub.watch("default", shared_version(store, first))
    assert scrub.wait_idle(30)
    assert len(read) == count


@pytest.mark.parametrize("shares", [True, False])
def test_a_file_is_read_on_after_a_swap_exactly_while_the_new_version_has_it(
    store: SnapshotStore, scrubber: Make, shares: bool
) -> None:
    rows = 3 * BLOCK // 64  # several blocks
    first = publish(store, rows=rows)
    second = shared_version(store, first) if shares else publish(store, 1)
    size = store.manifest("default", first).files[ROWS].size_bytes
    blocks = -(-size // BLOCK)
    assert blocks >= 3
    read = 0

    def swap_at_the_first_block(_: float) -> None:
        nonlocal read
        read += 1
        if read == 1:
            scrub.watch("default", second)

    scrub = scrubber(
        hash_up_to_bytes=size - 1, bytes_per_s=1.0, sleep=swap_at_the_first_block, clock=lambda: 0.0
    )
    scrub.watch("default", first)
    assert scrub.wait_idle(30)
    assert read == (blocks if shares else 1)


@pytest.mark.parametrize("name", [ROWS, "manifest.json"])
def test_a_file_that_vanished_is_told(
    store: SnapshotStore, scrubber: Make, found: list[tuple[str, str, str]], name: str
) -> None:
    version = publish(store)
    (store.path("default", version) / name).unlink()
    scrub = scrubber()
    scrub.watch("default", version)
    assert scrub.wait_idle(30)
    assert found == [("default", version, name)]


def test_a_version_that_was_removed_is_no_trouble(
    store: SnapshotStore, scrubber: Make, found: list[tuple[str, str, str]]
) -> None:
    first, _ = publish(store), publish(store, 1)
    store.remove("default", first)
    scrub = scrubber()
    scrub.watch("default", first)
    assert scrub.wait_idle(30)
    assert found == []
    assert store.quarantine("default").entries() == []


def test_it_goes_on_after_a_callback_that_fails(store: SnapshotStore, scrubber: Make) -> None:
    told: list[str] = []
    version = publish(store)
    spoil(store, version)

    def fails(index: str, *_: str) -> None:
        told.append(index)
        raise RuntimeError("can't swap")

    scrub = scrubber(on_corrupt=fails)
    for _ in range(2):
        scrub.watch("default", version)
        assert scrub.wait_idle(30)
    assert told == ["default", "default"]


def test_closing_stops_it_in_the_middle_of_a_sleep(store: SnapshotStore, scrubber: Make) -> None:
    version = publish(store)
    scrub = scrubber(bytes_per_s=1e-6)  # years for the first block
    scrub.watch("default", version)
    assert not scrub.wait_idle(0.05)
    closer = threading.Thread(target=scrub.close)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    scrub.watch("default", version)
    assert not any(thread.name == "hivlp-scrub" for thread in threading.enumerate())


def test_the_callback_may_close_it(store: SnapshotStore, scrubber: Make) -> None:
    version = publish(store)
    spoil(store, version)
    closed = threading.Event()

    def close(*_: str) -> None:
        scrub.close()
        closed.set()

    scrub = scrubber(on_corrupt=close)
    scrub.watch("default", version)
    assert closed.wait(30)


def test_the_pace_keeps_to_its_rate_and_makes_up_for_a_second_at_most() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(100.0, lambda: now[0], sleep)
    for _ in range(10):
        pace.after(50)
    assert now[0] == pytest.approx(5.0)
    now[0] += 60.0  # the machine was busy
    slept.clear()
    for _ in range(10):
        pace.after(50)
    assert sum(slept) == pytest.approx(4.0)

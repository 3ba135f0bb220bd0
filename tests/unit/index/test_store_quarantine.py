"""Versions that fail are remembered and passed over, until they are verified again."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from hivlp.index.errors import (
    NoGoodVersion,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotQuarantined,
)
from hivlp.index.snapshot import durable, last_good
from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.quarantine import Quarantined
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot

ROWS = "image/rows.npy"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def publish(store: SnapshotStore, seed: int = 0, **options: bool) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed), **options)


def spoil(store: SnapshotStore, version: str, name: str = ROWS) -> bytes:
    """Change a byte; returns what was there before."""
    file = store.path("default", version) / name
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


def last_good_version(store: SnapshotStore) -> tuple[str, list[str]]:
    snapshot, passed = store.open_last_good("default")
    snapshot.close()
    return snapshot.manifest.version, [entry.version for entry in passed]


def recorded(store: SnapshotStore) -> list[Quarantined]:
    """As another process sees it."""
    return SnapshotStore(store.home).quarantine("default").entries()


def test_the_active_version_is_opened_where_it_is_whole(store: SnapshotStore) -> None:
    publish(store)
    second = publish(store, 1)
    assert last_good_version(store) == (second, [])
    assert not (store.folder("default") / "QUARANTINE").exists()


def test_the_one_before_serves_where_the_active_one_fails(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    spoil(store, second)
    assert last_good_version(store) == (first, [second])
    (entry,) = recorded(store)
    assert (entry.version, entry.file) == (second, ROWS)
    assert "sha256" in entry.reason
    assert store.current("default") == second
    assert last_good_version(store) == (first, [second])


def test_activations_come_first_the_latest_before_then_others_by_age(
    store: SnapshotStore,
) -> None:
    a, b, c, d = (publish(store, seed, activate=False) for seed in range(4))
    store.activate("default", b)
    store.activate("default", a)
    order = [a, b, d, c]
    for place, version in enumerate(order):
        assert last_good_version(store) == (version, order[:place])
        spoil(store, version)
    with pytest.raises(NoGoodVersion) as error:
        last_good_version(store)
    assert list(error.value.reasons) == order
    for version in order:
        assert f"{version}: {ROWS}: its sha256" in str(error.value)


def test_an_active_version_that_is_gone_is_passed_over_and_recorded(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    shutil.rmtree(store.path("default", second))
    assert last_good_version(store) == (first, [second])
    (entry,) = recorded(store)
    assert (entry.version, entry.reason) == (second, "no such version")


def test_older_activations_that_are_gone_are_no_trouble(store: SnapshotStore) -> None:
    first, second, third = (publish(store, seed) for seed in range(3))
    store.remove("default", second)
    spoil(store, third)
    assert last_good_version(store) == (first, [third])
    assert [entry.version for entry in recorded(store)] == [third]


def test_what_was_never_activated_is_not_served_by_itself(store: SnapshotStore) -> None:
    publish(store, activate=False)
    with pytest.raises(SnapshotMissing, match="no active version"):
        store.open_last_good("default")


@pytest.mark.parametrize("text", ["", "{", '{"history": ["../../etc"]}', "[" * 20_000])
def test_a_pointer_that_cant_be_read_lets_the_newest_whole_version_serve_loudly(
    store: SnapshotStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = publish(store), publish(store, 1)
    (store.folder("default") / "CURRENT").write_text(text)
    assert last_good_version(store) == (second, [])
    assert "unreadable pointer" in caplog.text
    spoil(store, second)
    assert last_good_version(store) == (first, [second])
    with pytest.raises(SnapshotError, match="unreadable pointer"):
        store.open("default")


def test_a_quarantined_version_is_neither_activated_nor_rolled_back_to(
    store: SnapshotStore,
) -> None:
    first, second = publish(store), publish(store, 1)
    store.quarantine("default").add(first, ROWS, "spoilt")
    for attempt in (lambda: store.activate("default", first), lambda: store.rollback("default")):
        with pytest.raises(SnapshotQuarantined, match=rf"{ROWS}: spoilt.*snapshots verify"):
            attempt()
    assert store.current("default") == second


def test_verifying_lifts_a_quarantine_once_the_files_are_right(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    data = spoil(store, second)
    last_good_version(store)
    with pytest.raises(SnapshotCorrupt):
        store.verify("default", second)
    assert [entry.version for entry in recorded(store)] == [second]
    (store.path("default", second) / ROWS).write_bytes(data)
    assert last_good_version(store) == (first, [second])
    store.verify("default", second)
    assert recorded(store) == []
    assert last_good_version(store) == (second, [])
    store.activate("default", second)


def test_a_list_marks_what_is_quarantined(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    store.quarantine("default").add(first, ROWS, "spoilt")
    marks = {entry.version: entry.quarantined for entry in store.listing("default")}
    assert marks[second] is None
    assert marks[first] is not None
    assert marks[first].what == f"{ROWS}: spoilt"


def test_versions_that_share_the_damaged_file_fail_with_it(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    manifest = store.manifest("default", second)
    with store.stage("default") as staging:
        shared = share_files(store.path("default", second), staging.path, manifest.files)
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        store.publish(staging, shared=shared)
    spoil(store, staging.version)
    snapshot, passed = store.open_last_good("default", hash_up_to_bytes=None)
    assert snapshot.manifest.version == first
    assert {entry.version for entry in passed} == {second, staging.version}
    assert f"one file with that of version {staging.version}" in passed[1].reason


def test_a_file_of_the_same_content_that_is_another_file_is_not_condemned(
    store: SnapshotStore,
) -> None:
    first, second = publish(store), publish(store)
    assert (
        store.manifest("default", first).files[ROWS]
        == store.manifest("default", second).files[ROWS]
    )
    spoil(store, second)
    assert last_good_version(store) == (first, [second])


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_want_of_descriptors_memory_or_rights_condemns_nobody_for_ever(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    first, second = publish(store), publish(store, 1)
    real = Snapshot.open

    def fails(path: Path, *given: object, **options: object) -> Snapshot:
        if path.name == second:
            raise OSError(code, os.strerror(code), str(path / ROWS))
        return real(path, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Snapshot, "open", fails)
    assert last_good_version(store) == (first, [second])
    assert recorded(store) == []
    monkeypatch.undo()
    assert last_good_version(store) == (second, [])


def test_a_manifest_of_another_release_condemns_nobody(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    file = store.path("default", second) / "manifest.json"
    written = json.loads(file.read_text()) | {"format_version": 99, "seal": "0" * 64}
    text = json.dumps(written)
    file.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))
    snapshot, (entry,) = store.open_last_good("default")
    assert snapshot.manifest.version == first
    assert (entry.version, entry.file) == (second, "manifest.json")
    assert "format_version" in entry.reason
    assert recorded(store) == []


def test_a_disk_that_cant_read_condemns_the_version(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store), publish(store, 1)
    real = Snapshot.open

    def fails(path: Path, *given: object, **options: object) -> Snapshot:
        if path.name == second:
            raise OSError(errno.EIO, "Input/output error", str(path / ROWS))
        return real(path, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Snapshot, "open", fails)
    assert last_good_version(store) == (first, [second])
    assert [(entry.version, entry.file) for entry in recorded(store)] == [(second, "rows.npy")]


def test_a_quarantine_that_cant_be_written_is_remembered_by_the_process(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = publish(store), publish(store, 1)
    spoil(store, second)

    def full(target: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hivlp.index.snapshot.quarantine.replace_text", full)
    assert last_good_version(store) == (first, [second])
    assert "only this process knows" in caplog.text
    assert [entry.version for entry in store.quarantine("default").entries()] == [second]
    assert recorded(store) == []
    monkeypatch.undo()
    with pytest.raises(SnapshotQuarantined):
        store.activate("default", second)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"quarantined": 5}', '{"quarantined": [{"version": "x"}]}', "\xff"]
)
def test_an_unreadable_quarantine_stops_commands_and_not_serving(
    store: SnapshotStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = publish(store), publish(store, 1)
    file = store.folder("default") / "QUARANTINE"
    file.write_text(text, encoding="latin-1")
    for attempt in (
        lambda: store.activate("default", first),
        lambda: store.rollback("default"),
        lambda: store.listing("default"),
        lambda: store.gc("default"),
    ):
        with pytest.raises(SnapshotError, match=r"QUARANTINE.*remove it"):
            attempt()
    assert last_good_version(store) == (second, [])
    assert "QUARANTINE" in caplog.text
    spoil(store, second)
    assert last_good_version(store) == (first, [second])
    assert [entry.version for entry in recorded(store)] == [second]


def test_the_file_is_as_documented_and_replaced_in_one_step(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    store.quarantine("default").add(first, ROWS, "spoilt")
    file = store.folder("default") / "QUARANTINE"
    text = file.read_text()
    (entry,) = json.loads(text)["quarantined"]
    assert sorted(entry) == ["file", "reason", "time", "version"]
    assert entry["time"].endswith("Z")
    with file.open() as reader:
        store.quarantine("default").add(second, ROWS, "spoilt too")
        store.quarantine("default").add(second, ROWS, "spoilt more")
        assert reader.read() == text
    assert [e.reason for e in recorded(store)] == ["spoilt", "spoilt more"]


def test_a_full_disk_leaves_no_half_file_behind(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        durable.replace_text(store.folder("default") / "CURRENT", "{}")
    monkeypatch.undo()
    assert not list(store.folder("default").glob(".CURRENT.*"))
    store.current("default")


def test_a_pointer_that_moves_while_the_active_version_is_removed_is_followed(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store), publish(store, 1)
    moved: list[str] = []
    real = SnapshotStore.open

    def superseded_first(
        self: SnapshotStore, name: str, version: str, **options: object
    ) -> Snapshot:
        if not moved:
            moved.append(publish(store, 2))
            store.remove(name, second)
        return real(self, name, version, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotStore, "open", superseded_first)
    snapshot, passed = last_good.open_last_good(
        store, "default", backend="faiss-cpu", hash_up_to_bytes=None
    )
    assert (snapshot.manifest.version, passed) == (moved[0], [])
    assert first in store.versions("default")
    assert recorded(store) == []

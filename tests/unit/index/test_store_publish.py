"""Publishing beside others: shared files, taking the active version's place, and being too late."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.errors import SnapshotCorrupt, SnapshotError
from hivlp.index.snapshot import durable, snapshot
from hivlp.index.snapshot.manifest import MANIFEST_NAME, write_manifest
from hivlp.index.snapshot.shared import Shared, share_files
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import file_record
from tests.fakes import unit_vectors, write_snapshot

OWN = "image/level1.faiss"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def publish(store: SnapshotStore, seed: int = 0) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed))


def republish(
    store: SnapshotStore, source: str, *, own: tuple[str, ...] = (), **options: Any
) -> str:
    """A version of the same files: links, but for those in `own`, which are copies."""
    manifest = store.manifest("default", source)
    folder = store.path("default", source)
    with store.stage("default") as staging:
        shared = share_files(folder, staging.path, set(manifest.files) - set(own))
        for name in own:
            (staging.path / name).parent.mkdir(exist_ok=True)
            shutil.copy(folder / name, staging.path / name)
        renamed = manifest.model_copy(update={"version": staging.version})
        write_manifest(staging.path, renamed)
        store.publish(staging, shared=options.pop("shared", shared), **options)
    return staging.version


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Names of the files that are hashed and flushed from here on."""
    hashed: list[str] = []
    flushed: list[str] = []

    def note_hash(path: Path) -> Any:
        hashed.append(path.name)
        return file_record(path)

    real = durable.sync

    def note_sync(path: Path) -> None:
        if path.is_file():
            flushed.append(path.name)
        real(path)

    monkeypatch.setattr(snapshot, "file_record", note_hash)
    monkeypatch.setattr(durable, "sync", note_sync)
    return hashed, flushed


def test_shared_files_are_neither_hashed_nor_flushed_again(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(store)
    hashed, flushed = watched(monkeypatch)
    second = republish(store, first, own=(OWN,))
    assert hashed == ["level1.faiss"]
    assert sorted(flushed) == ["level1.faiss", MANIFEST_NAME]
    hashed.clear()
    store.verify("default", second)
    assert len(hashed) == len(store.manifest("default", second).files)


def test_without_sharing_every_file_is_hashed_and_flushed(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, flushed = watched(monkeypatch)
    version = publish(store)
    files = store.manifest("default", version).files
    assert len(hashed) == len(files)
    assert len(flushed) == len(files) + 1


def test_a_file_that_only_claims_to_be_shared_is_refused(store: SnapshotStore) -> None:
    first = publish(store)
    claim = Shared(first, frozenset(store.manifest("default", first).files))
    with pytest.raises(SnapshotCorrupt, match=f"not the file of version {first}") as error:
        republish(store, first, own=(OWN,), shared=claim)
    assert error.value.file == OWN
    assert store.versions("default") == [first]


def test_a_shared_file_that_is_recorded_otherwise_is_refused(store: SnapshotStore) -> None:
    first = publish(store)
    manifest = store.manifest("default", first)
    with store.stage("default") as staging:
        shared = share_files(store.path("default", first), staging.path, manifest.files)
        record = manifest.files[OWN].model_copy(update={"sha256": "0" * 64})
        files = {**manifest.files, OWN: record}
        update = {"version": staging.version, "files": files}
        write_manifest(staging.path, manifest.model_copy(update=update))
        with pytest.raises(SnapshotCorrupt, match="recorded otherwise"):
            store.publish(staging, shared=shared)


def test_files_shared_with_a_quarantined_version_are_hashed(store: SnapshotStore) -> None:
    first = publish(store)
    rows = store.path("default", first) / "image" / "rows.npy"
    rows.write_bytes(rows.read_bytes()[:-1] + b"\x00")
    store.quarantine("default").add(first, "image/rows.npy", "spoilt")
    with pytest.raises(SnapshotCorrupt, match=r"rows\.npy"):
        republish(store, first)


def test_without_verifying_the_files_are_compared_all_the_same(store: SnapshotStore) -> None:
    first = publish(store)
    second = republish(store, first, verify=False)
    assert store.current("default") == second
    manifest = store.manifest("default", first)
    with store.stage("default") as staging:
        (staging.path / "stray").write_text("x")
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        with pytest.raises(SnapshotCorrupt, match="unexpected"):
            store.publish(staging, verify=False)


def test_a_superseding_version_takes_the_last_place_in_the_history(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    third = republish(store, second, supersede=True, expected=second)
    assert store.history("default") == [first, third]
    assert store.versions("default") == [first, second, third]
    assert store.rollback("default") == first


def test_the_first_version_may_supersede_nothing(store: SnapshotStore) -> None:
    first = publish(store)
    (store.folder("default") / "CURRENT").unlink()
    second = republish(store, first, supersede=True)
    assert store.history("default") == [second]


@pytest.mark.parametrize("supersede", [True, False])
def test_whoever_comes_too_late_is_refused_and_the_pointer_stays(
    store: SnapshotStore, supersede: bool
) -> None:
    first, second = publish(store), publish(store, 1)
    with pytest.raises(SnapshotError, match=f"{first} was to be active, {second} is"):
        republish(store, first, supersede=supersede, expected=first)
    assert store.history("default") == [first, second]
    assert store.versions("default") == [first, second]
    assert not list(store.folder("default").glob(".building-*"))


def test_superseding_by_an_unreadable_pointer_is_refused(store: SnapshotStore) -> None:
    first = publish(store)
    (store.folder("default") / "CURRENT").write_text("{")
    with pytest.raises(SnapshotError, match="unreadable pointer"):
        republish(store, first, supersede=True)
    assert store.versions("default") == [first]


def test_a_version_can_be_opened_while_its_builder_still_has_the_folder(
    store: SnapshotStore,
) -> None:
    first = publish(store)
    manifest = store.manifest("default", first)
    with store.stage("default") as staging:
        shared = share_files(store.path("default", first), staging.path, manifest.files)
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        store.publish(staging, shared=shared)
        with_it = store.open("default")
        assert with_it.manifest.version == staging.version
    assert store.in_use("default", staging.version)
    with_it.close()

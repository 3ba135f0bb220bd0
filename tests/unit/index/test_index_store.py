"""Publishing, pointing, rolling back; and what a death in between leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hivlp.index.errors import BuildError, SnapshotCorrupt, SnapshotError, SnapshotMissing
from hivlp.index.snapshot import staging as staging_module
from hivlp.index.snapshot import store as store_module
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore, check_index_name, default_home
from hivlp.models.errors import InputError
from tests.fakes import unit_vectors, write_snapshot


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def publish(store: SnapshotStore, seed: int = 0, **options: bool) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed), **options)


def test_a_published_version_is_active_and_opens(store: SnapshotStore) -> None:
    version = publish(store)
    assert store.current("default") == version
    assert store.versions("default") == [version]
    assert store.names() == ["default"]
    assert store.open("default").manifest.version == version


def test_versions_sort_by_time_even_when_the_clock_goes_back(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(store)

    class OldClock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(staging_module, "datetime", OldClock)
    second = publish(store)
    assert store.versions("default") == [first, second]
    assert store.current("default") == second


def test_publishing_without_activating_leaves_the_pointer(store: SnapshotStore) -> None:
    first = publish(store)
    second = publish(store, activate=False)
    assert store.current("default") == first
    store.activate("default", second)
    assert store.current("default") == second


def test_rollback_goes_back_step_by_step(store: SnapshotStore) -> None:
    first, second, third = (publish(store, seed) for seed in range(3))
    assert store.rollback("default") == second
    assert store.rollback("default") == first
    with pytest.raises(SnapshotError, match="no earlier version"):
        store.rollback("default")
    assert store.current("default") == first
    assert third in store.versions("default")


def test_a_pointer_that_moves_while_one_rolls_back_is_left(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store), publish(store)
    real = SnapshotStore.open
    third: list[str] = []

    def another_first(self: SnapshotStore, name: str, version: str | None = None) -> Snapshot:
        if version == first:
            third.append(publish(self))
        return real(self, name, version)

    monkeypatch.setattr(SnapshotStore, "open", another_first)
    with pytest.raises(SnapshotError, match="moved meanwhile"):
        store.rollback("default")
    assert store.history("default") == [first, second, *third]


def test_activating_again_does_not_make_rollback_go_in_circles(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store)
    store.activate("default", first)
    assert store.rollback("default") == second


def test_a_corrupt_version_can_be_neither_activated_nor_rolled_back_to(
    store: SnapshotStore,
) -> None:
    first, second = publish(store), publish(store)
    file = store.path("default", first) / "image" / "rows.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    for attempt in (lambda: store.activate("default", first), lambda: store.rollback("default")):
        with pytest.raises(SnapshotCorrupt, match=r"image/rows\.npy"):
            attempt()
    assert store.current("default") == second


def test_missing_indexes_and_versions_are_named(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotMissing, match="nothing-here"):
        store.current("nothing-here")
    with pytest.raises(SnapshotMissing, match="nothing-here"):
        store.rollback("nothing-here")
    publish(store)
    for version in ("20200101T000000-000000", "..", "", "CURRENT"):
        with pytest.raises(SnapshotMissing, match="no such version"):
            store.open("default", version)
        with pytest.raises(SnapshotMissing, match="no such version"):
            store.activate("default", version)


@pytest.mark.parametrize("name", ["a", "0", "emoji-2_x", "x" * 64])
def test_good_index_names(name: str) -> None:
    assert check_index_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "_a", "a/b", "..", "a b", "x" * 65, "é", "a\n", "a.b", "../up"]
)
def test_bad_index_names_are_refused_everywhere(store: SnapshotStore, name: str) -> None:
    for attempt in (store.versions, store.current, store.open, store.rollback, store.listing):
        with pytest.raises(InputError, match="no index name"):
            attempt(name)


def test_a_failed_build_leaves_no_trace(store: SnapshotStore) -> None:
    first = publish(store)

    def fail() -> None:
        with store.stage("default") as staging:
            (staging.path / "rows.npy").write_bytes(b"partial")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    assert store.versions("default") == [first]
    assert sorted(path.name for path in (store.root / "default").iterdir()) == sorted(
        [first, "CURRENT", ".lock"]
    )


def test_nothing_without_a_manifest_is_published(store: SnapshotStore) -> None:
    with pytest.raises(BuildError, match="no manifest"), store.stage("default") as staging:
        store.publish(staging)


def test_what_differs_from_its_manifest_is_not_published(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    real = SnapshotStore.publish

    def tampered(self: SnapshotStore, staging: store_module.Staging, **options: bool) -> Path:
        (staging.path / "image" / "rows.npy").write_bytes(b"other")
        return real(self, staging, **options)

    monkeypatch.setattr(SnapshotStore, "publish", tampered)
    with pytest.raises(SnapshotCorrupt, match=r"image/rows\.npy"):
        publish(store)
    assert len(store.versions("default")) == 1


def _die_before(home: Path, step: str) -> None:
    """A build in a process of its own that is killed at `step` of publishing."""

    def die(*_: object, **__: object) -> None:
        os._exit(9)

    patched = {"rename": Path, "write_history": store_module, "sync_tree": store_module}[step]
    setattr(patched, step, die)
    write_snapshot(SnapshotStore(home), images=unit_vectors(10, 16, 5))


@pytest.mark.parametrize("step", ["sync_tree", "rename", "write_history"])
def test_a_kill_while_publishing_leaves_the_store_fine(store: SnapshotStore, step: str) -> None:
    first = publish(store)
    process = multiprocessing.get_context("spawn").Process(
        target=_die_before, args=(store.home, step)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert store.current("default") == first
    store.verify("default")
    survivors = store.versions("default")
    assert len(survivors) == (2 if step == "write_history" else 1)
    second = publish(store)
    assert store.current("default") == second
    assert not list((store.root / "default").glob(".building-*"))
    for version in store.versions("default"):
        store.verify("default", version)


def test_a_living_build_is_not_cleaned_away(store: SnapshotStore) -> None:
    with store.stage("default") as staging:
        publish(store)
        assert staging.path.is_dir()
    assert not staging.path.exists()


def test_leftovers_of_dead_builds_are_cleaned(store: SnapshotStore) -> None:
    publish(store)
    leftover = store.root / "default" / ".building-20200101T000000-000000"
    (leftover / "image").mkdir(parents=True)
    (leftover / "image" / "rows.npy").write_bytes(b"half")
    (store.root / "default" / ".CURRENT.1.tmp").write_text("half")
    assert len(store.versions("default")) == 1
    publish(store)
    assert not leftover.exists()
    assert not (store.root / "default" / ".CURRENT.1.tmp").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"history": ["../../etc"]}', '{"history": 5}', '{"other": 1}']
)
def test_an_unreadable_pointer_is_an_error_that_names_it(store: SnapshotStore, text: str) -> None:
    publish(store)
    (store.root / "default" / "CURRENT").write_text(text)
    with pytest.raises(SnapshotError, match="unreadable pointer"):
        store.current("default")


@pytest.mark.parametrize("text", ["{", '{"history": null}'])
def test_activating_or_building_mends_an_unreadable_pointer(
    store: SnapshotStore, text: str
) -> None:
    version = publish(store)
    pointer = store.root / "default" / "CURRENT"
    pointer.write_text(text)
    assert [entry.current for entry in store.listing("default")] == [False]
    store.activate("default", version)
    assert store.current("default") == version
    pointer.write_text(text)
    assert publish(store) == store.current("default")


def test_builds_at_the_same_moment_get_versions_of_their_own(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(staging_module, "datetime", Stopped)
    with store.stage("default") as first, store.stage("default") as second:
        assert first.version < second.version


def test_a_build_that_is_published_while_another_begins_is_no_leftover(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = store.root / "default" / ".building-20200101T000000-000000"
    real = Path.glob

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        yield from real(self, pattern)
        if pattern.startswith(".building-"):
            yield gone

    monkeypatch.setattr(Path, "glob", glob)
    assert publish(store) == store.current("default")


def test_the_pointer_is_replaced_in_one_step(store: SnapshotStore) -> None:
    versions = [publish(store) for _ in range(2)]
    pointer = store.root / "default" / "CURRENT"
    assert json.loads(pointer.read_text()) == {"history": versions}
    before = pointer.stat().st_ino
    store.activate("default", versions[0])
    assert pointer.stat().st_ino != before


def test_listing_shows_every_version_and_what_is_wrong(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store)
    (store.path("default", first) / "manifest.json").write_text("{}")
    found = store.listing("default")
    assert [entry.version for entry in found] == [first, second]
    assert [entry.current for entry in found] == [False, True]
    assert found[0].manifest is None
    assert "manifest.json" in str(found[0].trouble)


def test_the_home_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVLP_HOME", "/somewhere")
    assert default_home() == Path("/somewhere")
    monkeypatch.delenv("HIVLP_HOME")
    assert default_home() == Path(".hivlp")

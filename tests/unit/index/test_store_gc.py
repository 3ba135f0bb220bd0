"""What gc and remove take away, what they leave and say, and what a death in between leaves."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hivlp.index.errors import SnapshotError, SnapshotMissing
from hivlp.index.snapshot import gc as gc_module
from hivlp.index.snapshot.gc import GcReport
from hivlp.index.snapshot.leases import take
from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def publish(store: SnapshotStore, seed: int = 0, **options: bool) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed), **options)


def removed(report: GcReport) -> list[str]:
    return [gone.name for gone in report.removed]


def kept(report: GcReport) -> dict[str, str]:
    return {stays.version: stays.reason for stays in report.kept}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def visible(store: SnapshotStore) -> list[str]:
    return sorted(path.name for path in store.folder("default").iterdir())


def test_all_but_the_last_activations_go(store: SnapshotStore) -> None:
    versions = [publish(store, seed) for seed in range(5)]
    sizes = [size(store.path("default", version)) for version in versions]
    report = store.gc("default", keep=2)
    assert removed(report) == versions[:3]
    assert [gone.bytes_freed for gone in report.removed] == sizes[:3]
    assert report.bytes_freed == sum(sizes[:3])
    assert kept(report) == {versions[3]: "among the 2 activated last", versions[4]: "active"}
    assert visible(store) == sorted([".lock", "CURRENT", *versions[3:]])
    assert store.rollback("default") == versions[3]


def test_a_dry_run_says_the_same_and_removes_nothing(store: SnapshotStore) -> None:
    for seed in range(4):
        publish(store, seed)
    before = visible(store)
    told = store.gc("default", keep=1, dry_run=True)
    assert visible(store) == before
    done = store.gc("default", keep=1)
    assert told.dry_run
    assert not done.dry_run
    assert (told.removed, told.kept, told.bytes_freed) == (
        done.removed,
        done.kept,
        done.bytes_freed,
    )


def test_the_activated_last_count_by_activation_not_by_age(store: SnapshotStore) -> None:
    first, second, third = (publish(store, seed) for seed in range(3))
    store.activate("default", first)
    report = store.gc("default", keep=2)
    assert removed(report) == [second]
    assert sorted(kept(report)) == [first, third]


def test_activations_that_are_gone_are_not_counted(store: SnapshotStore) -> None:
    first, second, third = (publish(store, seed) for seed in range(3))
    store.remove("default", second)
    assert removed(store.gc("default", keep=2)) == []
    assert store.versions("default") == [first, third]


def test_a_version_in_use_stays_until_it_is_closed(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    snapshot = store.open("default", first)
    for dry_run in (True, False):
        report = store.gc("default", keep=1, dry_run=dry_run)
        assert kept(report) == {first: "in use", second: "active"}
    snapshot.close()
    assert removed(store.gc("default", keep=1)) == [first]


def test_what_is_newer_than_the_active_version_waits_to_be_activated(
    store: SnapshotStore,
) -> None:
    first = publish(store)
    second = publish(store, 1, activate=False)
    assert kept(store.gc("default", keep=1))[second] == "newer than the active version"
    assert removed(store.gc("default", keep=1, older_than=timedelta(days=1))) == []
    past = time.time() - 100_000
    os.utime(store.path("default", second), (past, past))
    assert removed(store.gc("default", keep=1, older_than=timedelta(days=1))) == [second]
    assert store.versions("default") == [first]


def test_nothing_younger_than_asked_is_removed(store: SnapshotStore) -> None:
    first, second, _ = (publish(store, seed) for seed in range(3))
    past = time.time() - 3 * 86_400
    os.utime(store.path("default", first), (past, past))
    report = store.gc("default", keep=1, older_than=timedelta(days=2))
    assert removed(report) == [first]
    assert "less than 2 days" in kept(report)[second]


def test_quarantined_versions_stay_for_the_retention_and_are_forgotten_with_their_files(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (publish(store, seed) for seed in range(3))
    store.quarantine("default").add(second, "image/rows.npy", "spoilt")
    report = store.gc("default", keep=2, older_than=timedelta(hours=1))
    assert "quarantined" in kept(report)[second]
    assert kept(report)[first] == "among the 2 activated last"  # the quarantined one can't be used

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(time.time() + 7_200, UTC)

    monkeypatch.setattr(gc_module, "datetime", Later)
    report = store.gc("default", keep=2, older_than=timedelta(hours=1))
    assert removed(report) == [second]
    assert sorted(kept(report)) == [first, third]
    assert store.quarantine("default").entries() == []


def test_a_quarantined_active_version_stays(store: SnapshotStore) -> None:
    version = publish(store)
    store.quarantine("default").add(version, "image/rows.npy", "spoilt")
    assert kept(store.gc("default", keep=1)) == {version: "active"}
    assert [entry.version for entry in store.quarantine("default").entries()] == [version]


def test_bytes_that_another_version_shares_are_not_counted(store: SnapshotStore) -> None:
    first = publish(store)
    manifest = store.manifest("default", first)
    with store.stage("default") as staging:
        shared = share_files(store.path("default", first), staging.path, manifest.files)
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        store.publish(staging, shared=shared)
    own = (store.path("default", first) / "manifest.json").stat().st_size
    both = own + size(store.path("default", staging.version))
    assert store.gc("default", keep=1, dry_run=True).bytes_freed == own
    third = publish(store, 3)
    report = store.gc("default", keep=1)
    assert removed(report) == [first, staging.version]
    assert report.bytes_freed == both
    store.verify("default", third)


def leave_behind(store: SnapshotStore) -> list[str]:
    names = [f".{kind}-20200101T000000-000000" for kind in ("building", "pulling", "removing")]
    for name in names:
        (store.folder("default") / name / "image").mkdir(parents=True)
        (store.folder("default") / name / "image" / "rows.npy").write_bytes(b"half")
    for name in (".CURRENT.7-1.tmp", ".QUARANTINE.7-1.tmp"):
        (store.folder("default") / name).write_text("half")
        names.append(name)
    return names


def test_leftovers_of_the_dead_go_and_their_bytes_count(store: SnapshotStore) -> None:
    version = publish(store)
    names = leave_behind(store)
    report = store.gc("default")
    assert sorted(gone.name for gone in report.leftovers) == sorted(names)
    assert report.bytes_freed == 5 * 4
    assert visible(store) == sorted([".lock", "CURRENT", version])


def test_a_build_finishes_removals_and_leaves_pulls_that_may_go_on(store: SnapshotStore) -> None:
    publish(store)
    leave_behind(store)
    publish(store, 1)
    hidden = [name for name in visible(store) if name.startswith(".")]
    assert hidden == [".lock", ".pulling-20200101T000000-000000"]


def test_living_builds_and_pulls_stay(store: SnapshotStore) -> None:
    publish(store)
    pulled = "20200101T000000-000000"
    with store.stage("default") as build, store.stage_pull("default", pulled) as pull:
        assert store.gc("default").leftovers == ()
        assert build.path.is_dir()
        assert pull.path.is_dir()
    assert [gone.name for gone in store.gc("default").leftovers] == [f".pulling-{pulled}"]


def test_a_removal_that_dies_halfway_is_finished_by_the_next(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = publish(store), publish(store, 1)

    def die(doomed: gc_module.Doomed) -> None:
        gc_module.let_be(doomed)  # as the end of the process does
        raise KeyboardInterrupt

    monkeypatch.setattr(gc_module, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        store.gc("default", keep=1)
    monkeypatch.undo()
    assert first not in store.versions("default")
    assert (store.folder("default") / f".removing-{first}").is_dir()
    with pytest.raises(SnapshotMissing):
        store.open("default", first)
    report = store.gc("default", keep=1)
    assert [gone.name for gone in report.leftovers] == [f".removing-{first}"]
    assert not (store.folder("default") / f".removing-{first}").exists()


def test_a_reader_that_comes_between_the_check_and_the_rename_keeps_its_version(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = publish(store), publish(store, 1)
    opened = []
    real = gc_module.Rules.reason_to_keep

    def reader_first(self: gc_module.Rules, folder: Path) -> str | None:
        reason = real(self, folder)
        if reason is None:
            opened.append(store.open("default", folder.name))
        return reason

    monkeypatch.setattr(gc_module.Rules, "reason_to_keep", reader_first)
    assert kept(store.gc("default", keep=1))[first] == "in use"
    assert opened[0].catalogue.ids(opened[0].sides["image"].row_items)[0] == "i0"


def test_a_version_vanishes_in_one_step(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = publish(store), publish(store, 1)
    seen: list[bool] = []
    real = shutil.rmtree

    def look(path: Path) -> None:
        seen.append(first in store.versions("default"))
        real(path)

    monkeypatch.setattr(gc_module.shutil, "rmtree", look)
    store.gc("default", keep=1)
    assert seen == [False]


def test_an_unreadable_pointer_stops_it(store: SnapshotStore) -> None:
    version = publish(store)
    (store.folder("default") / "CURRENT").write_text("{")
    for attempt in (lambda: store.gc("default"), lambda: store.remove("default", version)):
        with pytest.raises(SnapshotError, match="unreadable pointer"):
            attempt()
    with pytest.raises(SnapshotMissing, match="no such index"):
        store.gc("nothing")
    assert store.versions("default") == [version]


def test_remove_refuses_the_active_version_and_those_in_use(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store, 1)
    with pytest.raises(SnapshotError, match="is active"):
        store.remove("default", second)
    snapshot = store.open("default", first)
    with pytest.raises(SnapshotError, match="in use"):
        store.remove("default", first)
    snapshot.close()
    held = size(store.path("default", first))
    assert store.remove("default", first).bytes_freed == held
    with pytest.raises(SnapshotMissing, match="no such version"):
        store.remove("default", first)
    assert visible(store) == sorted([".lock", "CURRENT", second])


def test_a_version_pulled_again_while_its_removal_had_died_can_be_removed_again(
    store: SnapshotStore,
) -> None:
    first, second = publish(store), publish(store, 1)
    leftover = store.folder("default") / f".removing-{first}"
    leftover.mkdir()
    (leftover / "old").write_text("old")
    store.remove("default", first)
    store.gc("default")
    assert visible(store) == sorted([".lock", "CURRENT", second])


def test_a_removal_that_goes_on_is_left_to_whoever_does_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store), publish(store, 1)
    seen: list[tuple[str, ...]] = []
    real = shutil.rmtree

    def others_look(path: Path) -> None:
        if not seen:
            report = store.gc("default", keep=1)
            seen.append(tuple(gone.name for gone in report.leftovers))
            with pytest.raises(SnapshotMissing):
                store.open("default", first)
        real(path)

    monkeypatch.setattr(gc_module.shutil, "rmtree", others_look)
    store.remove("default", first)
    assert seen == [()]
    assert visible(store) == sorted([".lock", "CURRENT", second])


def test_a_reader_that_waits_for_a_removal_is_told_as_soon_as_the_name_is_gone(
    store: SnapshotStore,
) -> None:
    first, _ = publish(store), publish(store, 1)
    folder = store.path("default", first)
    held = take(folder)
    assert held is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.open, "default", first)
        time.sleep(0.05)
        assert not waiting.done()
        folder.rename(folder.with_name(f".removing-{first}"))
        with pytest.raises(SnapshotMissing, match="no such version"):
            waiting.result(30)
    held.release()

"""Changes beside the levels: what is refused, what is kept, and what they cost."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.amended_searcher import AmendedSearcher
from hivlp.index.backends import faiss_graph
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import IndexBusy, NoSuchItem, SnapshotCorrupt, SnapshotQuarantined
from hivlp.index.filters import parse_filter
from hivlp.index.masks import RowMask
from hivlp.index.snapshot import amend as amending
from hivlp.index.snapshot.amend import LOCK, amend
from hivlp.index.snapshot.carrying import carry_over
from hivlp.index.snapshot.changes import Delete, Upsert
from hivlp.index.snapshot.metadata import MAX_INDEX_COLUMNS
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import DIMS, unit_vectors, write_snapshot
from tests.property.test_amended_properties import opened

VECTORS = unit_vectors(1_500, DIMS[-1], seed=3)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path)
    metadata = [{"price": i, "name": f"n{i}"} for i in range(40)]
    write_snapshot(store, images=VECTORS[:40], metadata=metadata)
    return store


def upsert(item_id: str, seed: int = 0, **metadata: Any) -> Upsert:
    return Upsert(item_id, None, (), metadata, VECTORS[100 + seed])


TOO_MUCH = [
    ({"price": 1e19}, "price"),
    ({"price": 2**63}, "price"),
    ({"price": 1.5}, "price"),
    ({"price": "5"}, "price"),
    ({"price": float("nan")}, "price"),
    ({"name": "\ud83d"}, "name"),
    ({"other": {"a": 1}}, "other"),
    ({"": 1}, ""),
    ({"\ud83d": 1}, r"\ud83d"),
    ({f"c{i}": 1 for i in range(257)}, ""),
]


@pytest.mark.parametrize(("metadata", "name"), TOO_MUCH)
def test_what_a_column_cannot_hold_is_refused_and_harms_no_one(
    store: SnapshotStore, metadata: dict[str, Any], name: str
) -> None:
    amended = amend(store, "default", [upsert("bad", **metadata), upsert("good", 1, price=7)])
    assert amended.refused["bad"].param == (f"metadata.{name}" if name else "metadata")
    searcher = opened(store)
    assert searcher.metadata(["good", "i3"], None) == [
        {"price": 7},
        {"price": 3, "name": "n3"},
    ]


def test_whole_numbers_and_fractions_share_a_new_column(store: SnapshotStore) -> None:
    amend(store, "default", [upsert("a", w=2**53 + 1), upsert("b", 1, w=0.5)])
    searcher = opened(store)
    mask = searcher.mask("image", parse_filter({"field": "w", "range": {"gt": 0}}))
    assert mask.count == 2
    assert searcher.metadata(["i3"], None) == [{"price": 3, "name": "n3"}]


def test_a_refused_item_fixes_the_type_of_no_column(store: SnapshotStore) -> None:
    amend(store, "default", [upsert("a", shop=5, price="oops"), upsert("b", 1, price=1)])
    amended = amend(store, "default", [upsert("c", 2, shop="Berlin")])
    assert amended.refused == {}


def test_an_index_has_only_so_many_columns(store: SnapshotStore) -> None:
    for start in range(0, MAX_INDEX_COLUMNS - 250, 250):
        names = {f"c{start + i}": i for i in range(250)}
        assert amend(store, "default", [upsert(f"i{start}", **names)]).refused == {}
    full = amend(store, "default", [upsert("last", **{f"d{i}": i for i in range(256)})])
    assert full.refused["last"].limit == MAX_INDEX_COLUMNS


def test_a_column_stays_known_when_no_item_has_it_any_more(store: SnapshotStore) -> None:
    amend(store, "default", [upsert("a", shop="x")])
    amend(store, "default", [Delete("a"), upsert("b", 1)])
    searcher = opened(store)
    assert searcher.mask("image", parse_filter({"field": "shop", "eq": "x"})).count == 0
    assert searcher.metadata(["b"], ["shop"]) == [{}]


def test_going_back_and_changing_again_keeps_the_other_head(store: SnapshotStore) -> None:
    for i in range(5):
        amend(store, "default", [upsert(f"new{i}", i)])
    head = store.current("default")
    store.rollback("default")
    amend(store, "default", [upsert("other", 9)])
    store.activate("default", head)
    assert opened(store).info.items == 45


def test_steps_are_removed_and_a_reader_is_waited_for(store: SnapshotStore) -> None:
    amend(store, "default", [upsert("a")])
    reader = store.open("default")
    for i in range(4):
        amend(store, "default", [upsert(f"b{i}", i)])
    assert reader.manifest.version in store.versions("default")
    assert len(store.versions("default")) == 3  # built, read, active
    reader.close()


def test_a_failure_to_tidy_is_no_failure_to_change(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    amend(store, "default", [upsert("a")])

    def full(*given: Any) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(SnapshotStore, "remove", full)
    amended = amend(store, "default", [upsert("b", 1)])
    assert amended.created == {"b"}
    assert store.current("default") == amended.version


def test_a_turn_that_does_not_come_is_an_error_in_time(store: SnapshotStore) -> None:
    with (store.folder("default") / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(IndexBusy):
            amend(store, "default", [upsert("a")], wait_s=0.05)
    assert amend(store, "default", [upsert("a")], wait_s=0.05).created == {"a"}


def test_a_damaged_version_is_not_built_upon(store: SnapshotStore) -> None:
    store.quarantine("default").add(store.current("default"), "image/rows.npy", "a test")
    with pytest.raises(SnapshotQuarantined):
        amend(store, "default", [upsert("a")])


def test_nothing_is_changed_by_nothing(store: SnapshotStore) -> None:
    before = store.current("default")
    amended = amend(store, "default", [Delete("never")])
    assert (amended.version, amended.unknown) == (before, {"never"})
    assert amend(store, "default", []).version == before


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_graph_with_many_hidden_rows_is_still_walked(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=VECTORS, family="graph", level1="sq8")
    snapshot = store.open("default")
    graph = snapshot.sides["image"].graphs[len(DIMS)]
    allowed = np.random.default_rng(0).random(len(VECTORS)) > share
    queries = unit_vectors(20, DIMS[-1], seed=9)
    exhaustive = []
    best_rows = faiss_graph.best_rows
    monkeypatch.setattr(
        faiss_graph, "best_rows", lambda *given: exhaustive.append(1) or best_rows(*given)
    )
    params = faiss_graph.SearchParams(ef=64)
    found = graph.search(queries, 10, params, None, RowMask.of(allowed))
    assert exhaustive == []
    scores = queries @ VECTORS.T
    hits = 0
    for own, got in zip(scores, found, strict=True):
        best = np.argsort(-np.where(allowed, own, -9))[:10]
        hits += len(set(best.tolist()) & set(got.rows.tolist()))
    assert hits >= 195


def test_sequence_numbers_never_come_twice(store: SnapshotStore) -> None:
    seen: list[int] = []
    for i in range(4):
        amend(store, "default", [upsert(f"a{i}", i), upsert(f"b{i}", i)])
        manifest = store.manifest("default")
        assert manifest.changes is not None
        seen.append(manifest.changes.last)
        if i % 2:
            store.rollback("default")
    assert seen == sorted(set(seen))


def test_many_changes_lie_in_few_files(store: SnapshotStore) -> None:
    for i in range(60):
        amend(store, "default", [upsert(f"m{i % 37}", i)])
    manifest = store.manifest("default")
    assert manifest.changes is not None
    assert len(manifest.changes.segments) <= 6
    assert sum(s.upserts for s in manifest.changes.segments) <= 60
    searcher = opened(store)
    assert isinstance(searcher, AmendedSearcher)
    plan = searcher.plan(PlanRequest("image", "image", 5, "exact"))
    (found,) = searcher.step("image", plan.stages[0], VECTORS[159:160], None)
    assert searcher.items("image", found, 1, 0)[0].id == f"m{59 % 37}"


def test_too_many_changes_are_refused(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amending, "MOST_PENDING", 3)
    amend(store, "default", [upsert("a"), upsert("b", 1)])
    with pytest.raises(Exception, match="build it again"):
        amend(store, "default", [upsert("c", 2), upsert("d", 3)])


def test_what_changed_upon_a_damaged_version_is_carried_over_to_a_whole_one(
    store: SnapshotStore,
) -> None:
    whole = store.current("default")
    write_snapshot(store, images=VECTORS[:45])
    amend(store, "default", [upsert("new", 1, price=3), Delete("i7")])
    damaged = store.current("default")
    assert carry_over(store, "default", damaged, whole) == 2
    searcher = opened(store)
    assert searcher.info.items == 40
    assert searcher.metadata(["new"], None) == [{"price": 3}]
    with pytest.raises(NoSuchItem):
        searcher.row_of("i7", "image")
    assert store.rollback("default") == damaged


def test_without_changes_the_whole_version_is_active_again_and_takes_changes(
    store: SnapshotStore,
) -> None:
    whole = store.current("default")
    write_snapshot(store, images=VECTORS[:45])
    damaged = store.current("default")
    store.quarantine("default").add(damaged, "image/rows.npy", "a test")
    assert carry_over(store, "default", damaged, whole) == 0
    assert store.current("default") == whole
    amend(store, "default", [upsert("new", 1)])
    assert opened(store).info.items == 41


def test_nothing_is_carried_over_once_another_version_is_active(store: SnapshotStore) -> None:
    whole = store.current("default")
    write_snapshot(store, images=VECTORS[:45])
    amend(store, "default", [upsert("new", 1)])
    damaged = store.current("default")
    write_snapshot(store, images=VECTORS[:50])
    chosen = store.current("default")
    assert carry_over(store, "default", damaged, whole) == 0
    assert store.current("default") == chosen


def test_a_change_made_upon_the_damaged_version_meanwhile_is_carried_over_too(
    store: SnapshotStore,
) -> None:
    whole = store.current("default")
    write_snapshot(store, images=VECTORS[:45])
    damaged = store.current("default")
    amend(store, "default", [upsert("late", 1)])
    assert carry_over(store, "default", damaged, whole) == 1
    assert opened(store).info.items == 41


def test_damaged_changes_are_not_carried_over(store: SnapshotStore) -> None:
    whole = store.current("default")
    write_snapshot(store, images=VECTORS[:45])
    amend(store, "default", [upsert("new", 1)])
    damaged = store.current("default")
    (segment,) = (store.path("default", damaged) / "changes").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match="changes/"):
        carry_over(store, "default", damaged, whole)
    assert store.current("default") == damaged


def test_a_step_that_can_be_gone_back_to_is_not_removed(store: SnapshotStore) -> None:
    amend(store, "default", [upsert("a")])
    first = store.current("default")
    reader = store.open("default")
    amend(store, "default", [upsert("b", 1)])
    second = store.current("default")
    store.activate("default", first)
    store.activate("default", second)
    reader.close()
    amend(store, "default", [upsert("c", 2)])
    assert store.rollback("default") == first
    assert opened(store).info.items == 41

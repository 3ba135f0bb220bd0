"""A version with changes answers as one that was built of what it comes to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivlp.index.amended_searcher import AmendedSearcher
from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.errors import NoSuchItem
from hivlp.index.filters import FilterError, parse_filter
from hivlp.index.level_index import Codec, Family, RowsType
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Change, Delete, Upsert
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, unit_vectors, write_snapshot

ROWS = 1_200


def nested_vectors(count: int, seed: int) -> FloatArray:
    """Unit vectors most of whose length lies in the first numbers, as in a nested gallery."""
    return normalise(unit_vectors(count, DIMS[-1], seed) * 0.75 ** np.arange(DIMS[-1]))


BUILT = nested_vectors(ROWS, seed=1)
COLOURS = ("red", "green", "blue")
METADATA = [{"colour": COLOURS[i % 3], "price": i} for i in range(ROWS)]
KINDS: list[tuple[Family, Codec]] = [
    ("scan", "flat"), ("scan", "sq8"), ("scan", "pq64x4fs"), ("graph", "sq8"),
]  # fmt: skip


@dataclass
class World:
    """What an index should hold: the oracle."""

    vectors: dict[str, FloatArray] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        self.vectors.pop(change.id, None)
        self.metadata.pop(change.id, None)
        if isinstance(change, Upsert):
            assert change.image_vector is not None
            self.vectors[change.id] = change.image_vector
            self.metadata[change.id] = dict(change.metadata)

    def best(self, query: FloatArray, k: int, **wanted: Any) -> list[str]:
        ids = [
            i for i in self.vectors if all(self.metadata[i].get(n) == v for n, v in wanted.items())
        ]
        if not ids:
            return []
        scores = np.vecdot(np.stack([self.vectors[i] for i in ids]), query)
        return [ids[i] for i in np.argsort(-scores, kind="stable")[:k]]


def built_world() -> World:
    ids = [f"i{i}" for i in range(ROWS)]
    return World(dict(zip(ids, BUILT, strict=True)), dict(zip(ids, METADATA, strict=True)))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SnapshotStore, str]:
    family, level1 = request.param
    store = SnapshotStore(tmp_path_factory.mktemp("amended"))
    version = write_snapshot(store, images=BUILT, metadata=METADATA, family=family, level1=level1)
    return store, version


def opened(store: SnapshotStore) -> AmendedSearcher:
    snapshot = store.open("default")
    assert snapshot.delta is not None
    return AmendedSearcher(snapshot, snapshot.delta)


def outputs(query: FloatArray) -> dict[int, FloatArray]:
    return {i: nested_prefix(query[None], dim) for i, dim in enumerate(DIMS, start=1)}


def ids_found(
    searcher: AmendedSearcher, plan: Plan, query: FloatArray, mask: Any = None, k: int = 10
) -> list[str]:
    found: list[Candidates] | None = None
    exits = outputs(query)
    for stage in plan.stages:
        own = nested_prefix(exits[stage.query_level], DIMS[stage.level - 1])
        given_mask = mask if found is None else None
        found = searcher.step("image", stage, own, found, mask=given_mask)
    assert found is not None
    return [item.id for item in searcher.items("image", found[0], k, 0)]


def ids_in_turns(searcher: AmendedSearcher, query: FloatArray, mask: Any = None) -> list[str]:
    found = searcher.exact("image", query, 10, lambda: None, mask=mask)
    return [item.id for item in searcher.items("image", found, 10, 0)]


def some_changes(seed: int, count: int) -> list[Change]:
    rng = np.random.default_rng(seed)
    vectors = nested_vectors(count, seed + 100)
    changes: list[Change] = []
    for i in range(count):
        old = rng.random() < 0.5
        item_id = f"i{rng.integers(ROWS)}" if old else f"new{rng.integers(30)}"
        if rng.random() < 0.3:
            changes.append(Delete(item_id))
        else:
            colour = COLOURS[int(rng.integers(3))]
            data = {"colour": colour, "price": int(rng.integers(50)), "shop": f"s{i % 2}"}
            changes.append(Upsert(item_id, "a.png", (), data, vectors[i]))
    return changes


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_changes_are_found_as_if_they_had_been_built(
    built: tuple[SnapshotStore, str], seed: int, sizes: list[int]
) -> None:
    store, version = built
    store.activate("default", version)
    world = built_world()
    for i, size in enumerate(sizes):
        batch = some_changes(seed + i, size)
        amended = amend(store, "default", batch)
        for change in batch:
            world.apply(change)
        assert amended.upserts + amended.deletes + len(amended.unknown) <= size
    if store.open("default").delta is None:
        return
    searcher = opened(store)
    assert searcher.info.items == len(world.vectors)
    assert searcher.info.rows == {"image": len(world.vectors)}
    hits = 0
    queries = nested_vectors(5, seed)
    for query in queries:
        exact = searcher.plan(PlanRequest("image", "image", 10, "exact"))
        expected = world.best(query, 10)
        assert ids_found(searcher, exact, query) == expected
        assert ids_in_turns(searcher, query) == expected
        for name in ("cascade", "funnel"):
            plan = searcher.plan(PlanRequest("image", "image", 10, name))
            hits += len(set(ids_found(searcher, plan, query)) & set(expected))
        for wanted in ({"colour": "red"}, {"shop": "s1"}, {"colour": "blue", "price": 7}):
            parts = [{"field": n, "eq": v} for n, v in wanted.items()]
            expression = parse_filter({"and": parts})
            if "shop" in wanted and not any("shop" in m for m in world.metadata.values()):
                with contextlib.suppress(FilterError):  # unknown, unless something had it once
                    assert searcher.mask("image", expression).count == 0
                continue
            mask = searcher.mask("image", expression)
            filtered = searcher.plan(PlanRequest("image", "image", 10), allowed=mask.count)
            assert mask.count == len(world.best(query, ROWS * 2, **wanted))
            assert ids_found(searcher, filtered, query, mask) == world.best(query, 10, **wanted)
            assert ids_in_turns(searcher, query, mask) == world.best(query, 10, **wanted)
    assert hits >= 0.97 * 2 * 10 * len(queries)
    check_every_item(searcher, world)


def check_every_item(searcher: AmendedSearcher, world: World) -> None:
    for item_id in [*list(world.vectors)[:20], *list(world.vectors)[-20:]]:
        row = searcher.row_of(item_id, "image")
        np.testing.assert_allclose(
            searcher.vector("image", row, len(DIMS))[0], world.vectors[item_id], atol=1e-6
        )
        assert searcher.metadata([item_id], None) == [world.metadata[item_id]]
    gone = next((f"i{i}" for i in range(ROWS) if f"i{i}" not in world.vectors), None)
    if gone is not None:
        for ask in (
            lambda: searcher.row_of(gone, "image"),
            lambda: searcher.metadata([gone], None),
            lambda: searcher.image_ref(gone),
        ):
            with pytest.raises(NoSuchItem):
                ask()


def test_plans_run_by_the_measuring_code_see_changes_too(built: tuple[SnapshotStore, str]) -> None:
    store, version = built
    store.activate("default", version)
    twin = Upsert("twin", None, (), {}, BUILT[3])
    amend(store, "default", [Delete("i5"), twin])
    searcher = opened(store)
    plan = searcher.plan(PlanRequest("image", "image", 3, "funnel"))
    found = run_plan(searcher, "image", plan, outputs(BUILT[3]))
    ids = [item.id for item in searcher.items("image", found[0], 2, 0)]
    assert ids == ["i3", "twin"]


CAPTIONS = 3


def changed_texts(rng: np.random.Generator, seed: int, turn: int) -> list[Change]:
    """Some items gone, some with other texts, some new."""
    changes: list[Change] = []
    for number in range(int(rng.integers(1, 12))):
        item_id = f"i{rng.integers(30)}" if rng.random() < 0.4 else f"new{rng.integers(8)}"
        if rng.random() < 0.3:
            changes.append(Delete(item_id))
            continue
        count = int(rng.integers(1, CAPTIONS + 1))
        own = nested_vectors(count, 1_000_000 + 100 * seed + 30 * turn + number)
        words = tuple(f"text {turn} {number} {i}" for i in range(count))
        changes.append(Upsert(item_id, None, words, {}, None, own))
    return changes


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    rows_type=st.sampled_from(["fp32", "fp16"]),
    k=st.sampled_from([1, 5, 40]),
    offset=st.sampled_from([0, 3]),
    built_items=st.sampled_from([0, 1, 30]),
)
def test_items_of_several_texts_come_once_each_with_their_best_text(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rows_type: RowsType,
    k: int,
    offset: int,
    built_items: int,
) -> None:
    rng = np.random.default_rng(seed)
    store = SnapshotStore(tmp_path_factory.mktemp("texts"))
    drawn = rng.integers(0, max(built_items, 1), 2 * built_items)
    owners = sorted(int(item) for item in drawn)
    texts = nested_vectors(max(len(owners), 1), seed)
    write_snapshot(
        store,
        images=nested_vectors(max(3, built_items), seed),
        texts=texts if owners else None,
        text_items=owners,
        rows_type=rows_type,
    )
    held: dict[str, FloatArray] = {}
    for i in set(owners):
        held[f"i{i}"] = texts[[t for t, owner in enumerate(owners) if owner == i]]
    for turn in range(3):
        changes = changed_texts(rng, seed, turn)
        amend(store, "default", changes)
        for change in changes:
            held.pop(change.id, None)
            if isinstance(change, Upsert) and change.text_vectors is not None:
                held[change.id] = change.text_vectors
    snapshot = store.open("default")
    if snapshot.delta is None:
        return
    searcher = AmendedSearcher(snapshot, snapshot.delta)
    query = nested_vectors(1, seed + 7)[0]
    best = {item_id: float((rows @ query).max()) for item_id, rows in held.items()}
    expected = sorted(best, key=lambda item_id: -best[item_id])[offset : offset + k]
    for name in ("exact", "cascade"):
        plan = searcher.plan(PlanRequest("text", "text", k + offset, name))
        found: list[Candidates] | None = None
        exits = outputs(query)
        for stage in plan.stages:
            own = nested_prefix(exits[stage.query_level], DIMS[stage.level - 1])
            found = searcher.step("text", stage, own, found)
        assert found is not None
        items = searcher.items("text", found[0], k, offset)
        np.testing.assert_allclose(
            [item.score for item in items], [best[item_id] for item_id in expected], atol=2e-3
        )
        if rows_type == "fp32":
            assert [item.id for item in items] == expected
        rows = np.array([item.row for item in items], np.int64)
        explained = searcher.explain("text", {len(DIMS): query[None]}, rows)[len(DIMS)]
        np.testing.assert_allclose(explained, [item.score for item in items], atol=1e-6)
    snapshot.close()

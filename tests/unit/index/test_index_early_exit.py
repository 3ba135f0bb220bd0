"""A cascade stops early where its rule is sure, and says so; what was measured is what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build.answers import Answers, answers_for, item_groups
from hivlp.index.build.directions import Direction
from hivlp.index.build.exits import MOST_LOST, _look, apply_rule, measure_exits
from hivlp.index.build.measure import direction_of
from hivlp.index.build.observe import overlapped_ms, own_rows, without
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.widths import exact_best, sweep
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.early_exit import DEPTH, SIGNALS, ExitRule, Gate, exit_signals, sigmoid
from hivlp.index.errors import PlanError
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import make_plan, run_early, run_plan
from hivlp.index.snapshot.manifest import (
    ExitRecord,
    ExitTrial,
    GateRecord,
    PaceRecord,
    width_table,
)
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors, write_snapshot

ALWAYS = Gate((0.0,) * len(SIGNALS), 50.0)
NEVER = Gate((0.0,) * len(SIGNALS), -50.0)
MANY = 1_000_000
"""More rows than are scored without a cascade."""


def candidates(scores: list[float], rows: list[int] | None = None) -> Candidates:
    numbers = np.arange(len(scores)) if rows is None else np.array(rows)
    return Candidates(numbers.astype(np.int64), np.array(scores, dtype=np.float32))


def falling(count: int) -> list[float]:
    return [1 - i / 32 for i in range(count)]


def test_signals_are_margins_and_agreement_of_the_first_ten() -> None:
    found = candidates([0.9, 0.8, 0.6, *[0.5] * 6, 0.4, 0.1, 0.0])
    before = candidates(falling(12), [0, 1, 2, 3, 4, 15, 16, 17, 18, 19, 5, 6])
    values = dict(zip(SIGNALS, exit_signals(found, before), strict=True))
    assert values == pytest.approx(
        {
            "top": 0.9,
            "margin2": 0.1,
            "margin3": 0.3,
            "margin10": 0.5,
            "edge": 0.3,
            "overlap": 0.5,
            "same_first": 1.0,
        }
    )
    alone = dict(zip(SIGNALS, exit_signals(found, None), strict=True))
    assert (alone["overlap"], alone["same_first"]) == (0.0, 0.0)


def test_a_rule_is_sure_from_its_threshold_on_and_never_of_too_few_rows() -> None:
    gate = Gate(tuple(1.0 if name == "margin3" else 0.0 for name in SIGNALS), 0.0)
    found = candidates([1.0, 0.9, 0.5, *[0.4] * 9])
    confidence = sigmoid(0.5)
    assert ExitRule(confidence - 1e-6, {1: gate}).sure(1, found, None)
    assert not ExitRule(confidence + 1e-6, {1: gate}).sure(1, found, None)
    assert not ExitRule(0.0, {1: gate}).sure(2, found, None), "a level without a gate"
    assert not ExitRule(0.0, {1: gate}).sure(1, found.top(DEPTH - 1), None)
    assert sigmoid(-800) == 0.0
    assert sigmoid(800) == 1.0


def test_a_plan_that_may_stop_keeps_enough_rows_to_judge_by() -> None:
    rule = ExitRule(0.5, {1: ALWAYS})
    asked = PlanRequest("image", "text", 1, early_exit=True)
    plan = make_plan(asked, specs(), {}, 500, exits=rule)
    assert plan.exits is rule
    assert plan.name == "cascade"
    assert min(stage.keep for stage in plan.stages) >= DEPTH
    deep = make_plan(replace(asked, need=60), specs(), {}, 500, exits=rule, graphs={})
    assert [stage.method for stage in deep.stages] == ["graph", "graph"]
    assert min(stage.keep for stage in deep.stages) >= 60, "an answer of sixty may stop too"
    assert make_plan(replace(asked, early_exit=False), specs(), {}, 500, exits=rule).exits is None
    for name in ("funnel", "exact"):
        with pytest.raises(PlanError) as refused:
            make_plan(replace(asked, name=name), specs(), {}, 500, exits=rule)
        assert refused.value.param == "early_exit"


def test_fewer_rows_than_asked_for_are_never_an_answer() -> None:
    plan = make_plan(
        PlanRequest("image", "text", 20, early_exit=True),
        specs(),
        {},
        500,
        exits=ExitRule(0.0, {1: ALWAYS}),
    )
    assert plan.stops(1, candidates(falling(20)), None)
    assert not plan.stops(1, candidates(falling(19)), None)


def test_auto_takes_the_measured_plan_unless_more_is_asked_for() -> None:
    def name(**fields: object) -> str:
        request = PlanRequest("image", "text", 5, **fields)  # type: ignore[arg-type]
        return make_plan(request, specs(), {}, 500, auto="funnel").name

    assert name() == "funnel"
    assert name(name="cascade") == "cascade"
    assert name(early_exit=True) == "cascade"
    assert name(max_level=2) == "cascade"
    assert name(keeps=((1, 50),)) == "cascade"


def exit_record(threshold: float | None, gates: dict[int, Gate]) -> ExitRecord:
    recalls = {"r1": None, "r10": None, "ann10": 1.0}
    return ExitRecord(
        searched="image",
        query="text",
        signal="gate",
        loss="ann",
        most_lost=0.005,
        threshold=threshold,
        gates=tuple(GateRecord(level=n, weights=g.weights, bias=g.bias) for n, g in gates.items()),
        queries=200,
        full=recalls,
        tried=(ExitTrial(signal="gate", shares={1: 0.5}, saved=0.3, recalls=recalls),),
    )


def opened(folder: Path, record: ExitRecord, family: str = "scan") -> LocalSearcher:
    store = SnapshotStore(folder)
    pace = PaceRecord(
        searched="image",
        query="text",
        plan="funnel",
        encode_ms=(1, 1, 1),
        cascade_ms=4,
        funnel_ms=3,
    )
    images = unit_vectors(2_000 if family == "graph" else 200, DIMS[-1], 4)
    write_snapshot(store, images=images, exits=[record], paces=[pace], family=family)  # type: ignore[arg-type]
    return LocalSearcher(store.open("default"))


def outputs(query: FloatArray) -> dict[int, FloatArray]:
    return {level: nested_prefix(query, dim) for level, dim in enumerate(DIMS, start=1)}


@pytest.mark.parametrize("family", ["scan", "graph"])
@pytest.mark.parametrize("k", [1, 10, 40])
def test_a_sure_level_answers_as_a_search_capped_there_would(
    tmp_path: Path, family: str, k: int
) -> None:
    searcher = opened(tmp_path, exit_record(0.5, {1: ALWAYS, 2: ALWAYS}), family)
    query = outputs(unit_vectors(1, DIMS[-1], 9))
    plan = searcher.plan(PlanRequest("image", "text", k, early_exit=True))
    found, level = run_early(searcher, "image", plan, query)
    assert level == 1
    rows = searcher.snapshot.sides["image"].rows[1]
    capped = Candidates.ranked(np.arange(rows.size), rows.scan(query[1][0]), k)
    shared = np.intersect1d(found.rows[:k], capped.rows)
    assert len(shared) >= (k if family == "scan" else 0.9 * k)
    assert found.scores[0] == pytest.approx(capped.scores[0], abs=1e-5)


def test_an_unsure_cascade_runs_through_and_masks_forbid_stopping(tmp_path: Path) -> None:
    searcher = opened(tmp_path, exit_record(0.5, {1: NEVER, 2: NEVER}))
    query = outputs(unit_vectors(1, DIMS[-1], 9))
    asked = PlanRequest("image", "text", 5, early_exit=True)
    found, level = run_early(searcher, "image", searcher.plan(asked), query)
    assert level == 3
    whole = run_plan(searcher, "image", searcher.plan(replace(asked, early_exit=False)), query)[0]
    assert found.rows[:5].tolist() == whole.rows[:5].tolist()
    assert searcher.plan(asked, allowed=MANY).exits is None
    assert searcher.plan(replace(asked, early_exit=False)).name == "funnel", "as it was measured"
    assert searcher.plan(replace(asked, query="image")).exits is None, "never measured"


def test_the_second_level_may_stop_where_the_first_is_unsure(tmp_path: Path) -> None:
    searcher = opened(tmp_path, exit_record(0.5, {1: NEVER, 2: ALWAYS}))
    plan = searcher.plan(PlanRequest("image", "text", 5, early_exit=True))
    assert run_early(searcher, "image", plan, outputs(unit_vectors(1, DIMS[-1], 9)))[1] == 2


def test_no_safe_threshold_is_no_rule(tmp_path: Path) -> None:
    searcher = opened(tmp_path, exit_record(None, {1: ALWAYS}))
    assert searcher.plan(PlanRequest("image", "text", 5, early_exit=True)).exits is None


def direction(count: int, noise: float, answers: bool) -> tuple[Direction, list[Candidates], Plan]:
    """Queries near rows of their own; a few exits are so noisy that level 1 is wrong."""
    gallery = unit_vectors(600, DIMS[-1], 0)
    own = np.arange(count) % 600
    finest = normalise(gallery[own] + 0.2 * unit_vectors(count, DIMS[-1], 1))
    queries = {len(DIMS): finest}
    bad = np.where(np.arange(count) % 7 == 0, noise, 0.02)[:, None].astype(np.float32)
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = bad * unit_vectors(count, dim, 1 + level)
        queries[level] = normalise(nested_prefix(finest, dim) + wobble)
    rows = {
        s.level: LevelRows(
            gallery, s.dim, inverse_norms(gallery, s.dim) if s.dim < DIMS[-1] else None
        )
        for s in specs()
    }
    levels = {level: ExactLevel(level, own_rows) for level, own_rows in rows.items()}
    given = Direction(
        "image",
        "text",
        queries,
        rows,
        own % 2 == 1,
        levels=levels,
        items=own.astype(np.int64),
        answers=Answers(np.arange(600), own.astype(np.int64)) if answers else None,
        encode_ms=(1.0, 2.0, 3.0),
    )
    records = sweep(given, specs(), "nested", 0.99)
    plan = make_plan(
        PlanRequest("image", "text", DEPTH), specs(), width_table(records, "scan"), 600
    )
    return given, exact_best(given, 3, 100), plan


def test_measured_exits_keep_retrieval_and_save_what_they_say() -> None:
    given, best, plan = direction(1_200, 3.0, answers=True)
    record = measure_exits(given, plan, {}, best)
    assert record is not None
    assert record.loss == "retrieval"
    assert {trial.signal for trial in record.tried} == {"margin", "agreement", "gate"}
    taken = record.taken
    assert taken.saved == max(trial.saved for trial in record.tried) > 0.1
    expected = taken.shares[1] * 5 / 6 + taken.shares[2] * 3 / 6
    assert taken.saved == pytest.approx(expected, abs=1e-3)
    rule = record.rule
    assert rule is not None
    hits: list[float] = []
    stopped = 0
    for number in range(given.count):
        before: Candidates | None = None
        for stage in plan.stages:
            dim = given.rows[stage.level].dim
            query = given.queries[stage.level][number : number + 1]
            assert query.shape == (1, dim)
            assert given.levels is not None
            level = given.levels[stage.level]
            if before is None:
                found = level.search(query, stage.keep, stage.params, None, None)[0]
            else:
                found = level.score(query, [before.rows])[0].top(stage.keep)
            if replace(plan, exits=rule).stops(stage.level, found, before):
                break
            before = found
        stopped += stage.level < 3
        hits.append(float(found.rows[0] == number % 600))
    full = record.full["r1"]
    assert full is not None
    assert np.mean(hits) >= full - 2 * MOST_LOST
    assert stopped / given.count == pytest.approx(sum(taken.shares.values()), abs=0.05)


def test_without_answers_the_exact_neighbours_are_what_is_kept() -> None:
    given, best, plan = direction(1_200, 3.0, answers=False)
    record = measure_exits(given, plan, {}, best)
    assert record is not None
    assert record.loss == "ann"
    assert record.full["r1"] is None
    full, now = record.full["ann10"], record.taken.recalls["ann10"]
    assert full is not None
    assert now is not None
    assert now >= full - 2 * MOST_LOST


def test_a_handful_of_queries_allows_no_exit() -> None:
    given, best, plan = direction(60, 0.0, answers=True)
    record = measure_exits(given, plan, {}, best)
    assert record is not None
    assert record.threshold is None
    assert record.rule is None
    assert record.taken.saved == 0


def test_right_rows_are_those_of_the_item_and_its_group() -> None:
    row_items = np.array([0, 0, 1, 2, 3])
    groups = item_groups(["a", None, "a", None], 4)
    assert groups.tolist() == [0, 1, 0, 3]
    other = answers_for(np.array([0, 1, 2, 3]), row_items, groups, same_side=False)
    assert other is not None
    assert other.rank(0, np.array([2, 3, 0])) == 2
    assert other.rank(1, np.array([0, 1])) == float("inf")
    same = answers_for(np.array([0, 1, 3]), row_items, groups, same_side=True)
    assert same is not None
    assert same.rank(0, np.array([4, 1])) == 2
    assert same.rank(1, np.array([2])) is None, "only itself"
    alone = np.arange(4)
    assert answers_for(np.array([1, 2]), row_items, alone, same_side=True) is None
    assert item_groups(None, 3).tolist() == [0, 1, 2]


def test_queries_of_one_item_are_in_one_fold() -> None:
    given, _, _ = direction(60, 0.0, answers=True)
    items: RowArray = np.array([7, 3] * 30)
    folds = replace(given, items=items).folds(5)
    assert len(np.unique(folds[items == 7])) == len(np.unique(folds[items == 3])) == 1
    assert np.unique(replace(given, items=None).folds(5)).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_an_overlapped_query_takes_between_its_longest_part_and_the_sum(
    encode: list[float], search: list[float]
) -> None:
    took = overlapped_ms(encode, list(zip((1, 2, 3), search, strict=True)))
    assert max(sum(encode) + search[-1], encode[0] + sum(search)) <= took + 1e-9
    assert took <= sum(encode) + sum(search) + 1e-9


def test_a_query_with_doubles_says_nothing_of_what_stopping_costs() -> None:
    given, _, plan = direction(1_200, 3.0, answers=True)
    # Half of the queries meet a row that has twelve equals: at the last level nothing else is left.
    matrix = np.concatenate([given.finest.matrix, np.repeat(given.finest.matrix[:1], 12, axis=0)])
    rows = {
        s.level: LevelRows(
            matrix, s.dim, inverse_norms(matrix, s.dim) if s.dim < DIMS[-1] else None
        )
        for s in specs()
    }
    own = matrix[0][None]
    queries = {n: q.copy() for n, q in given.queries.items()}
    for level, dim in enumerate(DIMS, start=1):
        queries[level][::2] = nested_prefix(own, dim)
    crowded = replace(
        given,
        queries=queries,
        rows=rows,
        levels={n: ExactLevel(n, r) for n, r in rows.items()},
        answers=None,
    )
    seen = _look(crowded, plan, {}, exact_best(crowded, 3, 100))
    known = ~np.isnan(seen.array("ann10", 3))
    assert known[1::2].all()
    assert not known[::2].any()


def test_a_query_of_another_precision_is_still_its_own_row() -> None:
    rows = LevelRows(unit_vectors(300, 16, 2), 16)
    finest = normalise(rows.vectors(np.arange(300)) + 0.02 * unit_vectors(300, 16, 3))
    assert float(np.vecdot(finest, rows.matrix).max()) < 1 - 1e-5
    side = SimpleNamespace(
        rows={1: rows}, levels={1: ExactLevel(1, rows)}, graphs={}, row_items=np.arange(300)
    )
    queries = QuerySet({1: finest}, np.arange(300))
    groups = np.arange(300) // 2
    same = direction_of(side, "image", "image", queries, groups)
    assert same.own_rows is not None
    assert same.own_rows.tolist() == list(range(300))
    best = exact_best(same, 1, 50)
    assert [rows.tolist() for rows in own_rows(same, best)] == [[i] for i in range(300)]
    assert same.answers is not None
    found = [without(best[i], own, 10) for i, own in enumerate(own_rows(same, best))]
    ranks = [same.answers.rank(i, some.rows) for i, some in enumerate(found)]
    assert np.mean([rank == 1 for rank in ranks]) < 0.1, "partners are unrelated rows"
    other = direction_of(side, "image", "text", queries, groups)
    assert other.own_rows is None


def test_too_few_answers_leave_the_loss_to_exact_neighbours() -> None:
    given, best, plan = direction(1_200, 3.0, answers=True)
    assert given.answers is not None
    few = np.where(np.arange(1_200) < 150, given.answers.wanted, -1)
    record = measure_exits(replace(given, answers=Answers(given.answers.rows, few)), plan, {}, best)
    assert record is not None
    assert record.loss == "ann"
    assert record.full["r1"] is not None
    hasty = replace(plan, exits=ExitRule(0.5, {1: ALWAYS}))
    assert set(apply_rule(given, hasty, {}, best, record.loss).lost) == {"ann10"}


def test_a_served_index_of_another_query_encoder_never_stops(tmp_path: Path) -> None:
    searcher = opened(tmp_path, exit_record(0.5, {1: ALWAYS}))
    asked = PlanRequest("image", "text", 5, early_exit=True)
    assert searcher.plan(asked).exits is not None
    encoder = searcher.snapshot.manifest.query_encoder
    assert LocalSearcher(searcher.snapshot, encoder).plan(asked).exits is not None
    assert LocalSearcher(searcher.snapshot, "0" * 64).plan(asked).exits is None

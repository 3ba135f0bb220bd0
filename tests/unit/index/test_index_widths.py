"""Measured widths hold what they promise, and no smaller ones would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends import rows as rows_module
from hivlp.index.backends.choose import open_level, write_level
from hivlp.index.backends.exact import ExactLevel, best_rows
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build import widths as widths_module
from hivlp.index.build.confidence import sure_recall
from hivlp.index.build.directions import Direction
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.widths import (
    ROUNDING,
    exact_best,
    exact_rows,
    first_ranks,
    ranks,
    share_found,
    sweep,
)
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest, run_stage
from hivlp.index.plans import make_plan, stage_query
from hivlp.models.levels import FloatArray, LevelSpec, nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors


def direction(noise: float, queries: int = 60, rows: int = 400, seed: int = 0) -> Direction:
    gallery = unit_vectors(rows, DIMS[-1], seed)
    finest = unit_vectors(queries, DIMS[-1], seed + 1)
    outputs = {len(DIMS): finest}
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = noise * unit_vectors(queries, dim, seed + 1 + level)
        outputs[level] = normalise(nested_prefix(finest, dim) + wobble)
    levels = {
        spec.level: LevelRows(
            gallery, spec.dim, inverse_norms(gallery, spec.dim) if spec.dim < DIMS[-1] else None
        )
        for spec in specs()
    }
    return Direction("image", "text", outputs, levels, np.arange(queries) % 3 == 0)


def recalls(given: Direction, plan: Plan, k: int) -> FloatArray:
    """ANN recall of each query, by running the plan stage by stage."""
    levels = {level: ExactLevel(level, rows) for level, rows in given.rows.items()}
    found = None
    for stage in plan.stages:
        query = stage_query(stage, given.queries, levels[stage.level].dim)
        found = run_stage(levels, stage, query, found)
    assert found is not None
    truth = exact_rows(given, len(DIMS), k)
    shares = [len(set(a.rows) & set(b)) / len(b) for a, b in zip(found, truth, strict=True)]
    return np.array(shares, dtype=np.float32)


@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0])
def test_the_swept_widths_reach_the_target_and_the_recall_written_down(noise: float) -> None:
    given = direction(noise)
    records = sweep(given, specs(), "nested", 0.99)
    assert {(r.plan, r.k) for r in records} == {
        (plan, k) for plan in ("cascade", "funnel") for k in (1, 10, 100)
    }
    for record in records:
        request = PlanRequest(
            "image",
            "text",
            record.k,
            record.plan,
            tuple(zip((1, 2) if record.plan == "cascade" else (1,), record.keeps, strict=True)),
        )
        shares = recalls(given, make_plan(request, specs(), {}, 400), record.k)
        assert shares[~given.held_out].mean() == pytest.approx(record.recall_chosen_on, abs=1e-4)
        assert shares[given.held_out].mean() == pytest.approx(record.recall_held_out, abs=1e-4)
        assert record.recall_chosen_on >= 0.99 - 1e-4
        assert record.recall_held_out >= 0.9  # observed at least .97: not chosen on
        assert record.recall_lower is not None
        assert record.recall_lower < record.recall_held_out


def in_parts(given: Direction, monkeypatch: pytest.MonkeyPatch) -> Direction:
    """The same, with few enough scores in memory at once that rows and queries are cut up."""
    monkeypatch.setattr(rows_module, "BLOCK_SCORES", 700)
    monkeypatch.setattr(widths_module, "AT_ONCE", 25)
    assert len(list(rows_module.query_blocks(given.size, 25))) > 10
    return given


def test_rows_read_in_parts_give_what_an_exhaustive_scan_of_all_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = in_parts(direction(0.5), monkeypatch)
    rows = given.rows[1].matrix
    rows[50:60], rows[390:] = rows[7], rows[7]  # equals in several parts
    finest = given.rows[len(DIMS)]
    for k in (1, 10, 399):
        found = exact_best(given, len(DIMS), k)
        for query, best in zip(given.finest_queries, found, strict=True):
            wanted = best_rows(finest, query, k + 1)
            np.testing.assert_allclose(best.scores, wanted.scores, atol=1e-6)
            assert len(np.unique(best.rows)) == k + 1
            np.testing.assert_allclose(finest.score(query, best.rows), best.scores, atol=1e-6)


def test_ranks_in_a_first_scan_are_those_among_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given = in_parts(direction(0.5), monkeypatch)
    wanted = exact_rows(given, len(DIMS), 10)
    plan = make_plan(PlanRequest("image", "text", 1, "cascade"), specs(), {}, given.size)
    found = first_ranks(given, plan, wanted)
    scores = given.queries[1] @ nested_prefix(given.rows[1].matrix.astype(np.float32), DIMS[0]).T
    for own, some, rank in zip(scores, wanted, found, strict=True):
        np.testing.assert_array_equal(rank, ranks(own, own[some]))


def test_lossy_codes_are_widened_until_the_plan_itself_reaches_the_target(tmp_path: Path) -> None:
    given = direction(0.3, queries=80, rows=3_000)
    for codec in ("pq64x4fs", "rabitqfs", "sq8"):
        file = tmp_path / codec
        write_level(file, given.rows[1], codec)  # type: ignore[arg-type]
        levels = {
            level: open_level(level, rows, file if level == 1 else None, "faiss-cpu")
            for level, rows in given.rows.items()
        }
        lossy = replace(given, levels=levels)
        for record in sweep(lossy, specs(), "nested", 0.97):
            plan = make_plan(
                PlanRequest(
                    "image",
                    "text",
                    record.k,
                    record.plan,
                    tuple(zip((1, 2), record.keeps, strict=False)),
                ),
                specs(),
                {},
                given.size,
            )
            found = None
            for stage in plan.stages[:-1]:
                query = stage_query(stage, given.queries, given.rows[stage.level].dim)
                found = run_stage(levels, stage, query, found)
            assert found is not None
            truth = exact_rows(given, len(DIMS), record.k)
            pairs = zip(found, truth, strict=True)
            shares = np.array([len(np.intersect1d(f.rows, t)) / len(t) for f, t in pairs])
            half = ~given.held_out
            assert shares[half].mean() == pytest.approx(record.recall_chosen_on, abs=1e-4)
            assert shares[~half].mean() == pytest.approx(record.recall_held_out, abs=1e-4)
            assert sure_recall(shares[half].astype(np.float32)) >= 0.97


def test_more_noise_needs_wider_stages() -> None:
    def first(noise: float) -> int:
        records = sweep(direction(noise, queries=400), specs(), "nested", 0.9)
        return next(r.keeps[0] for r in records if r.plan == "cascade" and r.k == 10)

    assert first(0.05) < first(0.5) <= first(5.0) <= 400


def test_a_target_of_one_is_reached_whatever_the_noise() -> None:
    for record in sweep(direction(3.0), specs(), "nested", 1.0):
        assert record.recall_chosen_on == 1.0


def test_the_held_out_half_takes_no_part_in_the_choice() -> None:
    given = direction(0.3)
    hard = dict(given.queries)  # first exits of held-out queries that say nothing at all
    hard[1] = np.where(given.held_out[:, None], unit_vectors(given.count, DIMS[0], 99), hard[1])
    before, after = (
        sweep(d, specs(), "nested", 0.99) for d in (given, replace(given, queries=hard))
    )
    assert [r.keeps for r in before] == [r.keeps for r in after]
    cascades = [(a, b) for a, b in zip(before, after, strict=True) if a.plan == "cascade"]
    assert all(b.recall_held_out < a.recall_held_out for a, b in cascades[:1])
    assert any(not b.reached for _, b in cascades)


def test_duplicates_count_against_the_width() -> None:
    gallery = np.repeat(unit_vectors(8, DIMS[-1]), 50, axis=0)
    base = direction(0.0, queries=10)
    levels = {
        spec.level: LevelRows(
            gallery, spec.dim, inverse_norms(gallery, spec.dim) if spec.dim < DIMS[-1] else None
        )
        for spec in specs()
    }
    records = sweep(replace(base, rows=levels), specs(), "nested", 0.99)
    assert all(keep >= 50 for record in records for keep in record.keeps)


def test_a_gallery_smaller_than_k_keeps_everything() -> None:
    for record in sweep(direction(0.5, rows=7), specs(), "nested", 0.99):
        assert all(1 <= keep <= 7 for keep in record.keeps)


@pytest.mark.parametrize("queries", [0, 1])
def test_too_few_queries_measure_nothing(queries: int) -> None:
    assert sweep(direction(0.1, queries=queries), specs(), "nested", 0.99) == []


def test_queries_of_one_item_are_never_in_both_halves() -> None:
    ordinals = np.array([3, 3, 3, 7, 9, 9, 12])
    queries = QuerySet({1: unit_vectors(7, 4)}, ordinals)
    assert queries.held_out.tolist() == [False, False, False, True, False, False, True]
    alone = QuerySet({1: unit_vectors(3, 4)}, np.array([5, 5, 5]))
    given = replace(direction(0.1, queries=3), held_out=alone.held_out)
    assert sweep(given, specs(), "nested", 0.99) == []


def test_one_level_has_no_widths() -> None:
    assert sweep(direction(0.1), specs()[:1], "nested", 0.99) == []


def within_one_modality(rows: int = 300, copies: int = 1) -> Direction:
    """Queries that are rows of the gallery themselves; their early exits only nearly agree."""
    gallery = np.repeat(unit_vectors(rows, DIMS[-1]), copies, axis=0)
    finest = gallery[: 60 * copies : copies]
    outputs = {len(DIMS): finest}
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = 0.3 * unit_vectors(60, dim, level)
        outputs[level] = normalise(nested_prefix(finest, dim) + wobble)
    levels = {
        spec.level: LevelRows(
            gallery, spec.dim, inverse_norms(gallery, spec.dim) if spec.dim < DIMS[-1] else None
        )
        for spec in specs()
    }
    return replace(direction(0.0), queries=outputs, rows=levels)


def test_a_query_that_finds_itself_proves_nothing() -> None:
    given = within_one_modality()
    records = sweep(given, specs(), "nested", 0.99)
    assert next(r.keeps[0] for r in records if r.plan == "cascade" and r.k == 1) > 20
    for own, found in enumerate(exact_rows(given, len(DIMS), 5)):
        assert own not in found
        assert len(found) == 5


def test_a_gallery_of_equals_is_still_measured() -> None:
    twins = within_one_modality(rows=60, copies=3)
    assert len(sweep(twins, specs(), "nested", 0.99)) == 6
    same = np.repeat(unit_vectors(1, 16), 60, axis=0)
    alike = replace(twins, queries={3: same}, rows={3: LevelRows(same[:9], 16)})
    assert all(len(found) == 4 for found in exact_rows(alike, 3, 4))


def test_widths_never_fall_as_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best row of every tenth query comes late in the first scan, all others come early."""

    def ranked(_: Direction, __: Plan, wanted: Sequence[RowArray]) -> list[RowArray]:
        found = [np.arange(1, len(rows) + 1) for rows in wanted]
        for late in found[::10]:
            late[0] = 300
        return found

    monkeypatch.setattr("hivlp.index.build.widths.first_ranks", ranked)
    levels = (LevelSpec(1, 1, 16), LevelSpec(2, 2, 32))
    finest = unit_vectors(60, 32, 1)
    gallery = unit_vectors(400, 32)
    given = replace(
        direction(0.0),
        queries={1: nested_prefix(finest, 16), 2: finest},
        rows={1: LevelRows(gallery, 16, inverse_norms(gallery, 16)), 2: LevelRows(gallery, 32)},
    )
    records = sweep(given, levels, "nested", 0.95)
    for plan in ("cascade", "funnel"):
        keeps = [r.keeps[0] for r in records if r.plan == plan]
        assert keeps[0] >= 300
        assert keeps == sorted(keeps)


def test_ranks_count_all_that_score_as_much_or_more() -> None:
    rng = np.random.default_rng(0)
    scores = np.round(rng.random(500), 2).astype(np.float32)  # many ties
    wanted = scores[rng.choice(500, 40)]
    slow = [int((scores >= one - np.float32(ROUNDING)).sum()) for one in wanted]
    assert ranks(scores, wanted).tolist() == slow
    assert ranks(scores, wanted[:0]).tolist() == []


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_query_of_the_gallery_is_never_among_what_it_must_keep(kind: type) -> None:
    gallery = unit_vectors(300, 64)
    rows = {3: LevelRows(gallery.astype(kind), 64)}
    direction = Direction("image", "image", {3: gallery}, rows, np.arange(300) % 2 == 1)
    wanted = exact_rows(direction, 3, 10)
    assert not any(i in found for i, found in enumerate(wanted))
    assert all(len(found) == 10 for found in wanted)


def candidates(*pairs: tuple[int, float]) -> Candidates:
    rows, scores = zip(*pairs, strict=True)
    return Candidates(np.array(rows), np.array(scores, dtype=np.float32))


def test_whichever_of_equal_rows_is_found_counts() -> None:
    best = candidates((7, 1.0), (1, 0.8), (2, 0.5), (3, 0.5))
    own, none = np.array([7]), np.array([], dtype=np.int64)
    assert share_found(candidates((7, 1.0), (1, 0.8), (9, 0.5)), best, own, 2) == 1.0
    assert share_found(candidates((1, 0.8), (4, 0.4)), best, own, 2) == 0.5
    assert share_found(candidates((7, 1.0)), best, own, 2) == 0.0
    doubles = candidates(*((i, 1.0) for i in range(11)))
    assert share_found(candidates(*((i, 1.0) for i in range(20, 30))), doubles, none, 10) == 1.0

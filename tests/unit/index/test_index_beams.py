"""Beams and bounds: chosen on one half of the queries, reported on the other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends.choose import open_graphs, open_level, write_graph, write_level
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build.beams import BEAMS, _Trial, measure_beams
from hivlp.index.build.confidence import recall_lower, sure_recall
from hivlp.index.build.directions import Direction
from hivlp.index.build.widths import exact_best, sweep
from hivlp.index.cascade import PlanRequest, run_stage
from hivlp.index.level_index import Codec, LevelIndex
from hivlp.index.plans import WidthPoint, make_plan
from hivlp.index.snapshot.manifest import WidthRecord
from hivlp.models.levels import nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors

ROWS = 4_500
QUERIES = 80


@pytest.fixture(scope="module")
def direction() -> Direction:
    spectrum = np.geomspace(4, 0.2, DIMS[-1], dtype=np.float32)
    gallery = normalise(unit_vectors(ROWS, DIMS[-1]) * spectrum)
    finest = normalise(gallery[:QUERIES] + 0.1 * unit_vectors(QUERIES, DIMS[-1], 1))
    outputs = {3: finest}
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = 0.1 * unit_vectors(QUERIES, dim, level)
        outputs[level] = normalise(nested_prefix(finest, dim) + wobble)
    rows = {
        s.level: LevelRows(gallery, s.dim, inverse_norms(gallery, s.dim) if s.level < 3 else None)
        for s in specs()
    }
    return Direction("image", "text", outputs, rows, np.arange(QUERIES) % 2 == 1)


def opened(direction: Direction, folder: Path, codec: Codec) -> dict[int, LevelIndex]:
    levels = {}
    for level, rows in direction.rows.items():
        file = folder / f"{level}.faiss"
        if level == 1:
            write_level(file, rows, codec)
        levels[level] = open_level(level, rows, file if level == 1 else None, "faiss-cpu")
    return levels


@pytest.fixture(scope="module")
def records(direction: Direction, tmp_path_factory: pytest.TempPathFactory) -> list[WidthRecord]:
    folder = tmp_path_factory.mktemp("graphs")
    levels = opened(direction, folder, "sq8")
    files = {level: folder / f"{level}.hnsw" for level in (1, 3)}
    for level, file in files.items():
        write_graph(file, direction.rows[level])
    graphs = open_graphs(files, direction.rows, levels)
    best = exact_best(direction, 3, 100)
    return measure_beams(direction, graphs, best, (1, 10, 100), 0.99)


def test_measured_beams_reach_the_target_on_the_half_they_were_chosen_on(
    records: list[WidthRecord],
) -> None:
    assert [(r.plan, r.k) for r in records] == [
        (plan, k) for plan in ("cascade", "funnel") for k in (1, 10, 100)
    ]
    for record in records:
        assert record.family == "graph"
        assert record.recall_chosen_on >= 0.99
        assert record.recall_held_out >= 0.95  # observed at least .99
        assert record.recall_lower is not None
        assert record.recall_lower < record.recall_held_out
        assert record.efs[-1] >= record.k
        shapes = [(2, 1), (2, 2)] if record.plan == "cascade" else [(1, 0)]
        assert (len(record.efs), len(record.keeps)) in shapes
    assert len({len(r.keeps) for r in records if r.plan == "cascade"}) == 1, "one shape for all k"


def test_the_walk_before_the_last_exit_is_run_as_it_was_measured(
    direction: Direction, tmp_path: Path
) -> None:
    levels = opened(direction, tmp_path, "sq8")
    files = {level: tmp_path / f"{level}.hnsw" for level in (1, 3)}
    for level, file in files.items():
        write_graph(file, direction.rows[level])
    graphs = open_graphs(files, direction.rows, levels)
    best = exact_best(direction, 3, 100)
    trial = _Trial(direction, graphs, best, 10)
    taken = trial.best("cascade", 0.99, "rescored")
    assert taken.variant == "rescored"
    point = {("image", "text", "cascade"): (WidthPoint(10, taken.keeps, taken.efs),)}
    request = PlanRequest("image", "text", 10, "cascade")
    plan = make_plan(request, specs(), {}, ROWS, graphs=point)
    assert [(s.level, s.method) for s in plan.stages] == [
        (1, "graph"), (2, "graph"), (3, "rescore")
    ]  # fmt: skip
    assert tuple(s.keep for s in plan.stages) == (max(taken.keeps[0], 11), taken.keeps[1], 10)
    half = np.flatnonzero(direction.held_out)
    found = None
    for stage in plan.stages:
        query = direction.queries[stage.level][half]
        found = run_stage(levels, stage, query, found, graphs=graphs)
    assert found is not None
    shares = [
        len(np.intersect1d(f.rows, best[i].rows[:10])) / 10
        for f, i in zip(found, half, strict=True)
    ]
    assert np.mean(shares) == pytest.approx(
        trial.shares(taken, direction.held_out).mean(), abs=0.02
    )
    assert np.mean(shares) >= 0.95


def test_a_row_repeated_more_often_than_is_looked_at_is_still_found(direction: Direction) -> None:
    crowd = np.repeat(direction.rows[3].matrix[:40], 150, axis=0)
    rows = {level: LevelRows(crowd, own.dim) for level, own in direction.rows.items()}
    queries = {3: direction.rows[3].matrix[:40]}
    many = Direction("text", "text", queries, rows, np.arange(40) % 2 == 1)
    finest = open_level(3, rows[3], None, "numpy")
    found = measure_beams(many, {3: finest}, exact_best(many, 3, 100), (1, 10, 100), 0.99)
    assert [record.recall_held_out for record in found] == [1.0, 1.0, 1.0]


def test_a_target_out_of_reach_gives_the_nearest_and_says_so(
    direction: Direction, tmp_path: Path
) -> None:
    class Blind:
        """A finest level that finds nothing of what is wanted."""

        level, size = 3, 10 * BEAMS[-1]

        def search(self, queries, k, params, entry_rows, mask):  # type: ignore[no-untyped-def]
            return level.search(-queries, k, params, None, None)

    level = open_level(3, direction.rows[3], None, "numpy")
    few = replace(
        direction,
        queries={n: q[:6] for n, q in direction.queries.items()},
        held_out=direction.held_out[:6],
    )
    record = measure_beams(few, {3: Blind()}, exact_best(few, 3, 1), (1,), 0.99)[0]  # type: ignore[dict-item]
    assert record.plan == "funnel"
    assert not record.reached
    assert record.recall_chosen_on < 0.99


def test_lossy_codes_get_wider_widths_until_the_plan_reaches_the_target(
    direction: Direction, tmp_path: Path
) -> None:
    widths = {}
    for codec in ("flat", "sq8", "pq64x4fs"):
        levels = opened(direction, tmp_path, codec)  # type: ignore[arg-type]
        found = sweep(replace(direction, levels=levels), specs(), "nested", 0.99)
        assert all(record.recall_chosen_on >= 0.99 - 1e-4 for record in found)
        widths[codec] = sum(record.keeps[0] for record in found)
    assert widths["flat"] <= widths["sq8"] <= widths["pq64x4fs"]


@pytest.mark.parametrize("count", [20, 250, 1_000])
def test_a_sample_without_loss_promises_what_would_be_refuted_in_19_of_20_samples(
    count: int,
) -> None:
    assert recall_lower(np.ones(count, np.float32)) == pytest.approx(0.05 ** (1 / count), abs=1e-6)
    assert recall_lower(np.zeros(count, np.float32)) == 0.0


def test_the_bound_of_a_lossy_sample_is_the_better_of_hoeffding_s_and_bentkus_s() -> None:
    shares = np.ones(500, np.float32)
    shares[:5] = 0
    risk = 1 - recall_lower(shares)
    divergence = 0.01 * math.log(0.01 / risk) + 0.99 * math.log(0.99 / (1 - risk))
    few = sum(math.comb(500, i) * risk**i * (1 - risk) ** (500 - i) for i in range(6))
    assert min(math.exp(-500 * divergence), math.e * few) == pytest.approx(0.05, rel=1e-4)


def test_the_lower_bound_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(300):
        shares = 1 - 0.1 * rng.binomial(10, 0.02, 200)  # recall@10, mean .98
        held.append(recall_lower(shares.astype(np.float32)) <= 0.98)
    assert np.mean(held) >= 0.95


def test_no_queries_promise_nothing() -> None:
    assert recall_lower(np.empty(0, np.float32)) == 0.0


def test_a_mean_is_sure_of_less_the_more_it_varies_and_the_fewer_there_are() -> None:
    steady, varied = np.full(100, 0.99, np.float32), np.ones(100, np.float32)
    varied[0] = 0.0
    assert sure_recall(steady) == pytest.approx(0.99, abs=1e-6)
    assert sure_recall(varied) == pytest.approx(0.99 - 1.645 * 0.0995 / 10, abs=1e-4)
    assert sure_recall(varied[:50]) < sure_recall(varied) < 0.99


def test_widths_that_were_chosen_hold_on_queries_they_were_not_chosen_on(
    direction: Direction,
) -> None:
    held = []
    for seed in range(12):
        halves = np.random.default_rng(seed).random(QUERIES) < 0.5
        records = sweep(replace(direction, held_out=halves), specs(), "nested", 0.95)
        held += [r.recall_held_out for r in records if r.k == 10]
    assert np.mean(np.array(held) >= 0.95) >= 0.9  # observed .96; chosen by the mean alone .79

"""What holds for every gallery, query, k and width, duplicates and ties included."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivlp.index.backends.choose import (
    Chosen,
    open_graph,
    open_level,
    write_graph,
    write_level,
)
from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanRequest, run_stage
from hivlp.index.level_index import LevelIndex, SearchParams
from hivlp.index.masks import RowMask
from hivlp.index.plans import make_plan, stage_query
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors

BACKENDS: tuple[Chosen, ...] = ("faiss-cpu", "numpy")
TASTE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def galleries(draw: st.DrawFn) -> FloatArray:
    """Unit vectors with repeats and, sometimes, small whole numbers, where ties abound."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    different = draw(st.integers(1, 60))
    if draw(st.booleans()):
        base = rng.standard_normal((different, DIMS[-1])).astype(np.float32)
    else:
        base = rng.integers(-1, 2, (different, DIMS[-1])).astype(np.float32)
        base[:, 0] = 1.0
    repeats = draw(st.integers(1, 4))
    return normalise(base[rng.integers(0, different, different * repeats)])


@st.composite
def exits(draw: st.DrawFn) -> dict[int, FloatArray]:
    """Early outputs of one query: noisy prefixes of the finest."""
    seed = draw(st.integers(0, 2**32 - 1))
    noise = draw(st.sampled_from([0.0, 0.1, 1.0]))
    finest = unit_vectors(1, DIMS[-1], seed)
    outputs = {len(DIMS): finest}
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = unit_vectors(1, dim, seed + level)
        outputs[level] = normalise(nested_prefix(finest, dim) + noise * wobble)
    return outputs


def open_levels(gallery: FloatArray, backend: Chosen) -> dict[int, LevelIndex]:
    levels: dict[int, LevelIndex] = {}
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs():
            norms = inverse_norms(gallery, spec.dim) if spec.dim < DIMS[-1] else None
            rows = LevelRows(gallery, spec.dim, norms)
            file = Path(folder) / f"{spec.level}.faiss"
            if spec.level == 1:
                write_level(file, rows)
            levels[spec.level] = open_level(
                spec.level, rows, file if spec.level == 1 else None, backend
            )
    return levels


def run(
    levels: dict[int, LevelIndex], plan: Plan, outputs: dict[int, FloatArray]
) -> list[Candidates]:
    """What every stage of the plan found."""
    found: list[Candidates] = []
    for stage in plan.stages:
        query = stage_query(stage, outputs, levels[stage.level].dim)
        found += run_stage(levels, stage, query, found[-1:] or None)
    return found


def exhaustive(levels: dict[int, LevelIndex], outputs: dict[int, FloatArray], k: int) -> Candidates:
    finest = max(levels)
    return levels[finest].search(outputs[finest], k, SearchParams(), None, None)[0]


@TASTE
@given(galleries(), exits(), st.integers(1, 300), st.sampled_from(BACKENDS))
def test_keeping_everything_equals_exhaustive_search_of_the_finest_level(
    gallery: FloatArray, outputs: dict[int, FloatArray], k: int, backend: Chosen
) -> None:
    levels = open_levels(gallery, backend)
    count = len(gallery)
    k = min(k, count)
    expected = exhaustive(levels, outputs, k)
    for name, keeps in (
        ("cascade", ((1, count), (2, count), (3, k))),
        ("funnel", ((1, count), (3, k))),
    ):
        request = PlanRequest("image", "text", k, name, keeps)  # type: ignore[arg-type]
        found = run(levels, make_plan(request, specs(), {}, count), outputs)[-1]
        assert found.rows.tolist() == expected.rows.tolist()
        assert found.scores.tolist() == expected.scores.tolist()


@TASTE
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), exits(), st.integers(1, 300))
def test_levels_with_rows_of_their_own_keep_the_same_promise(
    count: int, seed: int, outputs: dict[int, FloatArray], k: int
) -> None:
    levels: dict[int, LevelIndex] = {
        s.level: ExactLevel(s.level, LevelRows(unit_vectors(count, s.dim, seed + s.level), s.dim))
        for s in specs()
    }
    k = min(k, count)
    expected = exhaustive(levels, outputs, k)
    for name, keeps in (
        ("cascade", ((1, count), (2, count), (3, k))),
        ("funnel", ((1, count), (3, k))),
    ):
        request = PlanRequest("image", "text", k, name, keeps)  # type: ignore[arg-type]
        plan = make_plan(request, specs(), {}, count, gallery="per_exit")
        assert run(levels, plan, outputs)[-1].rows.tolist() == expected.rows.tolist()


@TASTE
@given(galleries(), exits(), st.integers(1, 100), st.data(), st.sampled_from(BACKENDS))
def test_survivors_are_nested_and_every_hit_survived_each_stage(
    gallery: FloatArray,
    outputs: dict[int, FloatArray],
    k: int,
    data: st.DataObject,
    backend: Chosen,
) -> None:
    levels = open_levels(gallery, backend)
    second = data.draw(st.integers(k, 2 * k))
    first = data.draw(st.integers(second, 4 * second))
    keeps = ((1, first), (2, second), (3, k))
    request = PlanRequest("image", "text", k, "cascade", keeps)
    stages = run(levels, make_plan(request, specs(), {}, len(gallery)), outputs)
    for before, after in pairwise(stages):
        assert set(after.rows.tolist()) <= set(before.rows.tolist())
    assert [len(found) for found in stages] == [
        min(keep, len(gallery)) for keep in (first, second, k)
    ]


@TASTE
@given(galleries(), exits(), st.integers(1, 80), st.integers(1, 80), st.sampled_from(BACKENDS))
def test_a_wider_first_stage_keeps_what_a_narrower_one_kept(
    gallery: FloatArray, outputs: dict[int, FloatArray], a: int, b: int, backend: Chosen
) -> None:
    level = open_levels(gallery, backend)[1]
    small, large = sorted((a, b))
    few = level.search(outputs[1], small, SearchParams(), None, None)[0]
    many = level.search(outputs[1], large, SearchParams(), None, None)[0]
    assert many.top(small).rows.tolist() == few.rows.tolist()
    assert many.top(small).scores.tolist() == few.scores.tolist()


@TASTE
@given(galleries(), exits(), st.integers(1, 400), st.sampled_from(["cascade", "funnel", "exact"]))
def test_every_plan_returns_min_k_n_unique_rows_best_first(
    gallery: FloatArray, outputs: dict[int, FloatArray], k: int, name: str
) -> None:
    levels = open_levels(gallery, "faiss-cpu")
    request = PlanRequest("image", "text", k, name)  # type: ignore[arg-type]
    found = run(levels, make_plan(request, specs(), {}, len(gallery)), outputs)[-1]
    assert len(found) == len(set(found.rows.tolist())) == min(k, len(gallery))
    assert np.isfinite(found.scores).all()
    pairs = list(zip((-found.scores).tolist(), found.rows.tolist(), strict=True))
    assert pairs == sorted(pairs)


@TASTE
@given(galleries(), exits(), st.integers(1, 100))
def test_both_backends_find_the_same_rows(
    gallery: FloatArray, outputs: dict[int, FloatArray], k: int
) -> None:
    found = [
        open_levels(gallery, backend)[1].search(outputs[1], k, SearchParams(), None, None)[0]
        for backend in BACKENDS
    ]
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=2e-6)
    differ = found[0].rows != found[1].rows
    # Rows may trade places only where their scores differ by rounding alone.
    for row_a, row_b in zip(found[0].rows[differ], found[1].rows[differ], strict=True):
        pair = nested_prefix(gallery[[row_a, row_b]], DIMS[0]) @ outputs[1][0]
        assert abs(float(pair[0] - pair[1])) < 2e-6


@TASTE
@given(galleries(), exits(), st.integers(1, 100), st.data(), st.sampled_from(BACKENDS))
def test_under_a_mask_keeping_everything_equals_exhaustive_search_of_what_is_allowed(
    gallery: FloatArray,
    outputs: dict[int, FloatArray],
    k: int,
    data: st.DataObject,
    backend: Chosen,
) -> None:
    levels = open_levels(gallery, backend)
    count = len(gallery)
    allowed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    mask = RowMask.of(np.array(allowed, dtype=np.bool_))
    expected = levels[3].search(outputs[3], k, SearchParams(), None, mask)[0]
    assert len(expected) == min(k, mask.count)
    keeps = ((1, count), (2, count), (3, min(k, count)))
    request = PlanRequest("image", "text", min(k, count), "cascade", keeps)
    found: list[Candidates] | None = None
    for stage in make_plan(request, specs(), {}, count).stages:
        found = run_stage(levels, stage, outputs[stage.level], found, mask=mask)
    assert found is not None
    assert found[0].rows.tolist() == expected.rows.tolist()
    assert found[0].scores.tolist() == expected.scores.tolist()


@st.composite
def crowded(draw: st.DrawFn) -> FloatArray:
    """More rows than a graph level answers exhaustively, many of them equal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    different = draw(st.sampled_from([3, 40, 1_200]))
    base = rng.standard_normal((different, DIMS[-1])).astype(np.float32)
    return normalise(base[rng.integers(0, different, draw(st.integers(1_001, 1_500)))])


@settings(TASTE, max_examples=15)
@given(crowded(), exits(), st.integers(1, 60), st.integers(1, 300), st.data())
def test_a_graph_ranks_what_it_finds_exactly_and_finds_all_with_a_wide_beam(
    gallery: FloatArray, outputs: dict[int, FloatArray], k: int, ef: int, data: st.DataObject
) -> None:
    rows = LevelRows(gallery, DIMS[-1])
    exact = ExactLevel(3, rows)
    with tempfile.TemporaryDirectory() as folder:
        write_graph(Path(folder) / "level3.hnsw", rows)
        graph = open_graph(Path(folder) / "level3.hnsw", rows, exact)
    entry = data.draw(st.lists(st.integers(0, len(gallery) - 1), unique=True, max_size=50))
    for entries in (None, [np.array(entry, dtype=np.int64)]):
        found = graph.search(outputs[3], k, SearchParams(ef=ef), entries, None)[0]
        assert len(found) == len(set(found.rows.tolist())) == k
        again = exact.score(outputs[3], [found.rows])[0]
        assert found.rows.tolist() == again.rows.tolist()
        assert found.scores.tolist() == again.scores.tolist()
        wide = graph.search(outputs[3], k, SearchParams(ef=len(gallery)), entries, None)[0]
        truth = exact.search(outputs[3], k, SearchParams(), None, None)[0]
        assert wide.rows.tolist() == truth.rows.tolist()

"""The build chooses how to search from what it measured, within limits, and says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build import choice
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.choice import Means, choose
from hivlp.index.build.explain import table
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.wishes import Wishes
from hivlp.index.errors import BuildError
from hivlp.index.snapshot.manifest import OptionRecord
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors

SPECTRUM = np.geomspace(4, 0.2, DIMS[-1], dtype=np.float32)


def side_of(count: int) -> BuiltSide:
    gallery = normalise(unit_vectors(count, DIMS[-1]) * SPECTRUM)
    rows = {
        s.level: LevelRows(gallery, s.dim, inverse_norms(gallery, s.dim) if s.level < 3 else None)
        for s in specs()
    }
    return BuiltSide("image", rows, np.arange(count), [b"%d" % i for i in range(count)])


def queries_of(side: BuiltSide, count: int = 60) -> QuerySet:
    finest: FloatArray = side.rows[3].vectors(np.arange(count))
    outputs = {s.level: nested_prefix(finest, s.dim) for s in specs()}
    return QuerySet(outputs, np.arange(count))


def chosen(options: tuple[OptionRecord, ...]) -> OptionRecord:
    (one,) = [option for option in options if option.chosen]
    return one


def test_a_few_thousand_rows_are_scanned_flat_and_nothing_else_is_tried() -> None:
    side = side_of(3_000)
    options = choose(side, queries_of(side), specs(), "nested", Wishes(), 0.99)
    taken = chosen(options)
    assert (taken.family, taken.level1) == ("scan", "flat")
    assert "exact" in taken.reason
    assert len(options) == 5
    assert all(option.recall is None for option in options)
    text = table("image", options)
    assert text.count("not tried: few rows") == 4
    assert "* scan   flat" in text


@pytest.fixture(scope="module")
def many() -> BuiltSide:
    return side_of(25_000)


@pytest.fixture
def smaller_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SAMPLED", {"scan": 2_000, "graph": 2_000})


@pytest.mark.usefixtures("smaller_sample")
def test_many_rows_have_every_candidate_measured(many: BuiltSide) -> None:
    options = choose(many, queries_of(many), specs(), "nested", Wishes(), 0.99)
    assert [(o.family, o.level1) for o in options] == list(choice.CANDIDATES)
    for option in options:
        assert option.recall is not None
        assert option.recall >= 0.9  # observed at least .98
        assert option.search_ms is not None
        assert option.after_ms is not None
        assert 0 < option.after_ms <= option.search_ms
        assert option.build_s is not None
        assert option.reason
    chosen(options)


@pytest.mark.usefixtures("smaller_sample")
def test_an_index_that_is_rebuilt_often_gets_no_graph_and_says_why(many: BuiltSide) -> None:
    wishes = Wishes(must=("mask", "rebuild"), max_query_ms=1e-9)
    options = choose(many, queries_of(many), specs(), "nested", wishes, 0.99)
    assert chosen(options).family == "scan"
    (graph,) = [o for o in options if o.family == "graph"]
    assert (graph.recall, graph.reason) == (None, "rebuilt often")


@pytest.mark.usefixtures("smaller_sample")
def test_times_of_an_index_that_serves_batches_are_shares_of_a_batch(
    many: BuiltSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    timed = choice.run_stage

    def watched(levels, stage, queries, previous, **more):  # type: ignore[no-untyped-def]
        seen.add(len(queries))
        return timed(levels, stage, queries, previous, **more)

    monkeypatch.setattr(choice, "run_stage", watched)
    wishes = Wishes(family="scan", must=("batch",))
    options = choose(many, queries_of(many), specs(), "nested", wishes, 0.99)
    assert seen == {choice.BATCH}
    assert all(o.search_ms is not None and o.search_ms > 0 for o in options)


@pytest.mark.usefixtures("smaller_sample")
def test_a_graph_s_estimate_is_built_with_the_threads_that_build_it(
    many: BuiltSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    build = choice.write_graph

    def watched(path, rows, threads):  # type: ignore[no-untyped-def]
        seen.add(threads)
        build(path, rows, threads)

    monkeypatch.setattr(choice, "write_graph", watched)
    wishes = Wishes(level1="sq8", must=())
    choose(many, queries_of(many), specs(), "nested", wishes, 0.99, Means(threads=2))
    assert seen == {2}


@pytest.mark.usefixtures("smaller_sample")
def test_limits_exclude_and_say_so(many: BuiltSide) -> None:
    wishes = Wishes(max_build_s=1e-9, max_memory_bytes=1)
    options = choose(many, queries_of(many), specs(), "nested", wishes, 0.99)
    taken = chosen(options)
    assert "comes nearest: over --max-memory" in taken.reason
    others = [option for option in options if not option.chosen]
    assert all("over --max-build-s" in option.reason for option in others if option.build_s)
    assert all("over --max-memory" in option.reason for option in others)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        (Wishes(family="graph"), ("graph", "sq8")),
        (Wishes(family="graph", level1="flat"), ("graph", "flat")),
        (Wishes(level1="pq64x4fs"), ("scan", "pq64x4fs")),
        (Wishes(level1="rabitqfs"), ("scan", "rabitqfs")),
        (Wishes(family="scan", level1="sq8"), ("scan", "sq8")),
    ],
)
def test_what_is_asked_for_is_taken_without_measuring(
    many: BuiltSide, wishes: Wishes, expected: tuple[str, str]
) -> None:
    options = choose(many, queries_of(many), specs(), "nested", wishes, 0.99)
    assert [(o.family, o.level1, o.reason) for o in options] == [(*expected, "asked for")]


def test_a_graph_over_fast_scan_codes_is_refused_at_once() -> None:
    for codec in ("pq64x4fs", "rabitqfs"):
        with pytest.raises(BuildError, match=f"can't walk over {codec}"):
            Wishes(family="graph", level1=codec)  # type: ignore[arg-type]


def test_a_graph_for_an_index_that_is_rebuilt_often_is_refused_at_once() -> None:
    with pytest.raises(BuildError, match="rebuilt often takes no graphs"):
        Wishes(family="graph", must=("rebuild",))


@pytest.mark.parametrize("codec", ["pq64x4fs", "rabitqfs"])
def test_an_index_that_must_mask_keeps_maskable_codes_beside_fast_scan_ones(
    many: BuiltSide, codec: str
) -> None:
    def alone(*must: str) -> OptionRecord:
        wishes = Wishes(level1=codec, must=must)  # type: ignore[arg-type]
        return chosen(choose(many, None, specs(), "nested", wishes, 0.99))

    with_mask, without = alone("mask"), alone()
    assert (with_mask.maskable, without.maskable) == ("sq8", None)
    assert with_mask.memory_bytes - without.memory_bytes == many.size * DIMS[0]
    assert f"scan   {codec}+sq8" in table("image", [with_mask])
    assert "+sq8" not in table("image", [without])


def test_memory_counts_the_levels_that_are_materialised(many: BuiltSide) -> None:
    wishes = Wishes(family="scan", level1="sq8")

    def memory(gallery: str, means: Means) -> int:
        options = choose(many, None, specs(), gallery, wishes, 0.99, means)  # type: ignore[arg-type]
        return chosen(options).memory_bytes

    plain, full = memory("nested", Means()), memory("nested", Means(materialise=True))
    assert full - plain == many.size * 4 * (DIMS[1] + DIMS[2])
    own_rows, norms = 4 * (DIMS[0] + DIMS[1]), 4 * (len(DIMS) - 1)
    assert memory("per_exit", Means()) == full + many.size * (own_rows - norms)


def test_too_few_rows_for_what_is_asked_for_get_what_they_can_have() -> None:
    side = side_of(200)
    wishes = Wishes(family="scan", level1="pq64x4fs")
    assert chosen(choose(side, None, specs(), "nested", wishes, 0.99)).level1 == "flat"


def test_without_queries_the_codes_that_lose_nothing_are_taken(many: BuiltSide) -> None:
    taken = chosen(choose(many, None, specs(), "nested", Wishes(), 0.99))
    assert (taken.family, taken.level1) == ("scan", "sq8")
    assert "no queries" in taken.reason


def option(family: str, level1: str, **measured: float) -> OptionRecord:
    filled = {"recall": 0.995, "search_ms": 5.0, "after_ms": 1.0, "build_s": 9.0} | measured
    return OptionRecord(  # type: ignore[call-arg]
        family=family, level1=level1, rows=10**6, memory_bytes=10**9, chosen=False, reason="",
        **filled,
    )  # fmt: skip


def judged(*options: OptionRecord, **wishes: float) -> tuple[str, str]:
    taken = chosen(choice._judge(options, Wishes(**wishes), 0.99))  # type: ignore[arg-type]
    return taken.family, taken.level1


def test_the_simplest_wins_unless_another_is_much_faster() -> None:
    flat, sq8 = option("scan", "flat", search_ms=30.0), option("scan", "sq8", search_ms=10.0)
    graph = option("graph", "sq8", search_ms=1.0)
    assert judged(flat, sq8, graph) == ("graph", "sq8")
    assert judged(flat, sq8, option("graph", "sq8", search_ms=8.0)) == ("scan", "sq8")
    assert judged(option("scan", "flat", search_ms=12.0), sq8) == ("scan", "flat")
    assert judged(flat, sq8, option("graph", "sq8", search_ms=1.0, build_s=9e9)) == ("scan", "sq8")
    assert judged(flat, sq8, option("graph", "sq8", search_ms=1.0, recall=0.9)) == ("scan", "sq8")
    assert judged(flat, sq8, max_query_ms=20.0) == ("scan", "sq8")


@pytest.mark.parametrize("size", [2, 40, 900])
def test_few_rows_get_no_graph_whatever_codes_are_asked_for(many: BuiltSide, size: int) -> None:
    few = replace(
        many,
        rows={n: replace(r, matrix=r.matrix[:size], inverse_norms=None
                         if r.inverse_norms is None else r.inverse_norms[:size])
              for n, r in many.rows.items()},
        row_items=many.row_items[:size],
    )  # fmt: skip
    options = choose(few, None, specs(), "nested", Wishes(level1="sq8"), 0.99)
    assert [(o.family, o.chosen) for o in options if o.chosen] == [("scan", True)]

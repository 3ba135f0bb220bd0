"""Requests become plans that hold what they promise, or an error that names the limit."""

from __future__ import annotations

from typing import Any

import pytest

from hivlp.index.cascade import Plan, PlanRequest, Stage
from hivlp.index.errors import PlanError
from hivlp.index.plans import UNMEASURED, WidthPoint, WidthTable, default_keeps, make_plan
from tests.fakes import specs

ROWS = 10_000
WIDTHS: WidthTable = {
    ("image", "text", "cascade"): (
        WidthPoint(1, (20, 5)),
        WidthPoint(10, (100, 20)),
        WidthPoint(100, (500, 200)),
    ),
    ("image", "text", "funnel"): (
        WidthPoint(1, (4,)),
        WidthPoint(10, (40,)),
        WidthPoint(100, (150,)),
    ),
}


def plan(need: int = 10, *, rows: int = ROWS, gallery: Any = "nested", **asked: Any) -> Plan:
    request = PlanRequest("image", "text", need, **asked)
    return make_plan(request, specs(), WIDTHS, rows, gallery=gallery)


def shape(found: Plan) -> list[tuple[int, str, int, int]]:
    return [(s.level, s.method, s.keep, s.query_level) for s in found.stages]


def test_a_cascade_searches_each_level_with_its_own_exit() -> None:
    assert shape(plan(name="cascade")) == [
        (1, "scan", 100, 1),
        (2, "rescore", 20, 2),
        (3, "rescore", 10, 3),
    ]


def test_auto_is_the_cascade() -> None:
    assert plan(name="auto") == plan(name="cascade")


def test_a_funnel_searches_with_the_finest_query_throughout() -> None:
    assert shape(plan(name="funnel")) == [(1, "scan", 40, 3), (3, "rescore", 10, 3)]


def test_a_funnel_over_separate_galleries_uses_each_level_s_own_query() -> None:
    found = plan(name="funnel", gallery="per_exit")
    assert shape(found) == [(1, "scan", 40, 1), (3, "rescore", 10, 3)]


def test_exact_scans_the_finest_level_alone() -> None:
    assert shape(plan(name="exact")) == [(3, "scan", 10, 3)]


@pytest.mark.parametrize(("need", "keep"), [(1, 20), (3, 43), (10, 100), (100, 500), (31, 221)])
def test_widths_are_interpolated_between_measured_ones(need: int, keep: int) -> None:
    assert plan(need).stages[0].keep == pytest.approx(keep, abs=2)


def test_beyond_the_last_measured_k_widths_keep_growing() -> None:
    keeps = [plan(need).stages[0].keep for need in (100, 200, 1_000)]
    assert keeps == sorted(keeps)
    assert keeps[2] >= 1_000


@pytest.mark.parametrize("need", [1, 9, 10, 11, 99, 100, 101, 5_000, ROWS, ROWS + 1, 10**9])
@pytest.mark.parametrize("name", ["cascade", "funnel", "exact"])
def test_no_stage_keeps_fewer_than_needed_or_more_than_there_are(need: int, name: Any) -> None:
    keeps = [stage.keep for stage in plan(need, name=name).stages]
    assert keeps == sorted(keeps, reverse=True)
    assert keeps[-1] == min(need, ROWS)
    assert keeps[0] <= ROWS


def test_a_direction_without_measured_widths_keeps_generously() -> None:
    request = PlanRequest("text", "image", 10, name="cascade")
    found = make_plan(request, specs(), WIDTHS, ROWS)
    assert [s.keep for s in found.stages] == [UNMEASURED[0][0], UNMEASURED[1][0], 10]


def test_one_measured_point_grows_in_proportion() -> None:
    assert default_keeps([WidthPoint(10, (50,))], 100, 1) == [500]
    assert default_keeps([WidthPoint(10, (50,))], 2, 1) == [50]


def test_explicit_widths_replace_the_measured_ones() -> None:
    found = plan(keeps=((1, 77), (2, 33), (3, 12)))
    assert [s.keep for s in found.stages] == [77, 33, 12]


def test_levels_that_were_not_named_fit_in_between() -> None:
    assert [s.keep for s in plan(keeps=((1, 15),)).stages] == [15, 15, 10]
    assert [s.keep for s in plan(keeps=((3, 400),)).stages] == [400, 400, 400]
    assert [s.keep for s in plan(keeps=((2, 50),)).stages] == [100, 50, 10]


def test_explicit_widths_are_cut_to_the_rows_there_are() -> None:
    assert [s.keep for s in plan(keeps=((1, 10**7),), rows=30).stages] == [30, 20, 10]


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("name", ["auto", "cascade", "funnel", "exact"])
def test_max_level_caps_every_plan(cap: int, name: Any) -> None:
    found = plan(name=name, max_level=cap)
    assert found.stages[-1].level == cap
    assert all(stage.query_level <= cap for stage in found.stages)
    assert found.stages[-1].keep == 10


@pytest.mark.parametrize(
    ("asked", "message", "limit"),
    [
        ({"keeps": ((4, 20),)}, "level 4 is not one of", 3),
        ({"keeps": ((0, 20),)}, "level 0 is not one of", 3),
        ({"keeps": ((2, 20),), "name": "funnel"}, "level 2 is not one of the funnel", 3),
        ({"keeps": ((2, 20),), "max_level": 1}, "level 2 is not one of", 1),
        ({"keeps": ((1, 20), (2, 21))}, "more than the 20 it is given", 20),
        ({"keeps": ((1, 20), (3, 9))}, "fewer than the 10 results asked for", 10),
        ({"keeps": ((1, 9),)}, "fewer than the 10 results asked for", 10),
        ({"keeps": ((1, -5),)}, "fewer than the 10", 10),
        ({"keeps": ((2, 20), (1, 30))}, "coarse first", None),
        ({"keeps": ((1, 20), (1, 20))}, "coarse first", None),
        ({"keeps": ((3, 20),), "name": "exact"}, "exact plan", None),
        ({"max_level": 0}, "max_level must be from 1 to 3", 3),
        ({"max_level": 4}, "max_level must be from 1 to 3", 3),
    ],
)
def test_a_contradiction_is_refused_with_its_limit(
    asked: dict[str, Any], message: str, limit: int | None
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan(**asked)
    assert caught.value.limit == limit
    assert caught.value.param in ("cascade", "max_level")


@pytest.mark.parametrize("need", [0, -1])
def test_asking_for_nothing_is_refused(need: int) -> None:
    with pytest.raises(PlanError, match="at least one"):
        plan(need)


def test_an_empty_side_still_has_a_plan() -> None:
    assert [s.keep for s in plan(5, rows=0).stages] == [1, 1, 1]


def test_rows_needed_for_items_widen_the_last_stage() -> None:
    request = PlanRequest("image", "text", 10)
    found = make_plan(request, specs(), WIDTHS, ROWS, rows_needed=46)
    assert found.stages[-1].keep == 46
    assert found.stages[0].keep > 100


def test_a_model_of_one_level_has_one_stage() -> None:
    for name in ("cascade", "funnel", "exact"):
        request = PlanRequest("image", "text", 3, name=name)  # type: ignore[arg-type]
        assert len(make_plan(request, specs((8,)), {}, ROWS).stages) == 1


def stage(level: int, method: Any, keep: int, query_level: int | None = None) -> Stage:
    return Stage(level, method, keep, query_level or level)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "at least one stage"),
        ([stage(1, "rescore", 5)], "nothing to re-score"),
        ([stage(1, "scan", 5), stage(1, "rescore", 5)], "levels must grow"),
        ([stage(2, "scan", 5), stage(1, "rescore", 5)], "levels must grow"),
        ([stage(1, "scan", 5, 3), stage(2, "rescore", 5, 2)], "levels must grow"),
        ([stage(1, "scan", 5), stage(2, "scan", 5)], "only the first stage scans"),
        ([stage(1, "scan", 5), stage(2, "rescore", 6)], "more than the 5"),
        ([stage(1, "scan", 0)], "at least 1"),
    ],
)
def test_stages_that_are_no_cascade_are_refused(stages: list[Stage], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan("cascade", tuple(stages))


def test_a_graph_stage_may_grow_from_its_entries() -> None:
    stages = (stage(1, "graph", 20), stage(3, "graph", 100))
    assert Plan("cascade", stages).stages == stages

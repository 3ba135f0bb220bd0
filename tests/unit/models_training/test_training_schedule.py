"""Rates, and plans that keep a run within its time."""

from __future__ import annotations

import pytest

from hivlp.models.training.loop.schedule import Clock, Plan, Planner, learning_rate
from hivlp.models.training.loop.settings import TrainSettings


def test_the_rate_rises_over_a_tenth_and_falls_to_its_end() -> None:
    settings = TrainSettings()
    rates = [learning_rate(done, settings) for done in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0, 5e-5, 1e-4, 5.5e-5, 1e-5])


def test_a_plan_goes_on_evenly_from_where_it_was_made() -> None:
    assert [Plan(10).progress(step) for step in (0, 3, 10)] == [0, 0.3, 1]
    later = Plan(50, start=10, done=0.2, timed=True)
    assert [later.progress(step) for step in (10, 30, 50, 51)] == pytest.approx([0.2, 0.6, 1, 1])


def look(planner: Planner, steps: range, pace: float, before: float = 0.0) -> list[int]:
    """The steps before which a planner plans, where each takes `pace` seconds."""
    return [s for s in steps if planner.look(s, before + (s - steps.start) * pace)]


def test_a_run_without_a_time_limit_is_never_planned() -> None:
    planner = Planner(Plan(1000), float("inf"), 1000, 0)
    assert look(planner, range(100), 1.0) == []
    assert planner.plan == Plan(1000)


def test_steps_are_timed_once_and_the_rest_fits_the_time() -> None:
    planner = Planner(Plan(10**6), 1000.0, 10**6, 0)
    # the first 3 steps are passed over, then 2 % of the time is timed: 20 s of half a second each
    assert look(planner, range(100), 0.5) == [43]
    plan = planner.plan
    assert plan.timed
    # until then, progress was that of the time
    assert plan.progress(43) == pytest.approx(0.5 * 43 / 1000)
    assert plan.steps * 0.5 == pytest.approx(980, abs=1)


def test_a_plan_never_has_more_steps_than_the_recipe() -> None:
    planner = Planner(Plan(60), 1000.0, 60, 0)
    look(planner, range(60), 0.5)
    assert planner.plan.steps == 60


MADE = Plan(1000, start=43, done=0.01, timed=True)


@pytest.mark.parametrize(("pace", "kept"), [(0.92, True), (1.0, True), (2.0, False), (0.5, False)])
def test_a_plan_is_kept_unless_it_would_miss_its_time(pace: float, kept: bool) -> None:
    planner = Planner(MADE, 1000.0, 10**6, 100)
    found = look(planner, range(100, 200), pace, before=100)
    if kept:
        assert (found, planner.plan) == ([], MADE)
        return
    # 3 steps are passed over, then 20 s are timed, and 10 steps at least
    step = 103 + max(10, round(20 / pace))
    assert found == [step]
    assert planner.plan.progress(step) == pytest.approx(MADE.progress(step))
    left = 1000 - 100 - (step - 100) * pace
    assert planner.plan.steps == step + int(left * 0.98 / pace)


def test_a_clock_counts_earlier_sittings() -> None:
    moments = iter([100.0, 103.0])
    assert Clock(7.0, lambda: next(moments)).seconds == 10.0

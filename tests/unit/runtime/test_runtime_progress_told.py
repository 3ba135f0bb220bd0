"""Progress told to a program that watches."""

from __future__ import annotations

import pytest

from hivlp.models.runtime import progress
from hivlp.models.runtime.progress import Progress, Step, begin, reporting


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_watcher_is_told_of_begin_middle_and_end_even_of_quiet_work(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Step] = []
    with reporting(told.append), Progress("encode", 10, quiet=True) as counted:
        clock.now_s += 1
        counted.step(4)
        counted.step(1)  # too soon to be told
        clock.now_s += 1
        counted.step(3)
    assert told == [
        Step("encode", "item", 0, 10),
        Step("encode", "item", 4, 10, 4.0, 1.5),
        Step("encode", "item", 8, 10, 4.0, 0.5),
        Step("encode", "item", 8, 10, 4.0, 0.5),
    ]
    assert capsys.readouterr().err == ""


def test_without_a_total_nobody_knows_how_long_it_takes(clock: Clock) -> None:
    told: list[Step] = []
    with reporting(told.append), Progress("encode", None, quiet=True) as counted:
        clock.now_s += 2
        counted.step(4)
    assert told[-1] == Step("encode", "item", 4, None, 2.0, None)


def test_the_rate_forgets_what_came_out_of_a_cache_at_once(clock: Clock) -> None:
    told: list[Step] = []
    with reporting(told.append), Progress("encode", 20_000, quiet=True) as counted:
        clock.now_s += 1
        counted.step(10_000)
        for _ in range(int(2 * progress.PACE_S)):
            clock.now_s += 1
            counted.step(5)
    assert told[-1].rate == pytest.approx(5.0)
    assert told[-1].seconds_left == pytest.approx((20_000 - told[-1].done) / 5.0)


def test_a_step_that_counts_nothing_is_told_and_nobody_is_told_outside_the_block() -> None:
    told: list[Step] = []
    with reporting(told.append):
        begin("publish")
    begin("unheard")
    with Progress("unheard", 1, quiet=True) as counted:
        counted.step()
    assert told == [Step("publish")]

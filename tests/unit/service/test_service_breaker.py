"""The breaker: opens on failures close together, stays shut on rare ones, and tells."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from hivlp.service.cache.breaker import Breaker


@dataclass
class Told:
    """What a breaker said, under a clock that a test moves."""

    now_s: float = 100.0
    said: list[str] = field(default_factory=list)

    def breaker(self) -> Breaker:
        breaker = Breaker(
            failures=3,
            window_s=10,
            on_open=self.said.append,
            on_close=lambda: self.said.append("closed"),
            clock=lambda: self.now_s,
        )
        breaker.close()
        return breaker


@pytest.fixture
def told() -> Told:
    return Told()


def test_it_begins_open_since_nothing_was_tried_yet() -> None:
    breaker = Breaker(failures=3, window_s=10)
    assert breaker.is_open
    breaker.succeeded()
    assert breaker.is_open
    breaker.close()
    assert not breaker.is_open


def test_failures_close_together_open_it_and_the_last_one_is_told(told: Told) -> None:
    breaker = told.breaker()
    breaker.failed("first")
    breaker.failed("second")
    assert not breaker.is_open
    breaker.failed("third")
    assert breaker.is_open
    breaker.failed("of a question asked before")
    assert told.said == ["closed", "third"]


def test_failures_far_apart_do_not_open_it(told: Told) -> None:
    breaker = told.breaker()
    for _ in range(20):
        breaker.failed("now and then")
        told.now_s += 5.5
    assert not breaker.is_open


def test_one_failure_among_two_successes_never_opens_it_and_every_other_one_does(
    told: Told,
) -> None:
    breaker = told.breaker()
    for _ in range(20):
        breaker.failed("one in three")
        breaker.succeeded()
        breaker.succeeded()
    assert not breaker.is_open
    for _ in range(5):
        breaker.failed("every other")
        breaker.succeeded()
    assert breaker.is_open


def test_closing_forgets_what_opened_it(told: Told) -> None:
    breaker = told.breaker()
    for _ in range(3):
        breaker.failed("gone")
    breaker.close()
    breaker.failed("once more")
    breaker.failed("and again")
    assert not breaker.is_open


def test_who_waits_for_it_to_open_is_woken(told: Told) -> None:
    async def check() -> None:
        breaker = told.breaker()
        waiting = asyncio.create_task(breaker.wait_open())
        await asyncio.sleep(0)
        assert not waiting.done()
        for _ in range(3):
            breaker.failed("gone")
        await asyncio.wait_for(waiting, 10)

    asyncio.run(check())

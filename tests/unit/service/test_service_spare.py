"""Spare time: one thing at a time, behind requests, and no more of a core than its share."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hivlp.service.sampling import Lottery
from hivlp.service.spare import NoTime, Spare


def run(
    scene: Callable[[Spare], Coroutine[Any, Any, None]],
    busy: Callable[[], bool] = lambda: False,
    **given: Any,
) -> None:
    """A scene with two cores, both of which requests need while it is `busy`."""
    given = {"in_flight": lambda: 2 * busy(), "core_share": 1.0, "patience_s": 60.0, **given}

    async def main() -> None:
        spare = Spare(cores=2, **given)
        try:
            await scene(spare)
        finally:
            await asyncio.to_thread(spare.close)

    asyncio.run(main())


def nothing(_: float) -> None:
    """Not counted."""


def test_work_waits_until_requests_leave_a_core() -> None:
    busy = threading.Event()
    busy.set()
    done: list[str] = []

    async def scene(spare: Spare) -> None:
        work = asyncio.create_task(spare.run(lambda: done.append("work"), nothing))
        await asyncio.sleep(0.05)
        assert not done
        busy.clear()
        await work
        assert done == ["work"]

    run(scene, busy.is_set)


def test_work_under_way_pauses_at_its_next_breath_and_goes_on() -> None:
    busy, began, steps = threading.Event(), threading.Event(), []

    async def scene(spare: Spare) -> None:
        def work() -> None:
            for step in range(3):
                steps.append(step)
                if step == 0:
                    busy.set()
                    began.set()
                spare.breathe()

        task = asyncio.create_task(spare.run(work, nothing))
        assert await asyncio.to_thread(began.wait, 30)
        await asyncio.sleep(0.05)
        assert steps == [0]
        busy.clear()
        await task
        assert steps == [0, 1, 2]

    run(scene, busy.is_set)


def test_work_that_requests_keep_waiting_is_given_up() -> None:
    async def scene(spare: Spare) -> None:
        with pytest.raises(NoTime):
            await spare.run(lambda: pytest.fail("it ran"), nothing)

    run(scene, lambda: True, patience_s=0.01)


def test_while_there_are_requests_it_rests_much_longer_than_it_works() -> None:
    worked_s, rested_s = [], []

    async def scene(spare: Spare) -> None:
        def work() -> None:
            for _ in range(4):
                began_s = time.monotonic()
                time.sleep(0.005)
                ended_s = time.monotonic()
                spare.breathe()
                worked_s.append(ended_s - began_s)
                rested_s.append(time.monotonic() - ended_s)

        await spare.run(work, nothing)

    run(scene, in_flight=lambda: 1)
    assert all(rest >= 8.9 * work for work, rest in zip(worked_s, rested_s, strict=True))


def test_without_requests_it_never_rests() -> None:
    now_s = 0.0

    async def scene(spare: Spare) -> None:
        def work() -> None:
            nonlocal now_s
            for _ in range(100):
                now_s += 50.0
                spare.breathe()  # it would wait for ever: the clock stands still meanwhile

        await spare.run(work, nothing)

    run(scene, in_flight=lambda: 0, clock=lambda: now_s)


def test_two_pieces_of_work_never_run_at_once() -> None:
    running: list[int] = []
    most: list[int] = []

    async def scene(spare: Spare) -> None:
        def work() -> None:
            running.append(1)
            most.append(len(running))
            time.sleep(0.01)
            running.pop()

        await asyncio.gather(*(spare.run(work, nothing) for _ in range(5)))
        assert most == [1] * 5

    run(scene)


def test_work_is_followed_by_a_pause_that_keeps_it_within_its_share_of_a_core() -> None:
    now_s = 100.0
    spent: list[float] = []

    async def scene(spare: Spare) -> None:
        nonlocal now_s
        assert spare.free

        def work() -> None:
            assert not spare.free
            end_s = time.thread_time() + 0.02
            while time.thread_time() < end_s:
                pass

        await spare.run(work, spent.append)
        assert spent[0] >= 0.02
        assert not spare.free
        now_s += 10 * spent[0] - 0.001
        assert not spare.free
        now_s += 0.002
        assert spare.free

    run(scene, core_share=0.1, clock=lambda: now_s)


def test_an_error_of_the_work_is_the_callers_and_the_next_runs() -> None:
    async def scene(spare: Spare) -> None:
        with pytest.raises(ZeroDivisionError):
            await spare.run(lambda: 1 / 0, nothing)
        assert await spare.run(lambda: 7, nothing) == 7

    run(scene)


def test_a_service_that_ends_does_not_wait_for_work_that_waits() -> None:
    ended: list[BaseException] = []

    async def scene(spare: Spare) -> None:
        async def work() -> None:
            try:
                await spare.run(lambda: None, nothing)
            except NoTime as error:
                ended.append(error)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(spare.close)
        await task

    run(scene, lambda: True)
    assert [str(error) for error in ended] == ["the service ends"]


def test_it_gives_way_to_the_threads_that_answer() -> None:
    if sys.platform != "linux":
        pytest.skip("a thread has a niceness of its own on Linux alone")

    async def scene(spare: Spare) -> None:
        def niceness() -> int:
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        assert await spare.run(niceness, nothing) >= niceness()
        assert await spare.run(niceness, nothing) >= 10

    run(scene)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01])
def test_the_lot_falls_on_its_share_and_in_no_rhythm(share: float) -> None:
    lottery = Lottery(share, random.Random(5))
    drawn = [i for i in range(20_000) if lottery.draw()]
    assert len(drawn) == pytest.approx(20_000 * share, rel=0.1)
    gaps = {after - before for before, after in itertools.pairwise(drawn)}
    assert len(gaps) > 1 or share == 1.0
    assert min(gaps) >= 0.2 / share

"""Worker threads: what queued runs together, what is dropped never runs, who dies is replaced."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from hivlp.models.errors import DeadlinePassed
from hivlp.service import batcher
from hivlp.service.batcher import Deliver, Job, MicroBatcher
from hivlp.service.errors import WorkerDied

WAIT_S = 20
Use = Callable[[MicroBatcher, threading.Event], Coroutine[Any, Any, None]]


class Ran:
    """What ran together, by payload."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def together(self, jobs: Sequence[Job[Any]], deliver: Deliver) -> None:
        self.batches.append([job.payload for job in jobs])
        for job in jobs:
            deliver(job, f"{job.payload} together")


def with_batcher(
    use: Use,
    *,
    workers: int = 1,
    max_batch: int = 4,
    together: batcher.RunTogether | None = None,
    **more: Any,
) -> None:
    """Run `use` with a batcher whose first worker is held until the event is set."""

    async def main() -> None:
        held = threading.Event()
        run = together or Ran().together
        pool = MicroBatcher(workers=workers, max_batch=max_batch, together=run, **more)
        blockers = [pool.submit(lambda _: held.wait(WAIT_S)) for _ in range(workers)]
        await until(lambda: all(w.busy_since_s is not None for w in pool._workers))
        try:
            await asyncio.wait_for(use(pool, held), WAIT_S)
        finally:
            held.set()
            await pool.stop()
            await asyncio.gather(*(one.future for one in blockers), return_exceptions=True)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def alone(_: bool) -> str:
    return "alone"


def test_what_queued_of_one_group_runs_together_up_to_the_limit_and_in_order() -> None:
    ran = Ran()

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        groups = ["a", "a", "b", "a", None, "a", "a", "b"]
        jobs = [pool.submit(alone, group=g, payload=i) for i, g in enumerate(groups)]
        held.set()
        got = await asyncio.gather(*(job.future for job in jobs))
        assert ran.batches == [[0, 1, 3, 5], [2, 7]]
        together = [f"{i} together" for i in range(8)]
        assert got == [*together[:4], "alone", together[5], "alone", together[7]]

    with_batcher(use, together=ran.together)


def test_a_batch_that_fails_fails_its_own_jobs_only() -> None:
    def broken(jobs: Sequence[Job[Any]], deliver: Deliver) -> None:
        deliver(jobs[0], "done before")
        raise ValueError("batch")

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        jobs = [pool.submit(alone, group="a") for _ in range(3)]
        other = pool.submit(alone)
        held.set()
        got = await asyncio.gather(*(j.future for j in (*jobs, other)), return_exceptions=True)
        assert got[0] == "done before"
        assert [type(one) for one in got[1:3]] == [ValueError, ValueError]
        assert got[3] == "alone"

    with_batcher(use, together=broken)


def test_what_waits_can_be_dropped_and_what_runs_can_not() -> None:
    sizes: list[int] = []
    ran: list[int] = []

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        first, second = (pool.submit(lambda _, i=i: ran.append(i)) for i in range(2))
        assert pool.drop(first)
        assert not pool.drop(first)
        held.set()
        await second.future
        assert not pool.drop(second)
        assert (first.future.cancelled(), ran) == (True, [1])

    with_batcher(use, on_queue=sizes.append)
    assert max(sizes) == 2
    assert sizes[-1] == 0


def test_a_job_whose_time_is_up_before_a_worker_is_free_never_runs() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        late = pool.submit(alone, due_s=0.0)
        patient = pool.submit(alone, due_s=float("1e12"))
        with pytest.raises(DeadlinePassed):
            await late.future
        held.set()
        assert await patient.future == "alone"

    with_batcher(use)


def die(_: bool) -> None:
    raise SystemExit  # ends a thread without a word


def test_a_worker_that_dies_fails_its_jobs_and_is_replaced() -> None:
    deaths: list[int] = []

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        doomed, after = pool.submit(die), pool.submit(alone)
        held.set()
        with pytest.raises(WorkerDied):
            await doomed.future
        assert await after.future == "alone"
        assert (pool.sick(), deaths) == (None, [1])

    with_batcher(use, on_death=lambda: deaths.append(1))


def test_while_a_dead_worker_is_not_replaced_yet_the_pool_is_sick() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        (worker,) = pool._workers
        pool.submit(die)
        held.set()
        worker.thread.join(WAIT_S)  # this blocks the loop, which would replace it
        assert "died" in str(pool.sick())
        await until(lambda: pool.sick() is None)

    with_batcher(use)


def test_workers_that_die_again_and_again_are_given_up_and_nobody_waits_for_ever() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        held.set()
        for _ in range(batcher.DEATHS):
            with pytest.raises(WorkerDied):
                await pool.submit(die).future
        assert pool.sick() is None
        last, waiting = pool.submit(die), pool.submit(alone)
        for job in (last, waiting, pool.submit(alone)):
            with pytest.raises(WorkerDied):
                await job.future
        assert "died too often" in str(pool.sick())
        with pytest.raises(WorkerDied):
            await pool.submit(alone).future

    with_batcher(use)


def test_a_worker_that_is_stuck_makes_the_pool_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        assert pool.sick() is None
        monkeypatch.setattr(batcher, "HUNG_S", 0.0)
        assert "has been at one search" in str(pool.sick())
        held.set()
        await until(lambda: pool.sick() is None)

    with_batcher(use)


def test_stopping_finishes_what_was_accepted_and_takes_no_more() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        jobs = [pool.submit(alone) for _ in range(5)]
        stopping = asyncio.create_task(pool.stop())
        await asyncio.sleep(0)
        refused = pool.submit(alone)
        held.set()
        await stopping
        assert [await job.future for job in jobs] == ["alone"] * 5
        with pytest.raises(WorkerDied):
            await refused.future

    with_batcher(use, workers=2)


def test_the_spare_core_is_asked_for_when_a_job_begins() -> None:
    spare = iter([True, True, False])

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        jobs = [pool.submit(lambda spare: spare) for _ in range(2)]
        held.set()
        assert [await job.future for job in jobs] == [True, False]

    with_batcher(use, spare=lambda: next(spare))


def test_the_wait_that_is_expected_is_what_the_queue_will_take() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        assert pool.expected_wait_s() == 0
        held.set()
        await pool.submit(lambda _: time.sleep(0.05)).future
        await until(lambda: pool._job_s > 0)
        held_again = threading.Event()
        blockers = [pool.submit(lambda _: held_again.wait(WAIT_S)) for _ in range(2)]
        await until(lambda: len(pool._waiting) == 0)
        jobs = [pool.submit(alone) for _ in range(6)]
        assert pool.expected_wait_s() == 6 * pool._job_s / 2
        held_again.set()
        await asyncio.gather(*(job.future for job in (*blockers, *jobs)))
        assert pool.expected_wait_s() == 0

    with_batcher(use, workers=2)

"""Worker threads: what queued runs together, what is dropped never runs, who dies is replaced."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from hivlp.models.errors import DeadlinePassed
from hivlp.service import batcher
from hivlp.service.batcher import Deliver, Job, MicroBatcher
from hivlp.service.errors import NotReady, WorkerDied

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


def leave(_: bool) -> None:
    raise SystemExit("not from here")


@pytest.mark.parametrize("group", [None, "a"])
def test_whatever_a_job_raises_is_its_own_and_the_worker_goes_on(group: str | None) -> None:
    def together(jobs: Sequence[Job[Any]], deliver: Deliver) -> None:
        deliver(jobs[0], GeneratorExit("one"))
        raise KeyboardInterrupt

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        (worker,) = pool._workers
        jobs = [pool.submit(leave, group=group) for _ in range(2)]
        after = pool.submit(alone)
        held.set()
        got = await asyncio.gather(*(job.future for job in jobs), return_exceptions=True)
        assert [type(one) for one in got] == [RuntimeError, RuntimeError]
        assert await after.future == "alone"
        assert (pool.sick(), pool._workers) == (None, {worker})

    with_batcher(use, together=together)


def kill_one(pool: MicroBatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker that has run something fails in code of the batcher's own."""

    def fail(_: float) -> None:
        monkeypatch.undo()
        raise SystemExit

    monkeypatch.setattr(pool, "_learn", fail)


def test_a_worker_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[int] = []

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        (worker,) = pool._workers
        kill_one(pool, monkeypatch)
        held.set()
        worker.thread.join(WAIT_S)
        assert "1 of 1 search workers died" in str(pool.sick())
        assert await pool.submit(alone).future == "alone"
        assert (pool.sick(), deaths) == (None, [1])

    with_batcher(use, on_death=lambda: deaths.append(1))


def test_what_a_worker_had_taken_when_it_died_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        def fail(_: int) -> None:
            monkeypatch.undo()
            raise SystemExit

        taken = pool.submit(alone)
        monkeypatch.setattr(pool, "_on_queue", fail)
        held.set()
        with pytest.raises(WorkerDied):
            await taken.future
        assert await pool.submit(alone).future == "alone"

    with_batcher(use)


def test_workers_that_die_again_and_again_are_replaced_more_and_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        held.set()
        await until(lambda: pool._idle == 1)
        pauses = []
        for _ in range(3):
            kill_one(pool, monkeypatch)
            await pool.submit(alone).future
            await until(lambda: not pool._workers)
            pauses.append(pool._pause_s)
            await until(lambda: bool(pool._workers))
        assert pauses == [batcher.PAUSE_S, 2 * batcher.PAUSE_S, 4 * batcher.PAUSE_S]

    with_batcher(use)


def test_a_worker_that_cannot_be_replaced_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        another, failures = pool._another, iter([True, True, False])

        def start() -> Any:
            if next(failures):
                raise RuntimeError("can't start new thread")
            return another()

        (worker,) = pool._workers
        kill_one(pool, monkeypatch)
        pool._another = start  # type: ignore[method-assign]
        held.set()
        await until(lambda: worker not in pool._workers)
        assert "died" in str(pool.sick())
        assert await pool.submit(alone).future == "alone"
        assert pool.sick() is None

    with_batcher(use)


def test_a_search_that_runs_or_waits_for_too_long_makes_the_pool_sick() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        pool._hung_s = 60.0
        pool.submit(alone)
        assert pool.sick() is None
        pool._hung_s = 0.0
        assert "has been at one search" in str(pool.sick())
        for worker in pool._workers:
            worker.busy_since_s = None
        assert "has waited for a worker" in str(pool.sick())
        held.set()
        await until(lambda: pool.sick() is None)

    with_batcher(use)


def test_a_worker_takes_no_more_than_its_share_while_others_are_idle() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        jobs = [pool.submit(alone, group="a") for _ in range(8)]
        with pool._lock:
            pool._idle = 3
            assert len(pool._pop()) == 2
            pool._idle = 0
            assert len(pool._pop()) == 6
        for job in jobs:
            job.future.cancel()
        held.set()

    with_batcher(use, max_batch=8)


def test_an_idle_worker_holds_nothing_of_what_it_ran() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        held.set()
        job = pool.submit(alone, payload=Ran())
        await job.future
        payload = weakref.ref(job.payload)
        del job
        await until(lambda: payload() is None)

    with_batcher(use)


def test_the_frames_of_an_error_are_emptied_before_it_is_told() -> None:
    class Picture:
        pass

    pictures: list[weakref.ref[Picture]] = []

    def fail(_: bool) -> None:
        picture = Picture()
        pictures.append(weakref.ref(picture))
        raise ValueError("no picture")

    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        held.set()
        job = pool.submit(fail)
        with pytest.raises(ValueError, match="no picture"):
            await job.future
        assert pictures[0]() is None

    with_batcher(use)


def test_stopping_waits_no_longer_than_it_may() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        waiting = pool.submit(alone)
        await pool.stop(within_s=0.05)
        with pytest.raises(NotReady):
            await waiting.future
        held.set()

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
        with pytest.raises(NotReady):
            await refused.future

    with_batcher(use, workers=2)


@pytest.mark.parametrize(("workers", "expected"), [(1, [False]), (2, [True, False])])
def test_a_job_is_told_whether_a_core_is_spare(workers: int, expected: list[bool]) -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        held.set()
        await until(lambda: pool._idle == workers)
        told: list[bool] = []
        go = threading.Event()

        def run(spare: bool) -> None:
            told.append(spare)
            assert go.wait(WAIT_S)

        jobs = []
        for place in range(workers):
            jobs.append(pool.submit(run))
            await until(lambda place=place: len(told) == place + 1)
        go.set()
        await asyncio.gather(*(job.future for job in jobs))
        assert told == expected

    with_batcher(use, workers=workers)


def test_the_wait_that_is_expected_is_for_what_queues_and_for_what_is_left_of_what_runs() -> None:
    async def use(pool: MicroBatcher, held: threading.Event) -> None:
        assert pool.expected_wait_s() == 0
        held.set()
        await pool.submit(lambda _: time.sleep(0.05)).future
        await until(lambda: pool._job_s > 0)
        held_again = threading.Event()
        blockers = [pool.submit(lambda _: held_again.wait(WAIT_S)) for _ in range(2)]
        await until(lambda: all(worker.busy_since_s for worker in pool._workers))
        assert pool.expected_wait_s() == 0  # nobody waits
        now = time.perf_counter
        await until(lambda: not any(w.left_s(pool._job_s, now()) for w in pool._workers))
        jobs = [pool.submit(alone) for _ in range(6)]
        assert pool.expected_wait_s() == pytest.approx(6 * pool._job_s / 2)
        worker = next(iter(pool._workers))
        since_s = worker.busy_since_s
        assert since_s is not None
        assert (worker.left_s(30.0, since_s), worker.left_s(30.0, since_s + 40)) == (30.0, 0.0)
        held_again.set()
        await asyncio.gather(*(job.future for job in (*blockers, *jobs)))
        await until(lambda: pool.expected_wait_s() == 0)

    with_batcher(use, workers=2)

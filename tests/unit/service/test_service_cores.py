"""A core to spare: of one process, or of several that tell each other what they do."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import pytest

from hivlp.service.batcher import MicroBatcher
from hivlp.service.cores import OwnCores, Seat, SharedCores

WAIT_S = 20
SPAWN = multiprocessing.get_context("spawn")


def test_a_process_alone_has_one_to_spare_while_fewer_workers_are_busy_than_it_has() -> None:
    cores = OwnCores(2)
    seen = []
    for busy in (0, 1, 2, 1):
        cores.tell(busy)
        seen.append(cores.free())
    assert seen == [True, True, False, True]


def test_processes_see_what_all_of_them_do_and_a_dead_one_does_nothing() -> None:
    shared = SharedCores(SPAWN, processes=2, count=2)
    first, second = shared.seat(0), shared.seat(1)
    first.tell(1)
    assert second.free()
    second.tell(1)
    assert not first.free()
    assert not second.free()
    shared.clear(1)
    assert first.free()


def be_busy(seat: Seat, told: Any, end: Any) -> None:
    seat.tell(1)
    told.set()
    end.wait(WAIT_S)
    seat.tell(0)


def test_a_count_is_seen_by_another_process() -> None:
    shared = SharedCores(SPAWN, processes=2, count=2)
    shared.seat(0).tell(1)
    told, end = SPAWN.Event(), SPAWN.Event()
    other = SPAWN.Process(target=be_busy, args=(shared.seat(1), told, end))
    other.start()
    try:
        assert told.wait(WAIT_S)
        assert not shared.free()
    finally:
        end.set()
        other.join(WAIT_S)
    assert shared.free()


@pytest.mark.parametrize(("neighbour_busy", "spare"), [(0, True), (1, False)])
def test_a_worker_with_idle_neighbours_may_use_their_core(neighbour_busy: int, spare: bool) -> None:
    shared = SharedCores(SPAWN, processes=2, count=2)
    shared.seat(1).tell(neighbour_busy)
    told: list[bool] = []

    async def main() -> None:
        pool = MicroBatcher(workers=1, max_batch=1, together=lambda *_: None, cores=shared.seat(0))
        await asyncio.wait_for(pool.submit(told.append).future, WAIT_S)
        await pool.stop()

    asyncio.run(main())
    assert told == [spare]
    assert shared.free()  # an idle worker is told to be idle

"""Builds and a Redis that is gone for a while: a lock says who lives, and silence alone nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hivlp.service.jobs import worker
from hivlp.service.jobs.queue import PatientQueue, QueueRunner, connected, make_queue
from hivlp.service.jobs.records import BuildRecords, Hold
from hivlp.service.jobs.settings import JobSettings
from hivlp.service.schemas import StartBuild
from hivlp.service.settings import Settings
from tests.redis_server import RedisServer, running

HEARTBEAT_S = 2
QUEUED, ACTIVE = "saq:hivlp-builds:queued", "saq:hivlp-builds:active"
INCOMPLETE = "saq:hivlp-builds:incomplete"
PATIENCE_S = 60


def settings(server: RedisServer, home: Path) -> Settings:
    jobs = {"url": server.url, "heartbeat_s": HEARTBEAT_S}
    return Settings(home=home, jobs=JobSettings.model_validate(jobs))


def submit(records: BuildRecords) -> str:
    return records.submit(StartBuild(corpus="/c"), keep=9, max_waiting=9).id


async def until(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(met):
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.02)


class Built:
    """Stands in for a build that runs until it is let go: it holds its lock, as one does."""

    def __init__(self) -> None:
        self.begun, self.cancelled = 0, 0
        self.end = asyncio.Event()

    async def run(self, records: BuildRecords, build_id: str, _: Settings) -> None:
        hold = records.hold(build_id)
        assert hold is not None
        self.begun += 1
        try:
            await self.end.wait()
            records.end(build_id, "done")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            hold.release()


@contextlib.asynccontextmanager
async def beside(*runs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These run for the length of a block."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def silent(server: RedisServer) -> Iterator[None]:
    """It answers nothing, and then what was asked meanwhile."""
    server.stop()
    yield
    server.go_on()


@contextlib.contextmanager
def gone(server: RedisServer) -> Iterator[None]:
    """It dies, and comes back with its data."""
    server.kill()
    yield
    server.start()


@pytest.mark.redis
@pytest.mark.parametrize("away", [silent, gone])
def test_a_build_goes_on_while_redis_is_away_for_longer_than_a_worker_may_be_silent(
    tmp_path: Path, redis_path: str, monkeypatch: pytest.MonkeyPatch, away: Any
) -> None:
    records, swept = BuildRecords(tmp_path / "home"), []
    sweep = PatientQueue.sweep

    async def count(queue: PatientQueue, *given: Any) -> list[str]:
        found = await sweep(queue, *given)
        swept.append(found)
        return found

    monkeypatch.setattr(PatientQueue, "sweep", count)

    async def run(server: RedisServer) -> None:
        built, given = Built(), settings(server, tmp_path / "home")
        monkeypatch.setattr(worker, "run_in_thread", built.run)
        build_id = submit(records)
        async with beside(QueueRunner(records, given).run(), worker.work(given)):
            await until(lambda: built.begun == 1)
            with away(server):
                await asyncio.sleep(HEARTBEAT_S + 1.5)
            swept.clear()
            await until(lambda: len(swept) == 2 or built.cancelled)
            assert (built.begun, built.cancelled) == (1, 0)
            built.end.set()
            with server.client() as raw:
                await until(lambda: not raw.exists(ACTIVE, QUEUED))
            assert (records.get(build_id).state, built.begun) == ("done", 1)

    with running(redis_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        asyncio.run(run(server))


def left(raw: redis.Redis, build_id: str, *, listed: bool) -> None:
    """What a worker leaves that began a build and was silent for long."""
    name = f"saq:job:hivlp-builds:{build_id}"
    kept = raw.get(name)
    assert isinstance(kept, bytes)
    job = {**json.loads(kept), "status": "active", "touched": 1, "started": 1, "attempts": 1}
    raw.set(name, json.dumps(job))
    raw.delete(QUEUED)
    if listed:
        raw.rpush(ACTIVE, name)
    else:
        raw.delete(INCOMPLETE)


def held(records: BuildRecords, build_id: str) -> Hold:
    hold = records.hold(build_id)
    assert hold is not None
    return hold


@pytest.mark.redis
def test_what_a_worker_left_is_queued_once_nobody_holds_its_lock_whatever_else_is_there(
    tmp_path: Path, redis_path: str
) -> None:
    records = BuildRecords(tmp_path)

    async def run(server: RedisServer, raw: redis.Redis) -> None:
        given, build_id = settings(server, tmp_path), submit(records)
        async with beside(QueueRunner(records, given).run()):
            await until(lambda: raw.llen(QUEUED) == 1)
        foreign = ["saq:job:hivlp-builds:bad", "saq:job:hivlp-builds:../../x"]
        raw.mset(dict.fromkeys(foreign, "no json"))
        raw.rpush(ACTIVE, *foreign, "saq:job:hivlp-builds:none")
        left(raw, build_id, listed=True)
        name, hold = f"saq:job:hivlp-builds:{build_id}", held(records, build_id)
        async with connected(make_queue(given)) as queue:
            assert await queue.sweep(1) == ["saq:job:hivlp-builds:none"]
            hold.release()
            assert await queue.sweep(1) == []  # another worker has just looked
            await until(lambda: not raw.exists("saq:hivlp-builds:sweep"))
            assert await queue.sweep(1) == [name]
            assert raw.zscore(INCOMPLETE, name)

    with running(redis_path) as server, server.client() as raw:
        asyncio.run(run(server, raw))


@pytest.mark.redis
def test_a_build_that_an_emptied_redis_knows_only_from_its_dead_worker_is_queued_again(
    tmp_path: Path, redis_path: str
) -> None:
    records = BuildRecords(tmp_path)

    async def run(server: RedisServer, raw: redis.Redis) -> None:
        build_id = submit(records)
        async with beside(QueueRunner(records, settings(server, tmp_path)).run()):
            await until(lambda: raw.llen(QUEUED) == 1)
            left(raw, build_id, listed=False)
            await until(lambda: raw.llen(QUEUED) == 1)

    with running(redis_path) as server, server.client() as raw:
        asyncio.run(run(server, raw))

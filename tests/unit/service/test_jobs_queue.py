"""Builds left to workers: what the queue in a real Redis is fed with, and what settings may say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import ValidationError

from hivlp.models.errors import MissingExtra
from hivlp.service.jobs import cli
from hivlp.service.jobs.builds import make_runner
from hivlp.service.jobs.local import LocalRunner
from hivlp.service.jobs.queue import QueueRunner, connected, make_queue
from hivlp.service.jobs.records import BuildRecords
from hivlp.service.jobs.settings import JobSettings
from hivlp.service.schemas import StartBuild
from hivlp.service.settings import Settings, SettingsError, load_settings
from tests.redis_server import RedisServer, running

QUEUED = "saq:hivlp-builds:queued"
PATIENCE_S = 20


@pytest.fixture(scope="module")
def server(redis_path: str) -> Iterator[RedisServer]:
    with running(redis_path) as server:
        yield server


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


def settings(url: str | None, home: Path, **jobs: Any) -> Settings:
    return Settings(home=home, jobs=JobSettings.model_validate({"url": url, **jobs}))


def submit(records: BuildRecords, index: str) -> str:
    asked = StartBuild(corpus="/secret/corpus", index=index)
    return records.submit(asked, keep=10, max_waiting=10).id


@contextlib.asynccontextmanager
async def feeding(records: BuildRecords, given: Settings) -> AsyncIterator[None]:
    task = asyncio.create_task(QueueRunner(records, given).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(met):
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.02)


def queued(raw: redis.Redis) -> list[str]:
    return [name.decode().rpartition(":")[2] for name in raw.lrange(QUEUED, 0, -1)]


@pytest.mark.redis
def test_what_waits_is_queued_once_oldest_first_and_by_its_id_alone(
    tmp_path: Path, server: RedisServer, raw: redis.Redis
) -> None:
    records = BuildRecords(tmp_path)
    first, second, over = (submit(records, index) for index in "abc")
    records.claim(over)
    records.end(over, "done")

    async def run() -> None:
        async with feeding(records, settings(server.url, tmp_path)):
            await until(lambda: len(queued(raw)) == 2)
            third = submit(records, "d")
            await until(lambda: len(queued(raw)) == 3)  # it has looked at all of them again
            assert queued(raw) == [first, second, third]

    asyncio.run(run())
    kept = raw.get(f"saq:job:hivlp-builds:{first}")
    assert isinstance(kept, bytes)
    job = json.loads(kept)
    assert job["kwargs"] == {"build_id": first}
    assert b"secret" not in kept


@pytest.mark.redis
def test_a_queue_that_was_emptied_is_filled_again_but_for_what_somebody_runs(
    tmp_path: Path, server: RedisServer, raw: redis.Redis
) -> None:
    records = BuildRecords(tmp_path)
    waiting, run_now = submit(records, "a"), submit(records, "b")
    hold = records.hold(run_now)
    assert hold is not None
    records.claim(run_now)

    async def run() -> None:
        async with feeding(records, settings(server.url, tmp_path)):
            for _ in range(2):
                await until(lambda: queued(raw) == [waiting])
                raw.flushall()
            await until(lambda: queued(raw) == [waiting])
            hold.release()  # whoever ran it has died
            await until(lambda: queued(raw) == [waiting, run_now])

    asyncio.run(run())


@pytest.mark.redis
def test_a_queue_that_can_not_be_asked_holds_nothing_up_for_good(
    tmp_path: Path, redis_path: str
) -> None:
    records = BuildRecords(tmp_path)
    with running(redis_path) as own:
        own.kill()

        async def run() -> None:
            async with feeding(records, settings(own.url, tmp_path)):
                build = submit(records, "a")
                await asyncio.sleep(0.1)
                own.start()
                with own.client() as raw:
                    await until(lambda: queued(raw) == [build])

        asyncio.run(run())


@pytest.mark.redis
def test_a_worker_outlives_its_redis(tmp_path: Path, redis_path: str) -> None:
    with running(redis_path) as own:

        async def run() -> None:
            async with connected(make_queue(settings(own.url, tmp_path))) as queue:
                taken = asyncio.create_task(queue.dequeue())
                await asyncio.sleep(0.1)
                own.kill()
                assert await taken is None
                assert await queue.dequeue() is None

        asyncio.run(run())


def test_who_builds_follows_from_the_settings(tmp_path: Path) -> None:
    def runner(**given: Any) -> object:
        return make_runner(Settings(home=tmp_path, **given), BuildRecords(tmp_path))

    url, cache = "unix:///queue", {"redis_url": "unix:///answers"}
    assert isinstance(runner(), LocalRunner)
    assert isinstance(runner(cache=cache), LocalRunner)
    assert isinstance(runner(jobs={"url": url}), QueueRunner)
    assert isinstance(runner(jobs={"url": url, "runner": "here"}), LocalRunner)
    assert isinstance(runner(cache=cache, jobs={"runner": "worker"}), QueueRunner)
    with pytest.raises(SettingsError, match=r"jobs\.url"):
        runner(jobs={"runner": "worker"})


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("queue", "worker"):
        monkeypatch.setitem(sys.modules, f"hivlp.service.jobs.{module}", None)
    monkeypatch.setattr(cli.logs, "set_up", lambda _: None)
    given = settings("unix:///queue", tmp_path)
    with pytest.raises(MissingExtra, match=r"hivlp\[jobs\]"):
        make_runner(given, BuildRecords(tmp_path))
    with pytest.raises(MissingExtra, match=r"hivlp\[jobs\]"):
        cli.worker(["--home", str(tmp_path)])


def test_settings_come_from_the_environment_and_keep_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIVLP_JOBS__ROOTS", '["/data/corpora", "s3://bucket/corpora/"]')
    monkeypatch.setenv("HIVLP_JOBS__URL", "redis://:hush@queue:6379/1")
    loaded = load_settings()
    assert loaded.jobs.roots == ("/data/corpora", "s3://bucket/corpora")
    assert loaded.jobs.by_workers
    assert "hush" not in repr(loaded)
    monkeypatch.setenv("HIVLP_JOBS__URL", "redis://:hush@queue:port")
    with pytest.raises(SettingsError, match=r"setting jobs\.url") as caught:
        load_settings()
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "jobs",
    [
        {"roots": ["corpora"]},
        {"roots": ["../corpora"]},
        {"roots": [""]},
        {"roots": "/data"},
        {"runner": "elsewhere"},
        {"url": "http://queue"},
        {"queue": "two words"},
        {"heartbeat_s": 0},
        {"end_s": 0},
        {"keep": 0},
        {"max_waiting": 0},
        {"root": ["/data"]},
    ],
)
def test_settings_that_can_not_be_are_refused(jobs: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JobSettings.model_validate(jobs)

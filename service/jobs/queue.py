"""A queue of builds in Redis, by SAQ, for workers that share the home.

Notable: the records are what is true, and the queue holds ids alone. A Redis that is gone, or comes
back empty, holds builds up and loses none: whatever waits and isn't queued is queued again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from saq.job import TERMINAL_STATUSES, Job, Status
from saq.queue.redis import RedisQueue

from hivlp.service.jobs.errors import NoSuchBuild
from hivlp.service.jobs.records import Build, BuildRecords, Waiting
from hivlp.service.settings import Settings, SettingsError

log = logging.getLogger("hivlp.service")

TASK = "build"
FEED_S = 0.5
AGAIN_S = 1.0
CONNECT_S = 5.0
ANY_NUMBER = 1_000_000
"""Of tries: how often a build is begun again, its record says."""
KEPT_S = 60
TROUBLE = (RedisError, OSError, TimeoutError)


class PatientQueue(RedisQueue):
    """SAQ's queue, for workers that outlive their Redis, and whose builds do.

    Notable: SAQ begins again what it heard nothing of. Of a Redis that was gone nobody was heard,
    so here the lock on a build has the last word.
    """

    def __init__(self, redis: Redis, name: str, records: BuildRecords) -> None:
        super().__init__(redis, name, dump=json.dumps, load=json.loads)
        self._records = records

    async def dequeue(self, timeout: float = 0.0, poll_interval: float = 0.0) -> Job | None:
        """The next job; None, after a while, where Redis can't be asked."""
        try:
            return await super().dequeue(timeout, poll_interval)
        except TROUBLE as error:
            log.warning("can't ask Redis for builds: %s", type(error).__name__)
            await asyncio.sleep(AGAIN_S)
            return None

    async def sweep(self, lock: int = 60, abort: float = 5.0) -> list[str]:  # noqa: ARG002
        """Queue what workers left that died; for whoever is the first in `lock` seconds."""
        if not await self.redis.set(self._sweep, 1, nx=True, ex=lock):
            return []
        swept = []
        active = await self.redis.lrange(self._active, 0, -1)  # type: ignore[misc]
        for job_id in (one.decode("utf-8", "replace") for one in active):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # none that we put there
                if await self._sweep_one(job_id):
                    swept.append(job_id)
        return swept

    async def _sweep_one(self, job_id: str) -> bool:
        job = await self._get_job_by_id(job_id)
        if job is None:
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.lrem(self._active, 0, job_id)
                pipe.zrem(self._incomplete, job_id)
                await pipe.execute()
            return True
        if job.status == Status.ACTIVE and not job.stuck:
            return False
        if await asyncio.to_thread(self._lives, job.key):
            return False
        await self.retry(job, error=None)
        return True

    def _lives(self, build_id: str) -> bool:
        """Whether somebody runs it, as far as can be told."""
        try:
            return self._records.held(self._records.get(build_id).id)
        except NoSuchBuild:
            return False
        except OSError:
            return True


def make_queue(settings: Settings) -> PatientQueue:
    """The queue that settings name; nothing is asked yet. Raises SettingsError."""
    url = settings.jobs.url or settings.cache.redis_url
    if url is None:
        raise SettingsError("setting jobs.url: builds by workers need the URL of a Redis")
    # It says jobs and connections, passwords included, at every turn, and without its Redis four
    # tracebacks a second.
    logging.getLogger("saq").setLevel(logging.CRITICAL)
    redis = Redis.from_url(
        url.get_secret_value(),
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_S,
    )
    return PatientQueue(redis, settings.jobs.queue, BuildRecords(settings.home))


@contextlib.asynccontextmanager
async def connected(queue: PatientQueue) -> AsyncIterator[PatientQueue]:
    """The queue, whose connections are closed afterwards."""
    try:
        await queue.connect()
        yield queue
    finally:
        with contextlib.suppress(*TROUBLE):
            await queue.disconnect()


class QueueRunner:
    """Sees to it that whatever waits is queued; `hivlp worker` does the rest."""

    def __init__(self, records: BuildRecords, settings: Settings) -> None:
        self._records, self._settings = records, settings
        make_queue(settings)

    async def run(self) -> None:
        """Feed the queue, for ever."""
        async with connected(make_queue(self._settings)) as queue:
            waiting, well = Waiting(self._records), True
            while True:
                try:
                    await self._feed(queue, await asyncio.to_thread(waiting.look))
                    well = True
                except TROUBLE as error:
                    if well:
                        log.warning("builds wait, Redis can't be asked: %s", type(error).__name__)
                    well = False
                await asyncio.sleep(FEED_S if well else AGAIN_S)

    async def _feed(self, queue: PatientQueue, waiting: list[Build]) -> None:
        for build in waiting:
            job = await queue.job(build.id)
            # Stuck: the worker died of one that a Redis which came back empty heard of from it.
            if job is not None and job.status not in TERMINAL_STATUSES and not job.stuck:
                continue
            if not await asyncio.to_thread(self._records.held, build.id):
                await queue.enqueue(self._job(build))

    def _job(self, build: Build) -> Job:
        known: dict[str, Any] = {"build_id": build.id}
        return Job(
            TASK,
            kwargs=known,
            key=build.id,
            timeout=0,
            heartbeat=self._settings.jobs.heartbeat_s,
            retries=ANY_NUMBER,
            retry_delay=AGAIN_S,
            ttl=KEPT_S,
        )

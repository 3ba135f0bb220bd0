"""`hivlp worker`: builds what the queue in Redis holds, one build at a time.

A worker that dies is noticed by its silence, and another one, or the same started again, goes on
with its build. Told to end, it lets go of its build, which then waits for a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from saq.job import Job
from saq.worker import Worker

from hivlp.service.jobs.errors import NoSuchBuild
from hivlp.service.jobs.local import run_in_thread
from hivlp.service.jobs.queue import TASK, TROUBLE, connected, make_queue
from hivlp.service.jobs.records import BuildRecords
from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")

SWEEP_S = 2
LATE_S = 10.0
"""How much longer than its build a worker may take to end."""


async def work(settings: Settings, on_ready: Callable[[], None] = lambda: None) -> None:
    """Build until a signal to end comes. Raises SettingsError."""
    records = BuildRecords(settings.home)

    async def build(context: dict[str, Any], *, build_id: str) -> None:
        await _build(context["job"], records, build_id, settings)

    async with connected(make_queue(settings)) as queue:
        worker: Worker[Any] = Worker(
            queue,
            [(TASK, build)],
            concurrency=1,
            timers={"sweep": SWEEP_S, "abort": 1, "schedule": 1, "worker_info": 10},
            cancellation_hard_deadline_s=settings.jobs.end_s + LATE_S,
            startup=_started(on_ready),
        )
        await worker.start()


def _started(on_ready: Callable[[], None]) -> Callable[[Any], Awaitable[None]]:
    async def started(_: Any) -> None:
        on_ready()

    return started


async def _build(job: Job, records: BuildRecords, build_id: str, settings: Settings) -> None:
    beating = asyncio.create_task(_beat(job, settings.jobs.heartbeat_s / 4))
    try:
        await run_in_thread(records, build_id, settings)
    except NoSuchBuild:
        log.error("build %s is not in %s: is it the service's home?", build_id, records.folder)
    except Exception:
        log.exception("build %s can't be run now", build_id)
        raise
    finally:
        beating.cancel()


async def _beat(job: Job, every_s: float) -> None:
    """Say again and again that this worker lives. Without Redis nobody hears it, or misses it."""
    while True:
        with contextlib.suppress(*TROUBLE):
            await job.update()
        await asyncio.sleep(every_s)

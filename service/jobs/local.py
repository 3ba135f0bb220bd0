"""Builds beside the service, one at a time, oldest first; and the thread that one is run in."""

from __future__ import annotations

import asyncio
import logging
import threading

from hivlp.service.jobs.execution import Means, run_build
from hivlp.service.jobs.records import BuildRecords, Waiting
from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")

LOOK_S = 0.25
TROUBLE_S = 5.0


async def run_in_thread(records: BuildRecords, build_id: str, settings: Settings) -> None:
    """`run_build`; when cancelled, the build is let go of first. Raises NoSuchBuild, OSError."""
    stop = threading.Event()
    means = Means(records, settings.home, settings.jobs.end_s, stop)
    running = asyncio.create_task(asyncio.to_thread(run_build, means, build_id))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        raise


class LocalRunner:
    """Runs builds of this machine's home without a queue: what waits is in the records."""

    def __init__(self, records: BuildRecords, settings: Settings) -> None:
        self._records, self._settings = records, settings

    async def run(self) -> None:
        """Build what waits, for ever. What a process left that died is begun again."""
        waiting = Waiting(self._records)
        while True:
            builds = await asyncio.to_thread(waiting.look)
            if not builds:
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await run_in_thread(self._records, builds[0].id, self._settings)
            except Exception:
                log.exception("build %s can't be run for %g s", builds[0].id, TROUBLE_S)
                await asyncio.sleep(TROUBLE_S)

"""Builds in a serving process: what is asked of them, and who runs them.

Of the processes that serve one home, one holds the lock that makes it the runner: it builds, or
feeds the queue of `hivlp worker`, and counts. Where it dies, the next one that looks takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from prometheus_client import CollectorRegistry

from hivlp.models.errors import MissingExtra
from hivlp.service.jobs.errors import BuildsOff
from hivlp.service.jobs.local import LocalRunner
from hivlp.service.jobs.metrics import BuildMetrics, Tally
from hivlp.service.jobs.places import placed
from hivlp.service.jobs.records import Build, BuildRecords, Hold
from hivlp.service.schemas import StartBuild
from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")

ELECT_S = 1.0
COUNT_S = 1.0
TROUBLE_S = 5.0


class Runner(Protocol):
    """Has builds run, here or elsewhere."""

    async def run(self) -> None:
        """Have what waits built, for ever; when cancelled, let go of what is being built."""


class Builds:
    """The builds of this service's home. Raises MissingExtra, SettingsError."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self.records = BuildRecords(settings.home)
        self._settings = settings
        self._metrics = BuildMetrics(registry)
        self._on = bool(settings.jobs.roots)
        self._runner = make_runner(settings, self.records) if self._on else None

    def start(self, asked: StartBuild) -> Build:
        """Have this built; the same that was asked for before is one build. Blocking.

        Raises BuildsOff, InputError, BuildUnderWay, KeyReused, TooManyBuilds, OSError.
        """
        jobs = self._settings.jobs
        if not self._on:
            raise BuildsOff
        where = placed(asked, self._settings.home, jobs.roots)
        return self.records.submit(where, keep=jobs.keep, max_waiting=jobs.max_waiting)

    def watches(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What must run as long as the app does, by name."""
        return {"looking after builds": self._look_after} if self._on else {}

    async def _look_after(self) -> None:
        """Be the runner whenever there is none. Trouble with builds is never one of searches."""
        said = ""
        while True:
            try:
                hold = await asyncio.to_thread(self.records.become_runner)
                if hold is not None:
                    await self._be_runner(hold)
                await asyncio.sleep(ELECT_S)
            except Exception as error:
                if repr(error) != said:
                    log.exception("builds are not looked after; tried again every %g s", TROUBLE_S)
                said = repr(error)
                await asyncio.sleep(TROUBLE_S)

    async def _be_runner(self, hold: Hold) -> None:
        assert self._runner is not None
        try:
            tally = await asyncio.to_thread(Tally, self.records, self._metrics)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._runner.run())
                group.create_task(_count(tally))
        finally:
            hold.release()


async def _count(tally: Tally) -> None:
    """For ever: what can't be read now is counted later, and ends no build that runs."""
    said = ""
    while True:
        try:
            await asyncio.to_thread(tally.look)
            said = ""
        except OSError as error:
            if str(error) != said:
                log.warning("builds can't be counted now: %s", error)
            said = str(error)
        await asyncio.sleep(COUNT_S)


def make_runner(settings: Settings, records: BuildRecords) -> Runner:
    """The runner that settings ask for. Raises MissingExtra where it needs saq, SettingsError."""
    if not settings.jobs.by_workers:
        return LocalRunner(records, settings)
    try:
        from hivlp.service.jobs.queue import QueueRunner
    except ModuleNotFoundError as error:
        raise MissingExtra("saq", "jobs") from error
    return QueueRunner(records, settings)

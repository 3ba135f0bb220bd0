"""Builds that run and can't be counted go on, and are counted later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from hivlp.service.jobs import builds
from hivlp.service.jobs.builds import Builds
from hivlp.service.jobs.records import BuildRecords
from hivlp.service.jobs.settings import JobSettings
from hivlp.service.schemas import StartBuild
from hivlp.service.settings import Settings

PATIENCE_S = 30


class Running:
    """A runner with a build that takes until it is told to end."""

    begun = ended = 0

    async def run(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


def submit(records: BuildRecords, index: str) -> str:
    return records.submit(StartBuild(corpus="/c", index=index), keep=9, max_waiting=9).id


async def until(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(met):
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


def test_a_record_that_can_not_be_read_ends_no_build_and_each_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builds, "COUNT_S", 0.01)
    registry, running = CollectorRegistry(), Running()
    looked_after = Builds(Settings(home=tmp_path, jobs=JobSettings(roots=("/c",))), registry)
    looked_after._runner = running
    records = looked_after.records

    def counted() -> float | None:
        return registry.get_sample_value("hivlp_build_total", {"result": "done"})

    async def run() -> None:
        (watch,) = looked_after.watches().values()
        watching = asyncio.ensure_future(watch())
        await until(lambda: running.begun == 1)
        first, second = submit(records, "a"), submit(records, "b")
        file = records.folder / second / "build.json"
        aside = file.rename(file.with_suffix(".aside"))
        file.mkdir()  # reading it is an OSError, as it is where no file can be opened
        records.end(first, "done")
        await until(lambda: "can't be counted" in caplog.text)
        assert (running.ended, counted()) == (0, 0)
        file.rmdir()
        aside.rename(file)
        records.end(second, "done")
        await until(lambda: counted() == 2)
        assert (running.begun, running.ended) == (1, 0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())
    assert caplog.text.count("can't be counted") == 1

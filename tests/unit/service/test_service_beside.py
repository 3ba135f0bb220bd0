"""A version open beside those that are served: what it follows, and when it is let go of."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.errors import SnapshotMissing
from hivlp.index.snapshot.names import ERASED
from hivlp.service import beside
from hivlp.service.beside import Beside
from hivlp.service.sampling import Left
from hivlp.service.serving import ServedModel, ServedVersion
from tests.unit.service.fakes_service import FakeSearcher, fake_manifest

PATIENCE_S = 30
OLD, NEW = "20260101T000000-000000", "20260202T000000-000000"


class Home:
    """An index of versions, of which one is active; and what was opened of it."""

    def __init__(self, folder: Path) -> None:
        self.active, self.gone = OLD, set[str]()
        self.opened: list[tuple[str, ServedVersion | None]] = []
        self.served: list[ServedVersion] = []
        self.ready: list[ServedVersion] = []
        self._folder = folder
        self.store: Any = self

    def current(self, _: str) -> str:
        return self.active

    def folder(self, _: str) -> Path:
        return self._folder

    def open(
        self, name: str, version: str | None = None, like: ServedVersion | None = None
    ) -> ServedVersion:
        wanted = version or self.active
        if wanted in self.gone:
            raise SnapshotMissing(name, wanted, "no such version")
        searcher = FakeSearcher()
        searcher.info = replace(searcher.info, version=wanted)
        served = ServedVersion(
            searcher, ServedModel(fake_manifest(), {}), close_with=searcher.close
        )
        self.opened.append((wanted, like))
        self.served.append(served)
        return served

    def make_ready(self, served: ServedVersion) -> None:
        self.ready.append(served)

    def closed(self) -> list[bool]:
        return [served.searcher.closed for served in self.served]  # type: ignore[attr-defined]

    def erase(self) -> None:
        """As an erasure says of itself, later than whatever is open."""
        (self._folder / ERASED).touch()
        later = time.time() + 5 + len(self.opened)
        os.utime(self._folder / ERASED, (later, later))


@asynccontextmanager
async def followed(home: Home, version: str | None) -> AsyncIterator[Beside]:
    other = Beside("default", version, 0.005, lambda _: None)
    with ThreadPoolExecutor(1) as loading:
        task = asyncio.create_task(other.follow(home, loading))
        try:
            await until(lambda: other.open)
            yield other
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    other.close()


async def until(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.005)


def compared(other: Beside) -> str:
    with other.lease() as served:
        return served.searcher.info.version


def test_where_no_version_is_named_the_active_one_is_followed(tmp_path: Path) -> None:
    home = Home(tmp_path)

    async def run() -> None:
        async with followed(home, None) as other:
            with other.lease() as served:
                home.active = NEW
                await until(lambda: compared(other) == NEW)
                assert served.searcher.info.version == OLD
                assert home.closed() == [False, False]  # until whoever compares with it is done
            assert home.closed() == [True, False]
        assert home.closed() == [True, True]

    asyncio.run(run())
    assert home.opened == [(OLD, None), (NEW, home.served[0])]
    assert home.ready == home.served


def test_a_version_that_is_named_stays_whatever_is_active(tmp_path: Path) -> None:
    home = Home(tmp_path)

    async def run() -> None:
        async with followed(home, OLD) as other:
            home.active = NEW
            await asyncio.sleep(0.05)
            assert compared(other) == OLD

    asyncio.run(run())
    assert home.opened == [(OLD, None)]


def test_once_items_are_erased_what_is_not_active_is_let_go_of_and_opened_again_if_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    home.active = NEW

    async def run() -> None:
        async with followed(home, OLD) as other:
            home.erase()
            await until(lambda: home.closed() == [True])
            with pytest.raises(Left, match="not_open"):
                compared(other)
            assert len(home.opened) == 1  # whoever erases has time to remove it
            monkeypatch.setattr(beside, "RETRY_S", 0.01)
            other._again_s = 0.0
            await until(lambda: other.open)
            assert compared(other) == OLD
            home.gone.add(OLD)
            home.erase()
            await until(lambda: "no such version" in caplog.text)
            assert not other.open

    asyncio.run(run())
    assert caplog.text.count("no such version") == 1


def test_where_none_is_named_an_erasure_leaves_the_one_that_it_made(tmp_path: Path) -> None:
    home = Home(tmp_path)

    async def run() -> None:
        async with followed(home, None) as other:
            home.erase()  # said first, and then the version without the items becomes active
            await asyncio.sleep(0.05)
            assert compared(other) == OLD
            home.active = NEW
            await until(lambda: other.open and compared(other) == NEW)

    asyncio.run(run())
    assert home.opened == [(OLD, None), (NEW, None)]
    assert home.closed() == [True, True]

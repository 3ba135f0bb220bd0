"""Tasks that must run for ever: begun again when they fail, named when they fail too often."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hivlp.service import tasks
from hivlp.service.app import create_app
from hivlp.service.tasks import Supervisor
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.001)


async def until_dead(watched: Supervisor) -> None:
    async with asyncio.timeout(10):
        while not watched.dead:
            await asyncio.sleep(0.001)


def test_a_task_that_fails_is_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> int:
        watched, begun, running = Supervisor(), 0, asyncio.Event()

        async def run() -> None:
            nonlocal begun
            begun += 1
            if begun == 1:
                raise RuntimeError("once")
            running.set()
            await asyncio.Event().wait()

        watched.start("the task", run)
        await asyncio.wait_for(running.wait(), 10)
        assert watched.dead == []
        await watched.stop()
        assert watched.dead == []
        return begun

    assert asyncio.run(check()) == 2
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.message == "the task failed"


@pytest.mark.parametrize("ends", [False, True])
def test_a_task_that_keeps_failing_is_given_up_by_name(ends: bool) -> None:
    async def check() -> int:
        watched, begun = Supervisor(), 0

        async def run() -> None:
            nonlocal begun
            begun += 1
            if not ends:
                raise RuntimeError("always")

        watched.start("the task", run)
        await until_dead(watched)
        assert watched.dead == ["the task"]
        await watched.stop()
        return begun

    assert asyncio.run(check()) == tasks.ATTEMPTS + 1


def test_a_task_that_somebody_cancelled_is_dead() -> None:
    async def check() -> None:
        watched = Supervisor()
        watched.start("the task", asyncio.Event().wait)
        await asyncio.sleep(0)
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "the task")
        task.cancel()
        await until_dead(watched)

    asyncio.run(check())


def test_an_app_with_a_dead_task_is_not_ready_and_names_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(SMALL, load=world.load)
    with serving(app) as client:
        assert client.get("/readyz").status_code == 200
        monkeypatch.setattr(app.state.hivlp._tasks, "_dead", {"the watcher"})
        answer = client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        assert "the watcher" in answer.json()["error"]["message"]
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert client.post("/search/text", json={"query": "red"}).status_code == 200

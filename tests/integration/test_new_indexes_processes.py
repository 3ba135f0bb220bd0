"""A new index under `hivlp serve --processes 2`: both serve it, and whichever takes one's place."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hivlp.service.client import Client, NotFound, Retries
from tests.integration.new_index import NEW, NewIndex
from tests.integration.served_process import alive, children, served
from tests.integration.test_serve_processes import figure, figures

TWO = {"HIVLP_PROCESSES": "2", "HIVLP_DRAIN_S": "0", "HIVLP_CHANGES__POLL_S": "0.05"}
WRONG = json.dumps({"query": "red", "k": 3, "expected": ["nowhere"]})
ASKED = 8
STOP_S = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> NewIndex:
    return NewIndex.make(tmp_path_factory.mktemp("new"))


@pytest.fixture
def new(made: NewIndex, tmp_path: Path) -> NewIndex:
    return made.copy(tmp_path)


def until(check: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def answers(url: str) -> set[str]:
    """What searches of the new index get, each over a connection of its own: versions, or codes."""
    body = {"query": "red", "index": NEW}
    asked = [httpx.post(f"{url}/search/text", json=body, timeout=30).json() for _ in range(ASKED)]
    return {str(one["error"]["code"] if "error" in one else one["snapshot"]) for one in asked}


@contextmanager
def held(pid: int) -> Iterator[None]:
    """A process that takes no connection for the length of a block: another one takes them all."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def replace_one(process: int, url: str) -> tuple[int, int]:
    """Kill one of two, and wait for the one in its place: that one, and the other."""
    doomed, stays = children(process)
    os.kill(doomed, signal.SIGKILL)
    until(lambda: not alive(doomed) and len(children(process)) == 2)
    until(lambda: figure(figures(url), "hivlp_processes") == 2)
    (fresh,) = set(children(process)) - {stays}
    return fresh, stays


def test_both_serve_it_once_it_is_activated_and_so_does_one_in_the_place_of_a_dead_one(
    new: NewIndex,
) -> None:
    first, second = new.versions
    with served(new.store.home, **TWO) as (process, url), Client(url) as client:
        new.arrive()
        assert answers(url) == {"no_such_index"}
        assert client.activate(first, index=NEW).state == "staging"
        until(lambda: client.activation(index=NEW).state == "active")
        until(lambda: {p.state for p in client.activation(index=NEW).processes} == {"serving"})
        done = client.activation(index=NEW)
        assert sorted(p.pid for p in done.processes) == children(process.pid)
        assert answers(url) == {first}

        fresh, stays = replace_one(process.pid, url)
        with held(stays):
            assert answers(url) == {first}
        client.activate(second, index=NEW)
        until(lambda: {p.state for p in client.activation(index=NEW).processes} == {"serving"})
        for other in (fresh, stays):
            with held(other):
                assert answers(url) == {second}
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0


def test_one_that_both_could_not_take_up_is_not_served_by_a_third_either(new: NewIndex) -> None:
    first, _ = new.versions
    with (
        served(new.store.home, **TWO) as (process, url),
        Client(url, retries=Retries(tries=1)) as client,
    ):
        with pytest.raises(NotFound):
            client.activation(index=NEW)
        new.arrive(active=first, canary=WRONG)

        def failed() -> bool:
            try:
                return client.activation(index=NEW).state == "failed"
            except NotFound:
                return False

        until(failed)
        assert "canary 0" in str(client.activation(index=NEW).reason)
        _, stays = replace_one(process.pid, url)
        with held(stays):
            assert answers(url) == {"no_such_index"}
            assert httpx.get(f"{url}/readyz").status_code == 200
            listed = httpx.get(f"{url}/indexes").json()["indexes"]
            assert [index["name"] for index in listed] == ["default"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0

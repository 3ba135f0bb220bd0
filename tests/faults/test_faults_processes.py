"""One of two serving processes is killed under load: few notice, and soon nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.integration.served_home import make_corpus, make_home
from tests.integration.served_process import children, served

CLIENTS = 4
BACK_S = 30.0
AFTER = 300
"""Requests after both serve again, of which none may fail."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    return make_home(tmp_path_factory.mktemp("home"), corpus)


class Load:
    """Clients that search without a pause, and what became of each request, by phase."""

    def __init__(self, url: str) -> None:
        self.phase = "before"
        self.seen: Counter[tuple[str, object]] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, n)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=url, timeout=30) as client:
            while not self._stop.is_set():
                turn += 1
                began = self.phase
                body = {"query": f"red {number} {turn % 50}", "k": 3}
                try:
                    became: object = client.post("/search/text", json=body).status_code
                except httpx.TransportError as error:
                    became = type(error).__name__
                with self._lock:  # what was under way when the process was killed fails by that
                    self.seen[self.phase if began == "before" else began, became] += 1

    def count(self, phase: str) -> int:
        with self._lock:
            return sum(number for (when, _), number in self.seen.items() if when == phase)

    def failed(self, phase: str) -> Counter[object]:
        with self._lock:
            seen = {became: n for (when, became), n in self.seen.items() if when == phase}
        return Counter({became: n for became, n in seen.items() if became != 200})

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def figure(url: str, name: str) -> float:
    """A figure of all processes, as whichever is asked tells."""
    for line in httpx.get(f"{url}/metrics", timeout=30, verify=False).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return 0.0


def wait(load: Load, phase: str, requests: int) -> None:
    end = time.monotonic() + 60
    while load.count(phase) < requests:
        assert time.monotonic() < end, load.seen
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_at_least_99_percent_succeed_while_one_of_two_is_killed_and_all_once_it_is_back(
    home: Path,
) -> None:
    with served(home, HIVLP_PROCESSES="2", HIVLP_DRAIN_S="0") as (process, url):
        load = Load(url)
        try:
            wait(load, "before", 100)
            doomed = children(process.pid)[0]
            load.phase = "during"
            os.kill(doomed, signal.SIGKILL)
            end = time.monotonic() + BACK_S
            while doomed in children(process.pid) or figure(url, "hivlp_processes") < 2:
                assert time.monotonic() < end, "it never came back"
                time.sleep(0.05)
            wait(load, "during", 100 * CLIENTS)
            load.phase = "after"
            wait(load, "after", AFTER)
        finally:
            load.end()
    assert load.failed("before") == {}
    during = load.failed("during")
    assert sum(during.values()) <= load.count("during") / 100, during
    assert not any(isinstance(status, int) for status in during), during  # none was answered wrong
    assert load.failed("after") == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_can_not_be_loaded_again_is_tried_again_while_the_other_serves(
    home: Path,
) -> None:
    artifact, hidden = home / "artifacts", home / "hidden"
    with served(home, HIVLP_PROCESSES="2", HIVLP_DRAIN_S="0") as (process, url):
        artifact.rename(hidden)
        try:
            doomed, stays = children(process.pid)
            load = Load(url)
            try:
                load.phase = "during"
                os.kill(doomed, signal.SIGKILL)
                end = time.monotonic() + 90
                while figure(url, "hivlp_process_deaths_total") < 3:
                    assert time.monotonic() < end, "it was not tried again"
                    time.sleep(0.1)
                load.phase = "after"
                wait(load, "after", AFTER)
            finally:
                load.end()
        finally:
            hidden.rename(artifact)
        assert load.failed("after") == {}  # what can't be loaded never took a connection
        assert stays in children(process.pid)
        end = time.monotonic() + 90
        while figure(url, "hivlp_processes") < 2:
            assert time.monotonic() < end, "it never came back"
            time.sleep(0.1)

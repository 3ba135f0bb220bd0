"""Many activations and rollbacks: under load no request fails or mixes two; memory stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.snapshot.activation import UNVERIFIED
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.client import Client
from tests.integration.served_process import children, served
from tests.integration.three_versions import make_three_versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TURNS = 20
SWAPS = 50
WARM_SWAPS = 10
DRIFT = 0.10
CLIENTS = 3
TWO = {"HIVLP_PROCESSES": "2", "HIVLP_DRAIN_S": "0", "HIVLP_CHANGES__POLL_S": "0.05"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: all pictures, half of them, and all by a model of other weights and dims."""
    return make_three_versions(tmp_path_factory.mktemp("load"), name="other", dims=(4, 12))


class Answers:
    """Clients that search without a pause, and whatever was wrong with an answer."""

    def __init__(self, url: str, store: SnapshotStore) -> None:
        versions = store.versions("default")
        manifests = {version: store.manifest("default", version) for version in versions}
        self.items = {v: m.items for v, m in manifests.items()}
        self.models = {v: (m.model, len(m.levels)) for v, m in manifests.items()}
        self.seen: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, n)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=url, timeout=30, verify=False) as client:
            while not self._stop.wait(0.005):
                turn += 1
                body = {"query": f"red {number} {turn % 7}", "k": 100, "plan": "exact"}
                # A connection for each: whichever process takes it.
                answer = client.post("/search/text", json=body, headers={"Connection": "close"})
                self._judge(answer)

    def _judge(self, answer: httpx.Response) -> None:
        found = answer.json()
        if answer.status_code != 200:
            self.wrong.append(found)
            return
        version = found["snapshot"]
        self.seen[version] += 1
        whole = (found["returned"], len({hit["id"] for hit in found["hits"]}))
        model = (found["model"], found["exit_level"])
        if whole != (self.items[version],) * 2 or model != self.models[version]:
            self.wrong.append(found)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def until(check: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def test_no_request_fails_and_each_answer_is_of_one_version_while_versions_change(
    home: Path,
) -> None:
    store = SnapshotStore(home)
    versions = store.versions("default")
    with served(home, **TWO) as (process, url), Client(url) as client:
        answers = Answers(url, store)
        try:
            for turn in range(TURNS):
                before = store.current("default")
                if turn % 4 == 3:
                    wanted = client.rollback().snapshot
                else:
                    wanted = versions[(versions.index(before) + 1) % 3]
                    client.activate(wanted)
                until(lambda: client.activation().state != "staging")
                done = client.activation()
                assert (done.state, done.snapshot) == ("active", wanted), done
                until(lambda: {p.state for p in client.activation().processes} == {"serving"})
                assert len(client.activation().processes) == 2
                assert client.ready()
        finally:
            answers.end()
        assert answers.wrong == []
        assert set(answers.seen) == set(versions)

        # One is killed while it stages: the other doesn't wait for it, and its heir catches up.
        wanted = next(v for v in versions if v != store.current("default"))
        client.activate(wanted)
        doomed = children(process.pid)[0]
        os.kill(doomed, signal.SIGKILL)
        until(lambda: client.activation().state != "staging")
        if client.activation().state == "failed":  # it was the one that hashes the files
            assert client.activation().reason == UNVERIFIED
            client.activate(wanted)
        until(lambda: client.activation().state == "active")
        until(lambda: len(children(process.pid)) == 2 and doomed not in children(process.pid))
        until(lambda: len(client.activation().processes) == 2)
        with httpx.Client(base_url=url, timeout=30, verify=False) as http:
            for _ in range(10):
                body = {"query": "red", "k": 1}
                answer = http.post("/search/text", json=body, headers={"Connection": "close"})
                assert answer.json()["snapshot"] == wanted


def resident(pid: int) -> int:
    """Resident memory in KiB, mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def test_memory_stays_over_fifty_swaps_also_between_models(home: Path) -> None:
    store = SnapshotStore(home)
    versions = store.versions("default")
    with (
        served(home, HIVLP_DRAIN_S="0", HIVLP_CHANGES__POLL_S="0.02") as (process, url),
        Client(url) as client,
    ):

        def swap() -> None:
            before = store.current("default")
            wanted = versions[(versions.index(before) + 1) % 3]
            client.activate(wanted)
            until(lambda: client.search_text("red", k=1).snapshot == wanted)
            until(lambda: client.activation().state == "active")

        for _ in range(WARM_SWAPS):
            swap()
        at_first = resident(process.pid)
        for _ in range(SWAPS):
            swap()
        drift = resident(process.pid) / at_first - 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert drift < DRIFT, f"{drift:.1%} more than the {at_first} KiB at first"

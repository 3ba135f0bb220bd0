"""Versions that take each other's place while searches go on: none fails, none mixes two."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.app import create_app
from hivlp.service.settings import ChangeSettings, Settings
from tests.integration.three_versions import make_three_versions
from tests.unit.service.serving_app import serving

TURNS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: built, built of half the corpus, and built by another model."""
    return make_three_versions(tmp_path_factory.mktemp("swaps"))


def serve(home: Path) -> Settings:
    return Settings(home=home, changes=ChangeSettings(poll_s=0.02))


def wait_for(client: httpx.Client, version: str, timeout_s: float = 30.0) -> None:
    until(lambda: client.get("/health").json()["indexes"]["default"] == version, timeout_s)


def until(check: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def test_no_search_fails_and_each_answer_is_of_one_version_whole(home: Path) -> None:
    store = SnapshotStore(home)
    versions = store.versions("default")
    store.activate("default", versions[0])
    sizes = {v: store.manifest("default", v).items for v in versions}
    names = {v: store.manifest("default", v).model for v in versions}
    seen: Counter[str] = Counter()
    wrong: list[object] = []
    stop = threading.Event()

    def ask(client: httpx.Client, number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            body = {"query": f"red {number} {turn % 7}", "k": 100, "plan": "exact"}
            answer = client.post("/search/text", json=body)
            found = answer.json()
            if answer.status_code != 200:
                wrong.append(found)
                return
            version = found["snapshot"]
            seen[version] += 1
            if (found["returned"], found["model"]) != (sizes[version], names[version]):
                wrong.append(found)

    with serving(create_app(serve(home))) as client:
        threads = [threading.Thread(target=ask, args=(client, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        served, swaps = versions[0], 0
        for turn in range(TURNS):
            version = versions[(turn + 1) % 3]
            if turn % 4 == 3:
                version = store.rollback("default")
            else:
                store.activate("default", version)
            wait_for(client, version)
            swaps += version != served
            served = version
        stop.set()
        for thread in threads:
            thread.join()
        metrics = client.get("/metrics").text
    assert wrong == []
    assert set(seen) == set(versions)
    assert swaps > TURNS / 2
    assert f'hivlp_swap_total{{result="done"}} {swaps}.0' in metrics
    assert metrics.count("hivlp_snapshot_info{") == 1


def test_a_version_without_a_model_is_not_served_and_the_one_before_goes_on(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(home)
    first, _, other = store.versions("default")
    store.activate("default", first)
    hidden = home / "hidden"
    with serving(create_app(serve(home))) as client:
        (home / "artifacts" / "other").rename(hidden)
        try:
            with caplog.at_level(logging.ERROR, logger="hivlp.service"):
                store.activate("default", other)
                until(lambda: "goes on serving" in caplog.text)
            assert client.get("/health").json()["indexes"]["default"] == first
            assert client.get("/readyz").status_code == 200
            failed = 'hivlp_swap_total{result="failed"} 1.0'
            assert failed in client.get("/metrics").text
        finally:
            hidden.rename(home / "artifacts" / "other")
        store.activate("default", first)
        assert client.post("/search/text", json={"query": "red"}).status_code == 200


def test_a_corrupt_version_is_quarantined_when_it_is_made_active(home: Path) -> None:
    store = SnapshotStore(home)
    first, second, _ = store.versions("default")
    store.activate("default", first)
    with serving(create_app(serve(home))) as client:
        file = store.path("default", second) / "items.arrow"
        whole = file.read_bytes()
        store.activate("default", second)
        wait_for(client, second)
        store.activate("default", first)
        wait_for(client, first)
        pointer = home / "indexes" / "default" / "CURRENT"
        try:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            pointer.write_text(pointer.read_text().replace(first, "X").replace(second, first)
                               .replace("X", second))  # fmt: skip
            until(lambda: len(store.quarantine("default").entries()) == 1)
            assert client.get("/health").json()["indexes"]["default"] == first
            assert client.post("/search/text", json={"query": "red"}).status_code == 200
        finally:
            file.write_bytes(whole)
            store.verify("default", second)
            store.activate("default", first)


def test_many_swaps_leave_nothing_open_behind(home: Path) -> None:
    store = SnapshotStore(home)
    first, second, _ = store.versions("default")
    store.activate("default", first)

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/indexes/default/")

    with serving(create_app(serve(home))) as client:
        for version in (second, first):  # whatever is made once
            store.activate("default", version)
            wait_for(client, version)
        files, maps = open_files(), mapped()
        for turn in range(20):
            version = (second, first)[turn % 2]
            store.activate("default", version)
            wait_for(client, version)
        until(lambda: open_files() <= files + 2 and mapped() <= maps + 2, 10.0)
        assert not store.in_use("default", second)

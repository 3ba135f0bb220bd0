"""Versions that take each other's place while loading them is slow, or fails."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service import loading, swap
from hivlp.service.app import create_app
from hivlp.service.loading import Loader
from hivlp.service.settings import ChangeSettings, Settings
from hivlp.service.state import ServingState
from hivlp.service.swap import Swapper
from tests.integration.three_versions import make_three_versions
from tests.unit.service.serving_app import serving

ROWS = "text/rows.npy"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: built, built of half the corpus, and built by another model."""
    return make_three_versions(tmp_path_factory.mktemp("swaps"))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> SnapshotStore:
    shutil.copytree(made, tmp_path / "home")
    return SnapshotStore(tmp_path / "home")


def settings(store: SnapshotStore, **more: Any) -> Settings:
    return Settings(home=store.home, changes=ChangeSettings(poll_s=0.02, publish_s=0.0), **more)


def served(client: httpx.Client) -> str:
    return str(client.get("/health").json()["indexes"]["default"])


def until(check: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


class SlowWarmth:
    """Versions get ready only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.most, self._now = 0, 0
        ready = Loader.make_ready

        def slow(loader: Loader, version: Any) -> None:
            self._now += 1
            self.most = max(self.most, self._now)
            self.begun.set()
            assert self.go_on.wait(20)
            ready(loader, version)
            self._now -= 1

        monkeypatch.setattr(Loader, "make_ready", slow)


def swaps(client: httpx.Client, result: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f'hivlp_swap_total{{result="{result}"}}'):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.parametrize("error", [RuntimeError("once"), MemoryError("once")])
def test_an_error_that_nobody_thought_of_does_not_end_the_watching(
    store: SnapshotStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    monkeypatch.setattr(swap, "RETRY_S", 0.1)
    first, second, _ = store.versions("default")
    load, errors = Swapper.load, [error]

    def once(self: Swapper, name: str) -> None:
        if errors:
            raise errors.pop()
        load(self, name)

    monkeypatch.setattr(Swapper, "load", once)
    with serving(create_app(settings(store))) as client:
        store.activate("default", second)
        until(lambda: served(client) == second)
        assert client.get("/readyz").status_code == 200
        assert swaps(client, "failed") == 1.0
        assert client.get("/indexes/default/snapshots").json()["active"] != first
    (record,) = [r for r in caplog.records if "goes on serving" in r.message]
    assert record.exc_info is not None
    assert type(error).__name__ in record.message


@pytest.mark.parametrize("content", [None, "{"])
def test_a_pointer_that_is_gone_or_unreadable_is_told_once(
    store: SnapshotStore, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    first, second, _ = store.versions("default")
    pointer = store.folder("default") / "CURRENT"
    with serving(create_app(settings(store))) as client:
        whole = pointer.read_text()
        if content is None:
            pointer.unlink()
        else:
            replace_text(pointer, content)
        until(lambda: swaps(client, "failed") >= 1.0)
        time.sleep(0.5)  # some twenty looks
        assert swaps(client, "failed") == 1.0
        assert served(client) == first
        replace_text(pointer, whole)
        store.activate("default", second)
        until(lambda: served(client) == second)
    said = [r for r in caplog.records if "goes on serving" in r.message]
    assert len(said) == 1
    assert said[0].levelno == logging.ERROR


def test_what_was_superseded_while_it_loaded_is_dropped(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = store.versions("default")
    with serving(create_app(settings(store))) as client:
        warmth = SlowWarmth(monkeypatch)
        store.activate("default", second)
        assert warmth.begun.wait(20)
        store.activate("default", first)
        answer = client.put("/items/kept", json={"texts": ["x"]})
        assert (answer.status_code, answer.json()["searchable"]) == (200, True)
        before = swaps(client, "done")
        warmth.go_on.set()
        until(lambda: not store.in_use("default", second))
        for _ in range(50):
            assert client.get("/items/kept").status_code == 200
            assert served(client) == answer.json()["snapshot"]
            time.sleep(0.005)
        assert swaps(client, "done") == before  # not even for a moment


def test_changes_made_while_a_version_loads_are_served_with_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, _ = store.versions("default")
    with serving(create_app(settings(store))) as client:
        warmth = SlowWarmth(monkeypatch)
        store.activate("default", second)
        assert warmth.begun.wait(20)
        answer = client.put("/items/early", json={"texts": ["x"]})
        assert (answer.status_code, answer.json()["searchable"]) == (200, False)
        warmth.begun.clear()
        warmth.go_on.set()
        until(lambda: served(client) == answer.json()["snapshot"])
        assert client.get("/items/early").status_code == 200
        assert not warmth.begun.is_set()  # its levels were not loaded a second time


def test_a_change_for_another_model_is_told_what_keeps_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, other = store.versions("default")
    only_tiny = store.home / "artifacts" / "tiny"
    with serving(create_app(settings(store, artifact=only_tiny))) as client:
        store.activate("default", other)
        until(lambda: swaps(client, "failed") == 1.0)
        answer = client.put("/items/a", json={"texts": ["x"]})
        message = answer.json()["error"]["message"]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_writable")
        assert "could not be loaded" in message
        assert store.manifest("default", other).gallery_space[:12] in message
    store.activate("default", store.versions("default")[0])
    with serving(create_app(settings(store))) as client:
        warmth = SlowWarmth(monkeypatch)
        store.activate("default", other)
        assert warmth.begun.wait(20)
        answer = client.put("/items/a", json={"texts": ["x"]})
        assert "is being loaded; try again" in answer.json()["error"]["message"]
        warmth.go_on.set()
        until(lambda: served(client) == other)
        assert client.put("/items/a", json={"texts": ["x"]}).status_code == 200


def damage(store: SnapshotStore, version: str) -> None:
    file = store.path("default", version) / ROWS
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def swapper_of(app: Any) -> Swapper:
    state = app.state.hivlp
    assert isinstance(state, ServingState)
    found = state.scrubbing.on_corrupt.__self__  # type: ignore[attr-defined]
    assert isinstance(found, Swapper)
    return found


def test_a_version_found_damaged_after_it_was_superseded_costs_nothing(
    store: SnapshotStore,
) -> None:
    first, second, _ = store.versions("default")
    app = create_app(settings(store, scrub_mib_per_s=0))
    with serving(app) as client:
        store.activate("default", second)
        until(lambda: swaps(client, "done") == 1)  # counted after it is served
        swapper_of(app).fall_back("default", first, ROWS)
        assert served(client) == second
        assert swaps(client, "done") == 1


def test_changes_on_damaged_levels_are_served_over_the_last_good_ones(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HASH_UP_TO_BYTES", 0)
    first, second, _ = store.versions("default")
    store.activate("default", second)
    app = create_app(settings(store, scrub_mib_per_s=0))
    with serving(app) as client:
        step = client.put("/items/a", json={"texts": ["x"]}).json()["snapshot"]
        damage(store, second)  # and so all that share the file
        store.quarantine("default").add(second, ROWS, "its sha256 differs")
        swapper_of(app).fall_back("default", second, ROWS)
        assert step in {entry.version for entry in store.quarantine("default").entries()}
        changes = store.manifest("default").changes
        assert changes is not None
        assert changes.since == first
        assert served(client) == store.current("default")
        assert client.get("/items/a").status_code == 200


def test_whole_versions_are_loaded_one_at_a_time(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = store.versions("default")
    app = create_app(settings(store, scrub_mib_per_s=0))
    with serving(app) as client:
        warmth = SlowWarmth(monkeypatch)
        store.activate("default", second)
        assert warmth.begun.wait(20)
        store.quarantine("default").add(first, ROWS, "its sha256 differs")
        falling = threading.Thread(target=swapper_of(app).fall_back, args=("default", first, ROWS))
        falling.start()
        time.sleep(0.2)
        warmth.go_on.set()
        falling.join(20)
        assert warmth.most == 1
        assert served(client) == second

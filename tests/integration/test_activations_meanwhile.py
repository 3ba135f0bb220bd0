"""What else a service does while a version is being activated: items change, and versions come."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from hivlp.index.candidates import Candidates
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot import prefault
from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.stopping import go_on
from hivlp.service.activation_settings import ActivationSettings
from hivlp.service.app import create_app
from hivlp.service.loading import Loader
from hivlp.service.metrics import Metrics
from hivlp.service.regressions import Regressions
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import CacheSettings, ChangeSettings, Settings
from hivlp.service.state import ServingState
from hivlp.service.swap import Swapper
from hivlp.service.watch_settings import RecallSettings, SpareSettings
from tests.integration.served_home import make_corpus, make_home
from tests.integration.test_activations import FakeWatch, activate, served, state, until
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_metrics import read

WAIT_S = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meanwhile")
    return make_home(folder / "home", make_corpus(folder / "corpus"))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> SnapshotStore:
    shutil.copytree(made, tmp_path / "home")
    return SnapshotStore(tmp_path / "home")


def app_of(store: SnapshotStore, **more: Any) -> FastAPI:
    return create_app(Settings(home=store.home, changes=ChangeSettings(poll_s=0.02), **more))


def calibrated(store: SnapshotStore, *, activate: bool = False) -> str:
    """A version over the same levels, as `hivlp calibrate --no-activate` leaves."""
    old = store.manifest("default")
    folder = store.path("default", old.version)
    with store.stage("default") as staging:
        shared = share_files(folder, staging.path, old.files)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        update = {"version": staging.version, "created_at": now, "calibrated_from": old.version}
        write_manifest(staging.path, old.model_copy(update=update))
        store.publish(staging, activate=activate, shared=shared)
        return staging.version


def found(client: httpx.Client, query: str = "red", k: int = 5) -> list[str]:
    answer = client.post("/search/text", json={"query": query, "k": k})
    assert answer.status_code == 200, answer.text
    return [hit["id"] for hit in answer.json()["hits"]]


@dataclass(slots=True)
class Slow:
    """The first `quick` versions are made ready at once; the others when `go_on` is set."""

    quick: int
    go_on: threading.Event
    waiting: threading.Event

    def __call__(self, loader: Loader, version: ServedVersion) -> None:
        self.quick -= 1
        if self.quick < 0:
            self.waiting.set()
            assert self.go_on.wait(WAIT_S)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(1, threading.Event(), threading.Event())
    monkeypatch.setattr(Loader, "make_ready", lambda *given: slow(*given))
    yield slow
    slow.go_on.set()


def test_items_that_change_while_a_version_over_the_same_levels_is_staged_do_not_hold_it_up(
    store: SnapshotStore, slow: Slow
) -> None:
    """Two apps stand for two processes; one is slow to have the version ready."""
    version = calibrated(store)
    with serving(app_of(store)) as one, serving(app_of(store)) as two:
        assert activate(one, version).status_code == 202
        until(lambda: sorted(p.state for p in state(two).processes) == ["staged", "staging"])
        for client in (one, two):  # the one that has it staged, and the other
            gone = found(client)[0]
            assert client.delete(f"/items/{gone}").status_code == 200
            for other in (one, two):
                until(lambda other=other, gone=gone: gone not in found(other))  # type: ignore[misc]
        assert sorted(p.state for p in state(two).processes) == ["staged", "staging"]
        slow.go_on.set()
        until(lambda: state(one).state == "active")
        for client in (one, two):
            until(lambda client=client: served(client) == version)  # type: ignore[misc]
        until(lambda: {p.state for p in state(one).processes} == {"serving"})
    assert store.current("default") == version


def test_changes_of_items_are_followed_while_another_index_is_loaded(
    store: SnapshotStore, slow: Slow
) -> None:
    shutil.copytree(store.folder("default"), store.folder("other"))
    manifest = store.manifest("default")
    folder = store.path("other", manifest.version)
    write_manifest(folder, manifest.model_copy(update={"index": "other"}))
    slow.quick = 0
    with serving(app_of(store)) as one, serving(app_of(store)) as two:
        assert activate(one, calibrated(store)).status_code == 202
        assert slow.waiting.wait(WAIT_S)
        body = {"query": "red", "k": 5, "index": "other"}
        hits = one.post("/search/text", json=body).json()["hits"]
        gone = hits[0]["id"]
        assert one.delete(f"/items/{gone}?index=other").status_code == 200
        until(
            lambda: (
                gone
                not in [hit["id"] for hit in two.post("/search/text", json=body).json()["hits"]]
            )
        )
        slow.go_on.set()


def test_recall_that_was_lost_before_another_build_came_does_not_undo_that_build(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this process still loads that build, and serves what was activated before."""
    first = store.current("default")
    version = calibrated(store)
    app = app_of(store)
    with serving(app) as client:
        activate(client, version)
        until(lambda: served(client) == version and state(client).state == "active")
        monkeypatch.setattr(Swapper, "keep_up", lambda *_: True)
        mended = calibrated(store, activate=True)
        running: ServingState = app.state.hivlp
        catalogue, watch = running.catalogue, FakeWatch({first: (1.0, 500), version: (0.5, 500)})
        assert catalogue.source is not None
        stager, settings = running.stager("default"), ActivationSettings()
        looking = Regressions(stager, watch, catalogue, catalogue.source, settings, Metrics())
        looking.look("default")
        assert served(client) == version
        assert (state(client).kind, state(client).snapshot) == ("activate", version)
    assert store.history("default") == [first, version, mended]


def test_recall_that_is_really_lost_is_summed_over_processes_and_takes_the_version_back(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 1 never finds the best five. No process checks enough answers by itself."""
    first = store.current("default")
    version = calibrated(store)
    step = LocalSearcher.step

    def misses(searcher: LocalSearcher, searched: Any, stage: Any, *given: Any, **more: Any) -> Any:
        bad = stage.level == 1 and searcher.info.version == version
        wider = replace(stage, keep=stage.keep + 5) if bad else stage
        found = step(searcher, searched, wider, *given, **more)
        return [Candidates(f.rows[5:], f.scores[5:]) for f in found] if bad else found

    monkeypatch.setattr(LocalSearcher, "step", misses)
    settings = {
        "recall": RecallSettings(share=1.0, max_per_s=1_000),
        "spare": SpareSettings(core_share=1.0),
        "cache": CacheSettings(max_bytes=0),
        "activation": ActivationSettings(recall_checks=12, recall_drop=0.05),
    }
    apps = app_of(store, **settings), app_of(store, **settings)
    with serving(apps[0]) as one, serving(apps[1]) as two:
        activate(one, version)
        until(lambda: all(served(client) == version for client in (one, two)))
        for app, client in zip(apps, (one, two), strict=True):
            watch = app.state.hivlp.recall
            end = time.monotonic() + WAIT_S
            while watch.recent("default", version).checks < 8 and time.monotonic() < end:
                found(client, k=10)
        until(lambda: state(one).kind == "rollback" and state(one).state == "active")
        assert "ANN recall of" in str(state(one).reason)
        for client in (one, two):
            until(lambda client=client: served(client) == first)  # type: ignore[misc]
        done = [
            read(c).get(("hivlp_swap_total", (("result", "rolled_back"),)), 0) for c in (one, two)
        ]
        assert sum(done) == 1
    assert store.history("default") == [first]


def test_a_service_that_is_told_to_end_gives_up_what_it_makes_ready(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.current("default")
    version = calibrated(store)
    reading, late = threading.Event(), threading.Event()

    def endless(_: Path) -> None:
        reading.set()
        while not late.wait(0.001):
            go_on()

    with serving(app_of(store)) as client:
        monkeypatch.setattr(prefault, "read_through", endless)
        timer = threading.Timer(WAIT_S, late.set)
        timer.start()
        activate(client, version)
        assert reading.wait(WAIT_S)
    timer.cancel()
    assert not late.is_set()
    assert "not staged" not in caplog.text
    assert store.current("default") == first
    assert not store.in_use("default", version)

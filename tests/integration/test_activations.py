"""Activating and rolling back over HTTP: staged by all, checked, and then served by all."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from hivlp.index.cli_snapshots import snapshots
from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.activation_settings import ActivationSettings
from hivlp.service.answers import ActivationAnswer
from hivlp.service.app import create_app
from hivlp.service.client import Client, Conflict, NotFound
from hivlp.service.loading import Loader
from hivlp.service.metrics import Metrics
from hivlp.service.regressions import Regressions
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import ChangeSettings, Settings
from hivlp.service.state import ServingState
from tests.integration.three_versions import make_three_versions
from tests.unit.service.serving_app import serving

ADMIN = "/admin/indexes/default"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: built, built of half the corpus, and built by another model."""
    return make_three_versions(tmp_path_factory.mktemp("activations"))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> SnapshotStore:
    shutil.copytree(made, tmp_path / "home")
    return SnapshotStore(tmp_path / "home")


def app_of(store: SnapshotStore, **more: Any) -> FastAPI:
    return create_app(Settings(home=store.home, changes=ChangeSettings(poll_s=0.02), **more))


def until(check: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def state(client: httpx.Client) -> ActivationAnswer:
    return ActivationAnswer.model_validate_json(client.get(f"{ADMIN}/activation").content)


def served(client: httpx.Client) -> str:
    answer = client.post("/search/text", json={"query": "red", "k": 3})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["snapshot"])


def activate(client: httpx.Client, version: str, **more: Any) -> httpx.Response:
    return client.post(f"{ADMIN}/activate", json={"snapshot": version, **more})


def test_every_process_has_it_ready_before_any_serves_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two apps stand for two processes: of a version of another model, one is slow to be ready."""
    first, _, other = store.versions("default")
    go_on, ready, first_is_done = threading.Event(), Loader.make_ready, threading.Lock()

    def slow(loader: Loader, version: ServedVersion) -> None:
        if not first_is_done.acquire(blocking=False):
            assert go_on.wait(20)
        ready(loader, version)

    with serving(app_of(store)) as one, serving(app_of(store)) as two:
        monkeypatch.setattr(Loader, "make_ready", slow)
        asked = activate(one, other)
        assert asked.status_code == 202
        assert asked.headers["location"] == f"{ADMIN}/activation"
        answer = ActivationAnswer.model_validate_json(asked.content)
        assert (answer.kind, answer.snapshot, answer.previous) == ("activate", other, first)
        until(lambda: sorted(p.state for p in state(two).processes) == ["staged", "staging"])
        for client in (one, two):
            assert served(client) == first
            assert client.get("/readyz").status_code == 200
        again = activate(two, other)
        assert (again.status_code, again.json()["state"]) == (202, "staging")
        refused = client.post(f"{ADMIN}/rollback")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            409,
            "activation_under_way",
        )
        assert other in refused.json()["error"]["message"]
        go_on.set()
        for client in (one, two):
            until(lambda client=client: served(client) == other)  # type: ignore[misc]
        until(lambda: {p.state for p in state(one).processes} == {"serving"})
        assert state(two).state == "active"
        known = activate(two, other)
        assert (known.status_code, known.json()["state"]) == (200, "active")

        back = one.post(f"{ADMIN}/rollback")
        assert (back.status_code, back.json()["snapshot"]) == (202, first)
        for client in (one, two):
            until(lambda client=client: served(client) == first)  # type: ignore[misc]
    assert store.current("default") == first


def test_a_canary_that_fails_keeps_the_old_version_and_says_which_and_what_was_found(
    store: SnapshotStore,
) -> None:
    first, second, _ = store.versions("default")
    right = {"query": "red", "k": 4, "expected": ["red/24", "red/300"], "at_least": 1}
    wrong = {"id": "red/24", "k": 2, "expected": ["nowhere"]}
    with serving(app_of(store)) as client:
        assert activate(client, second, canary=[right, wrong]).status_code == 202
        until(lambda: state(client).state == "failed")
        reason = str(state(client).reason)
        assert reason.startswith("canary 1, item 'red/24': 0 of 1 expected ids among 2 hits")
        assert "red/300" in reason
        assert served(client) == first

        (store.folder("default") / "canary.jsonl").write_text('{"query": "red", "expected": 3}\n')
        activate(client, second)
        until(lambda: state(client).state == "failed" and "line 1" in str(state(client).reason))
        assert activate(client, second, canary=[right]).status_code == 202  # in their place
        until(lambda: state(client).state == "active")
        until(lambda: served(client) == second)
        assert client.post(f"{ADMIN}/rollback").status_code == 202  # a way back needs none
        until(lambda: served(client) == first)
        until(lambda: not store.in_use("default", second))


def test_what_can_not_be_staged_is_let_go_of_and_the_reason_told(store: SnapshotStore) -> None:
    first, second, other = store.versions("default")
    with serving(app_of(store, artifact=store.home / "artifacts" / "tiny")) as client:
        activate(client, other)
        until(lambda: state(client).state == "failed")
        wanted = store.manifest("default", other).gallery_space
        assert wanted[:12] in str(state(client).reason)

        file = store.path("default", second) / "items.arrow"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        activate(client, second)
        until(lambda: "items.arrow" in str(state(client).reason))
        assert [entry.version for entry in store.quarantine("default").entries()] == [second]
        refused = activate(client, second)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_activatable")
        assert served(client) == first
        assert 'hivlp_swap_total{result="failed"} 2.0' in client.get("/metrics").text
        assert client.get("/readyz").status_code == 200
    assert store.current("default") == first


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("default/activate", {"snapshot": "20200101T000000-000000"}, 404, "no_such_snapshot", None),
        ("nowhere/activate", {"snapshot": "x"}, 404, "no_such_index", "index"),
        ("default/activate", {}, 422, "missing_field", "snapshot"),
        ("default/activate", {"snapshot": "x", "now": True}, 422, "unknown_field", "now"),
        (
            "default/activate",
            {"snapshot": "x", "canary": [{"query": "red", "expected": [], "k": 0}]},
            422,
            "out_of_range",
            "canary.0.k",
        ),
        ("default/rollback", None, 409, "not_activatable", None),
        ("nowhere/rollback", None, 404, "no_such_index", "index"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    store: SnapshotStore, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    with serving(app_of(store)) as client:
        answer = client.post(f"/admin/indexes/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
        none = client.get(f"{ADMIN}/activation")
        assert none.status_code == 404


def test_the_client_activates_rolls_back_and_looks(store: SnapshotStore) -> None:
    first, second, other = store.versions("default")
    with (
        serving(app_of(store)) as http,
        Client(str(http.base_url)) as client,
    ):
        with pytest.raises(NotFound):
            client.activation()
        canary = {"query": "red", "k": 4, "expected": ["red/24"]}
        assert client.activate(second, canary=[canary]).snapshot == second
        until(lambda: client.activation().state == "active")
        assert client.activation().previous == first
        assert client.rollback().kind == "rollback"
        until(lambda: client.activation().state == "active")
        store.quarantine("default").add(other, "items.arrow", "damaged")
        with pytest.raises(Conflict) as told:
            client.activate(other)
        assert told.value.code == "not_activatable"


def test_the_command_waits_for_the_service_and_says_who_serves_it(
    store: SnapshotStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = store.versions("default")
    home = ["--home", str(store.home)]
    canary = store.home / "mine.jsonl"
    canary.write_text('{"query": "red", "k": 2, "expected": ["nowhere"]}\n')
    with serving(app_of(store)) as client:
        with pytest.raises(SnapshotError, match="not active: canary 0, text 'red': 0 of 1"):
            snapshots(["activate", *home, second, "--canary", str(canary)])
        with pytest.raises(FileNotFoundError):
            snapshots(["activate", *home, second, "--canary", f"{canary}.gone"])
        assert served(client) == first
        assert snapshots(["activate", *home, second]) == 0
        assert served(client) == second  # at once: the command waits for it
        assert snapshots(["activate", *home, second]) == 0
        assert snapshots(["rollback", *home]) == 0
        assert served(client) == first
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"default {second}: active, and served by 1 process",
        f"default {second}: active already",
        f"default {first}: active again, and served by 1 process",
    ]
    assert said.err.count("waiting for 1 process to have it ready") == 3


class FakeWatch:
    """Recall as a test says it is, by version."""

    def __init__(self, recall: dict[str, tuple[float, int]]) -> None:
        self._recall = recall

    def recent(self, _: str, version: str) -> Any:
        mean, checks = self._recall[version]
        return SimpleNamespace(mean=mean, checks=checks)


def test_a_loss_of_recall_after_an_activation_takes_it_back_once(store: SnapshotStore) -> None:
    first, second, other = store.versions("default")
    app = app_of(store)
    with serving(app) as client:
        running: ServingState = app.state.hivlp
        source = running.catalogue.source
        assert source is not None
        metrics = Metrics()

        def look(before: tuple[float, int], after: tuple[float, int]) -> None:
            watch = FakeWatch({first: before, second: after, other: after})
            settings = ActivationSettings(recall_checks=50, recall_drop=0.05)
            stager = running.stager("default")
            looking = Regressions(stager, watch, running.catalogue, source, settings, metrics)
            looking.look("default")

        activate(client, second)
        until(lambda: served(client) == second and state(client).state == "active")
        look((0.99, 500), (0.5, 49))  # too few to tell
        look((0.99, 500), (0.95, 500))  # not by so much
        assert state(client).kind == "activate"
        look((0.99, 500), (0.93, 500))
        until(lambda: served(client) == first and state(client).state == "active")
        after = state(client)
        assert (after.kind, after.state, after.snapshot) == ("rollback", "active", first)
        assert after.reason is not None
        assert "0.930; 0.990 was expected" in after.reason
        look((0.1, 500), (0.99, 500))  # a rollback isn't taken back
        assert state(client).asked_at == after.asked_at
        rolled = metrics.exposition().decode()
        assert 'hivlp_swap_total{result="rolled_back"} 1.0' in rolled

        activate(client, other)
        until(lambda: served(client) == other and state(client).state == "active")
        look((math.nan, 0), (0.2, 500))  # against what the build measured
        until(lambda: served(client) == first)

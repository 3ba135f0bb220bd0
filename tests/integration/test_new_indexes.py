"""An index that comes while a service runs: activated, taken up by all at once, or by none."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from hivlp.index.cli_snapshots import snapshots
from hivlp.index.snapshot.activation import GONE, Activations
from hivlp.service.activation_settings import ActivationSettings
from hivlp.service.answers import ActivationAnswer
from hivlp.service.app import create_app
from hivlp.service.client import Client
from hivlp.service.loading import Loader
from hivlp.service.metrics import Metrics
from hivlp.service.regressions import Regressions
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import ChangeSettings, Settings
from hivlp.service.state import ServingState
from hivlp.service.swap import Swapper
from hivlp.service.watch_settings import RecallSettings, SpareSettings
from tests.integration.new_index import NEW, NewIndex
from tests.integration.test_activations import FakeWatch
from tests.unit.service.serving_app import serving

ADMIN = f"/admin/indexes/{NEW}"
WRONG = json.dumps({"query": "red", "k": 3, "expected": ["nowhere"]})
RIGHT = {"query": "red", "k": 4, "expected": ["red/24", "red/300"], "at_least": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> NewIndex:
    return NewIndex.make(tmp_path_factory.mktemp("new"))


@pytest.fixture
def new(made: NewIndex, tmp_path: Path) -> NewIndex:
    return made.copy(tmp_path)


def app_of(new: NewIndex, **more: Any) -> FastAPI:
    return create_app(Settings(home=new.store.home, changes=ChangeSettings(poll_s=0.02), **more))


def until(check: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def search(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/search/text", json={"query": "red", "k": 3, "index": NEW, **more})


def serves(client: httpx.Client) -> str | None:
    """The version that a search of the new index is answered by; None where it isn't served."""
    answer = search(client)
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == "no_such_index"
        return None
    assert answer.status_code == 200, answer.text
    assert answer.json()["index"] == NEW
    return str(answer.json()["snapshot"])


def listed(client: httpx.Client) -> dict[str, str]:
    return {i["name"]: i["snapshot"] for i in client.get("/indexes").json()["indexes"]}


def activate(client: httpx.Client, version: str, **more: Any) -> httpx.Response:
    return client.post(f"{ADMIN}/activate", json={"snapshot": version, **more})


def state(client: httpx.Client) -> ActivationAnswer:
    return ActivationAnswer.model_validate_json(client.get(f"{ADMIN}/activation").content)


def ended(client: httpx.Client, version: str, how: str = "active") -> None:
    until(lambda: (state(client).state, state(client).snapshot) == (how, version))


def test_one_that_is_not_active_is_served_from_its_activation_on_like_all_others(
    new: NewIndex,
) -> None:
    first, second = new.versions
    watched = {
        "recall": RecallSettings(share=1.0, max_per_s=1_000.0),
        "spare": SpareSettings(core_share=1.0),
    }
    with serving(app_of(new, **watched)) as client:
        known = listed(client)
        new.arrive()
        refused = activate(client, "20200101T000000-000000")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_such_snapshot")
        assert serves(client) is None
        assert listed(client) == known

        asked = activate(client, first, canary=[RIGHT])
        assert (asked.status_code, asked.headers["location"]) == (202, f"{ADMIN}/activation")
        assert (asked.json()["previous"], asked.json()["state"]) == (None, "staging")
        ended(client, first)
        until(lambda: serves(client) == first)
        assert listed(client) == {**known, NEW: first}
        health = client.get("/health")
        assert (health.status_code, health.json()["indexes"]) == (200, {**known, NEW: first})
        assert client.get("/readyz").status_code == 200
        assert [p.state for p in state(client).processes] == ["serving"]
        again = activate(client, first)
        assert (again.status_code, again.json()["state"]) == (200, "active")

        unnamed = client.post("/search/text", json={"query": "red"}).json()
        assert (unnamed["index"], unnamed["snapshot"]) == ("default", known["default"])

        put = client.put("/items/mine", params={"index": NEW}, json={"texts": ["a green boat"]})
        assert put.status_code == 200, put.text
        found = search(client, query="a green boat", modality="text").json()
        assert "mine" in [hit["id"] for hit in found["hits"]]

        figures = client.get("/metrics").text
        assert f'hivlp_snapshot_info{{index="{NEW}",model="tiny",version="{first}"}} 1.0' in figures
        assert f'hivlp_snapshot_changes{{index="{NEW}"}} 1.0' in figures
        assert f'hivlp_snapshot_quarantined{{index="{NEW}"}} 0.0' in figures
        checked = f'hivlp_ann_recall_checks_total{{index="{NEW}"'
        until(lambda: bool(search(client)) and checked in client.get("/metrics").text)

        assert activate(client, second).status_code == 202
        ended(client, second)
        until(lambda: serves(client) == second)
        assert client.post(f"{ADMIN}/rollback").status_code == 202
        until(lambda: serves(client) == put.json()["snapshot"])


def test_what_is_published_as_active_is_ready_in_all_before_any_serves_it(
    new: NewIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two apps stand for two processes, of which one is slow to be ready."""
    first, second = new.versions
    go_on, ready, first_is_done = threading.Event(), Loader.make_ready, threading.Lock()

    def slow(loader: Loader, version: ServedVersion) -> None:
        if not first_is_done.acquire(blocking=False):
            assert go_on.wait(20)
        ready(loader, version)

    with serving(app_of(new)) as one, serving(app_of(new)) as two:
        monkeypatch.setattr(Loader, "make_ready", slow)
        new.arrive(active=first)
        until(lambda: one.get(f"{ADMIN}/activation").status_code == 200)
        until(lambda: sorted(p.state for p in state(two).processes) == ["staged", "staging"])
        assert [serves(one), serves(two)] == [None, None]
        assert (state(one).kind, state(one).snapshot) == ("activate", first)
        joined = activate(two, first)  # somebody who doesn't know that it is under way
        assert (joined.status_code, joined.json()["state"]) == (202, "staging")
        refused = activate(two, second)
        assert refused.json()["error"]["code"] == "activation_under_way"
        go_on.set()
        ended(two, first)
        for client in (one, two):
            until(lambda client=client: serves(client) == first)  # type: ignore[misc]
        until(lambda: [p.state for p in state(one).processes] == ["serving"] * 2)
        with serving(app_of(new)) as late:
            assert serves(late) == first
    assert new.store.history(NEW) == [first]


def test_what_fails_a_canary_is_served_by_none_also_not_by_one_begun_later(new: NewIndex) -> None:
    first, _ = new.versions
    with serving(app_of(new)) as one, serving(app_of(new)) as two:
        new.arrive(active=first, canary=WRONG)
        until(lambda: one.get(f"{ADMIN}/activation").status_code == 200)
        ended(one, first, "failed")
        assert str(state(two).reason).startswith("canary 0, text 'red': 0 of 1 expected ids")
        asked_at = state(one).asked_at
        with serving(app_of(new)) as late:
            assert list(listed(late)) == ["default"]
            for client in (one, two, late):
                assert serves(client) is None
                assert client.get("/readyz").status_code == 200
                assert client.get("/search/text").status_code == 405  # still answers
            assert state(late).asked_at == asked_at  # nobody asked again
            until(lambda: not new.store.in_use(NEW, first))
            assert activate(late, first, canary=[RIGHT]).status_code == 202
            ended(late, first)
            for client in (one, two, late):
                until(lambda client=client: serves(client) == first)  # type: ignore[misc]
            until(lambda: [p.state for p in state(one).processes] == ["serving"] * 3)
    with serving(app_of(new)) as alone:  # a start of all serves what is active
        assert serves(alone) == first


def test_a_loss_of_recall_never_leads_to_a_version_that_nobody_served(new: NewIndex) -> None:
    first, second = new.versions
    app = app_of(new)
    with serving(app) as client:
        new.arrive(active=first, canary=WRONG)
        until(lambda: client.get(f"{ADMIN}/activation").status_code == 200)
        ended(client, first, "failed")
        assert activate(client, second, canary=[RIGHT]).status_code == 202
        ended(client, second)
        until(lambda: serves(client) == second)
        assert state(client).previous == first
        running: ServingState = app.state.hivlp
        catalogue, watch = running.catalogue, FakeWatch({first: (1.0, 500), second: (0.5, 500)})
        assert catalogue.source is not None
        stager, settings = running.stager(NEW), ActivationSettings()
        Regressions(stager, watch, catalogue, catalogue.source, settings, Metrics()).look(NEW)
        assert (state(client).kind, state(client).snapshot) == ("activate", second)
        assert serves(client) == second
    assert new.store.history(NEW) == [first, second]


def test_after_all_that_were_at_it_died_what_begins_next_serves_what_is_active(
    new: NewIndex,
) -> None:
    first, _ = new.versions
    new.arrive(active=first)
    activations = Activations(new.store, NEW)
    dead = activations.join(serves=True, new=True)
    asked = activations.ask("activate", first, dead)
    assert asked is not None
    dead.report(asked.id, "staging")
    os.close(dead._lock)
    with serving(app_of(new)) as one, serving(app_of(new)) as two:
        assert [serves(one), serves(two)] == [first, first]
        last = activations.last()
        assert last is not None
        assert (last.request.id, last.active, last.reason) == (asked.id, False, GONE)
        assert activations.pending() is None


def test_when_the_one_that_asked_leaves_another_asks(
    new: NewIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = new.versions
    verify, asked = Swapper.verify, threading.Event()

    def slow(swapper: Swapper, name: str, version: str) -> None:
        if not asked.is_set():
            asked.set()
            assert swapper.stopping.wait(20)
        verify(swapper, name, version)

    monkeypatch.setattr(Swapper, "verify", slow)
    with ExitStack() as leaving:
        leaving.enter_context(serving(app_of(new)))
        new.arrive(active=first)
        assert asked.wait(20)
        with serving(app_of(new)) as other:
            assert serves(other) is None
            assert state(other).state == "staging"
            leaving.close()
            until(lambda: serves(other) == first)
            assert [p.state for p in state(other).processes] == ["serving"]


def test_a_version_published_after_one_that_failed_is_taken_up(new: NewIndex) -> None:
    first, second = new.versions
    damaged = new.aside / first / "items.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with serving(app_of(new)) as client:
        new.arrive(active=first)
        until(lambda: client.get(f"{ADMIN}/activation").status_code == 200)
        ended(client, first, "failed")
        assert "items.arrow" in str(state(client).reason)
        refused = activate(client, first)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_activatable")
        assert 'hivlp_swap_total{result="failed"} 1.0' in client.get("/metrics").text
        new.store.activate(NEW, second)  # as a build does it
        until(lambda: serves(client) == second)


def test_where_indexes_are_named_others_are_refused_by_the_name_of_the_setting(
    new: NewIndex,
) -> None:
    first, _ = new.versions
    with serving(app_of(new, indexes=("default",))) as client:
        new.arrive(active=first)
        answer = activate(client, first)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (409, "not_activatable")
        assert error["param"] == "name"
        assert "`indexes` (HIVLP_INDEXES) names default" in error["message"]
        for answer in (client.post(f"{ADMIN}/rollback"), client.get(f"{ADMIN}/activation")):
            assert answer.json()["error"]["message"] == error["message"]
        assert serves(client) is None
        nowhere = client.post("/admin/indexes/nowhere/activate", json={"snapshot": first})
        assert nowhere.json()["error"]["code"] == "no_such_index"
        no_name = client.post("/admin/indexes/No%20name/activate", json={"snapshot": first})
        assert (no_name.status_code, no_name.json()["error"]["code"]) == (422, "invalid_index")
        with serving(app_of(new)) as all_of_them:
            assert serves(all_of_them) == first
        assert list(listed(client)) == ["default"]


def test_the_command_waits_for_the_services_that_are_to_serve_it(
    new: NewIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = new.versions
    home = ["--home", str(new.store.home), "--index", NEW]
    with (
        serving(app_of(new)) as one,
        serving(app_of(new)) as two,
        serving(app_of(new, indexes=("default",))) as named,
    ):
        new.arrive()
        assert snapshots(["activate", *home, first]) == 0
        assert [serves(client) for client in (one, two, named)] == [first, first, None]
        with Client(str(one.base_url)) as client:
            assert client.snapshots(index=NEW).active == first
    assert capsys.readouterr().out == f"{NEW} {first}: active, and served by 2 processes\n"


def test_a_store_that_is_read_only_has_each_process_follow_alone(
    new: NewIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = new.versions

    def read_only(*_: Any, **__: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("hivlp.index.snapshot.activation.Member", read_only)
    with serving(app_of(new)) as client:
        new.arrive(active=first)
        until(lambda: serves(client) == first)
        refused = activate(client, new.versions[1])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_writable")

"""Live at once, ready only when everything is loaded and warm, and honest when it can't be."""

from __future__ import annotations

import threading

from hivlp.index.errors import SnapshotCorrupt
from hivlp.service.app import create_app
from hivlp.service.serving import Catalogue
from hivlp.service.settings import Settings
from tests.unit.service.fakes_service import VERSION, FakeStore, World
from tests.unit.service.serving_app import await_ready, serving

WAIT_S = 20


def test_live_but_not_ready_while_loading_then_ready(world: World) -> None:
    go = threading.Event()

    def slow(settings: Settings) -> Catalogue:
        assert go.wait(WAIT_S)
        return world.load(settings)

    with serving(create_app(Settings(), load=slow), wait_ready=False) as client:
        try:
            assert client.get("/livez").json() == {"status": "live"}
            ready = client.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["error"]["code"] == "not_ready"
            assert ready.headers["retry-after"] == "1"
            assert client.get("/health").json()["status"] == "loading"
            for path in ("/info", "/indexes", "/items/red", "/items/red/image"):
                assert client.get(path).status_code == 503, path
            search = client.post("/search/text", json={"query": "red"})
            assert search.status_code == 503
            assert client.get("/").status_code == 200
            assert client.get("/metrics").status_code == 200
        finally:
            go.set()
        await_ready(client)
        assert client.get("/readyz").json() == {"status": "ready"}
        health = client.get("/health").json()
        assert (health["status"], health["indexes"]) == ("ready", {"default": VERSION})
        assert client.post("/search/text", json={"query": "red"}).status_code == 200


def test_a_failed_load_is_told_and_never_becomes_ready() -> None:
    told: list[BaseException | None] = []
    heard = threading.Event()

    def broken(_: Settings) -> Catalogue:
        raise SnapshotCorrupt("default", VERSION, "image/rows.npy", "its sha256 differs")

    def on_loaded(error: BaseException | None) -> None:
        told.append(error)
        heard.set()

    app = create_app(Settings(), load=broken, on_loaded=on_loaded)
    with serving(app, wait_ready=False) as client:
        assert heard.wait(WAIT_S)
        assert client.get("/readyz").status_code == 503
        assert client.get("/health").json()["status"] == "failed"
        assert client.get("/livez").status_code == 200
        assert "rows.npy" not in client.get("/readyz").text
    assert isinstance(told[0], SnapshotCorrupt)


def test_ready_needs_at_least_one_index() -> None:
    def nothing(_: Settings) -> Catalogue:
        return Catalogue({}, FakeStore())

    heard = threading.Event()
    app = create_app(Settings(), load=nothing, on_loaded=lambda _: heard.set())
    with serving(app, wait_ready=False) as client:
        assert heard.wait(WAIT_S)
        assert client.get("/readyz").status_code == 503


def test_stopping_while_loading_waits_for_the_load(world: World) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(settings: Settings) -> Catalogue:
        began.set()
        assert go.wait(WAIT_S)
        return world.load(settings)

    with serving(create_app(Settings(), load=slow), wait_ready=False):
        assert began.wait(WAIT_S)
        go.set()

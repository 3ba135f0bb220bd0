"""What a key opens: every route but probes and the page, admin routes, and items' changes."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import SecretStr

from hivlp.service.app import create_app
from hivlp.service.guard import OPEN, admin_only
from hivlp.service.keys import KeySettings
from hivlp.service.logs import JsonLines
from hivlp.service.settings import ChangeSettings, Settings
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

KEY, OTHER, ADMIN = "api-key-0123456789ab", "other-key-0123456789", "admin-key-0123456789"
KEYS = KeySettings(api=(SecretStr(KEY), SecretStr(OTHER)), admin=SecretStr(ADMIN))
NO_ADMIN = KeySettings(api=(SecretStr(KEY),))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def make_app(keys: KeySettings, **settings: Any) -> FastAPI:
    """The app with an admin route; a client is not waited for, as `/health` may need a key."""
    app = create_app(SMALL.model_copy(update={"keys": keys, **settings}), load=World().load)
    router = APIRouter(prefix="/admin", dependencies=[Depends(admin_only)])

    @router.post("/probe")
    async def probe(request: Request) -> dict[str, int]:
        return {"role": int(request.state.role)}

    app.include_router(router)
    return app


@contextlib.contextmanager
def served(keys: KeySettings, **settings: Any) -> Iterator[httpx.Client]:
    with serving(make_app(keys, **settings)) as client:
        yield client


@pytest.fixture(scope="module")
def closed() -> Iterator[httpx.Client]:
    with served(KEYS) as client:
        yield client


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def every_route() -> list[tuple[str, str]]:
    routes = [context.route for context in iter_route_contexts(make_app(KEYS).routes)]
    return sorted(
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods
    )


def test_every_route_but_probes_and_the_page_needs_a_key(closed: httpx.Client) -> None:
    found = every_route()
    assert {"/search/text", "/items/x", "/metrics", "/info", "/openapi.json"} <= {
        p for _, p in found
    }
    for method, path in found:
        response = closed.request(method, path)
        if path in OPEN:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"].startswith("Bearer"), path


@pytest.mark.parametrize("path", ["/nowhere", "/livez/", "/LIVEZ", "/static/x", "/admin"])
def test_what_leads_nowhere_is_behind_the_key_too(closed: httpx.Client, path: str) -> None:
    assert code_of(closed.get(path)) == (401, "missing_key")
    assert code_of(closed.get(path, headers=bearer(KEY))) == (404, "not_found")


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer(OTHER),
        bearer(ADMIN),
        {"authorization": f"bearer   {KEY}"},
        {"X-API-Key": OTHER},
        {"Authorization": "Basic dTpw", "X-API-Key": KEY},
    ],
)
def test_any_key_opens_searching(closed: httpx.Client, headers: dict[str, str]) -> None:
    assert closed.get("/info", headers=headers).status_code == 200
    answer = closed.post("/search/text", json={"query": "red"}, headers=headers)
    assert answer.json()["hits"][0]["id"] == "red"


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        {"Authorization": "Bearer"},
        {"X-API-Key": ""},
        {"Authorization": "Bearer nobody", "X-API-Key": KEY},
        {"Authorization": b"Bearer schl\xc3\xbcssel"},
        {"X-API-Key": b"\xff\xfe\x80"},
    ],
)
def test_a_wrong_key_is_refused(closed: httpx.Client, headers: Any) -> None:
    assert code_of(closed.get("/info", headers=headers)) == (403, "wrong_key")


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}, {"Cookie": KEY}]
)
def test_what_is_no_key_is_none(closed: httpx.Client, headers: dict[str, str]) -> None:
    assert code_of(closed.get("/info", headers=headers)) == (401, "missing_key")


def test_a_body_is_not_waited_for_without_a_key(closed: httpx.Client) -> None:
    url = closed.base_url
    head = b"POST /search/text HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_refusals_are_counted_by_reason_and_keys_are_shown_nowhere(
    closed: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = "wrong-key-0123456789"
    shown = closed.get("/info", headers=bearer(sent)).text
    closed.get("/info")
    shown += closed.get("/info", headers=bearer(KEY)).text
    metrics = closed.get("/metrics", headers=bearer(KEY)).text
    assert 'hivlp_rejected_total{reason="wrong_key"}' in metrics
    assert 'hivlp_rejected_total{reason="missing_key"}' in metrics
    lines = JsonLines()
    ours = [lines.format(r) for r in caplog.records if r.name.startswith("hivlp")]
    assert ours
    for key in (KEY, OTHER, ADMIN, sent):
        assert key not in shown + metrics + "".join(ours)


def test_without_api_keys_everyone_may_search_and_the_admin_key_is_still_asked_for() -> None:
    with served(KeySettings(admin=SecretStr(ADMIN))) as client:
        assert client.get("/info").status_code == 200
        assert client.get("/info", headers=bearer("whatever")).status_code == 200
        assert code_of(client.post("/admin/probe")) == (401, "missing_key")
        assert code_of(client.post("/admin/probe", headers=bearer(KEY))) == (403, "wrong_key")
        assert client.post("/admin/probe", headers=bearer(ADMIN)).json() == {"role": 2}


def test_an_api_key_opens_no_admin_route(closed: httpx.Client) -> None:
    assert code_of(closed.post("/admin/probe", headers=bearer(KEY))) == (403, "not_admin")
    assert closed.post("/admin/probe", headers=bearer(ADMIN)).status_code == 200


def test_every_admin_route_needs_the_admin_key(closed: httpx.Client) -> None:
    found = [(method, path) for method, path in every_route() if path.startswith("/admin")]
    assert len(found) > 4
    for method, path in found:
        refused = closed.request(method, path, headers=bearer(KEY))
        assert code_of(refused) == (403, "not_admin"), (method, path)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_without_an_admin_key_admin_routes_are_for_this_machine(headers: dict[str, str]) -> None:
    with served(KeySettings(), hosts=("evil.example",)) as client:
        assert client.post("/admin/probe").json() == {"role": 0}
        assert code_of(client.post("/admin/probe", headers=headers)) == (403, "not_admin")
        passed_on = {"X-Forwarded-For": "192.0.2.1"}
        assert code_of(client.post("/admin/probe", headers=passed_on)) == (403, "not_admin")


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_api_keys_without_an_admin_key_leave_no_admin_routes(host: str) -> None:
    with served(NO_ADMIN, host=host) as client:
        for method, path in (("POST", "/admin/probe"), ("GET", "/admin/probe"), ("GET", "/admin")):
            nowhere = client.request(method, "/nowhere", headers=bearer(KEY))
            absent = client.request(method, path, headers=bearer(KEY))
            assert code_of(absent) == code_of(nowhere) == (404, "not_found")
            assert client.request(method, path).status_code == 401


def test_with_an_admin_key_only_it_changes_items(closed: httpx.Client) -> None:
    for method in ("PUT", "DELETE"):
        assert code_of(closed.request(method, "/items/red")) == (401, "missing_key")
        refused = closed.request(method, "/items/red", headers=bearer(KEY))
        assert code_of(refused) == (403, "not_admin")
    # The fake world takes no changes; that it says so shows that the key was right.
    allowed = closed.request("DELETE", "/items/red", headers=bearer(ADMIN))
    assert code_of(allowed) == (403, "read_only")


def test_writes_for_all_take_any_key() -> None:
    with served(KEYS, changes=ChangeSettings(writes=True)) as client:
        assert code_of(client.delete("/items/red")) == (401, "missing_key")
        assert code_of(client.delete("/items/red", headers=bearer(KEY))) == (403, "read_only")


def test_an_admin_key_makes_a_service_for_others_writable() -> None:
    assert Settings(host="0.0.0.0", keys=KEYS).writable
    assert not Settings(host="0.0.0.0", keys=NO_ADMIN).writable
    assert not Settings(host="0.0.0.0", keys=KEYS, changes=ChangeSettings(writes=False)).writable


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("0.0.0.0", KeySettings(), True),
        ("::", KeySettings(admin=SecretStr(ADMIN)), True),
        ("0.0.0.0", NO_ADMIN, False),
        ("127.0.0.1", KeySettings(), False),
    ],
)
def test_a_door_left_open_to_others_is_told(
    host: str, keys: KeySettings, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_app(keys, host=host)
    told = [record for record in caplog.records if "may search" in record.getMessage()]
    assert bool(told) is warned


@pytest.mark.parametrize("path", ["/info", "/", "/livez", "/nowhere", "/admin/probe"])
def test_a_page_whose_name_leads_here_gets_nothing_of_an_open_service(path: str) -> None:
    with served(KeySettings(), hosts=("Search.Internal",)) as client:
        for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1"):
            assert code_of(client.get(path, headers={"Host": host})) == (403, "wrong_host")
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "search.internal:8080"):
            assert client.get(path, headers={"Host": host}).status_code in (200, 404, 405)


def test_names_do_not_matter_where_keys_or_a_network_decide() -> None:
    named = {"Host": "shop.example"}
    with served(KEYS) as client:
        assert client.get("/info", headers={**named, **bearer(KEY)}).status_code == 200
    with served(KeySettings(), host="0.0.0.0") as client:
        assert client.get("/info", headers=named).status_code == 200

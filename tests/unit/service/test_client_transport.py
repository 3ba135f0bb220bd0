"""Both clients over real sockets: what they send, how long they wait, when they try again."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hivlp.service.client import (
    AsyncClient,
    Client,
    ClientError,
    InvalidRequest,
    Overloaded,
    Retries,
    Search,
    TimedOut,
    Timeouts,
    Unreachable,
)
from hivlp.service.client.batching import Packing
from tests.unit.service.clients_both import BOTH, opening
from tests.unit.service.scripted_server import RESET, ScriptedServer, answer, problem, scripted
from tests.unit.service.test_client_exchange import GOOD_SEARCH

FOUND = answer(200, GOOD_SEARCH.content)
LISTED = answer(200, {"indexes": [], "request_id": "theirs"})
QUICK = Retries(first_s=0.01)
ONE_TRY = Retries(tries=1)
KEY = "sesame-4711"
Asking = Callable[..., contextlib.AbstractContextManager[tuple[ScriptedServer, Any]]]


@pytest.fixture(params=BOTH)
def asking(request: pytest.FixtureRequest) -> Asking:
    """`asking(*script, **options)`: a server that says this, and a client of it."""

    @contextlib.contextmanager
    def both(*script: Any, path: str = "", **options: Any) -> Iterator[tuple[ScriptedServer, Any]]:
        opened = opening(request.param)
        with scripted(*script) as server, opened(f"{server.url}{path}", **options) as client:
            yield server, client

    return both


def failing(call: Callable[..., Any], *args: Any, **options: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        call(*args, **options)
    return caught.value


def test_a_request_says_who_asks_and_with_which_key(asking: Asking) -> None:
    with asking(FOUND, key=KEY) as (server, client):
        assert client.search_text("red", k=1).hits[0].id == "red"
    (asked,) = server.received
    assert (asked.method, asked.path) == ("POST", "/search/text")
    assert asked.json == {"query": "red", "k": 1}
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["user-agent"].startswith("hivlp-client/")
    assert asked.headers["content-type"] == "application/json"
    assert len(asked.headers["x-request-id"]) == 32


def test_without_a_key_none_is_sent_and_a_path_of_the_url_is_kept(asking: Asking) -> None:
    with asking(LISTED, path="/below/here/") as (server, client):
        client.indexes()
    assert "authorization" not in server.received[0].headers
    assert server.received[0].path == "/below/here/indexes"


def test_the_key_is_shown_nowhere(asking: Asking, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    retries = Retries(tries=2, first_s=0.0)
    with asking(problem(401, "no_key"), (RESET,), key=KEY, retries=retries) as (_, client):
        said.append(repr(client))
        for _ in range(2):
            error = failing(client.search_text, "red")
            said += [repr(error), str(error), repr(vars(error)), repr(error.__cause__)]
    assert caplog.records
    assert KEY not in "\n".join([*said, caplog.text])


@pytest.mark.parametrize("key", ["", f"{KEY} b", f"{KEY}ü", f"{KEY}\r\nX-Evil: 1", f"{KEY}\x7f"])
def test_a_key_that_can_not_be_one_is_refused_without_being_quoted(key: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="key: must be") as caught:
            kind("http://localhost", key=key)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["localhost:8080", "ftp://localhost", "http://", "http://me:secret@localhost", "http://h/?a=1"],
)
def test_a_url_that_can_not_be_one_is_refused_without_being_quoted(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="url: must") as caught:
            kind(url)
        assert "secret" not in str(caught.value)


def test_a_full_service_is_asked_again_when_it_said(asking: Asking) -> None:
    busy = problem(429, "overloaded", {"Retry-After": "0.3"})
    with asking(busy, FOUND, retries=QUICK) as (server, client):
        began_s = time.monotonic()
        assert client.search_text("red").returned == 1
        assert time.monotonic() - began_s >= 0.3
    assert len(server.received) == 2
    assert server.received[0].body == server.received[1].body


@pytest.mark.parametrize("cut", [(RESET,), (b"",), (FOUND[:30],), (FOUND[:-5],)], ids=str)
def test_a_broken_connection_is_mended(asking: Asking, cut: Any) -> None:
    with asking(cut, cut, FOUND, retries=QUICK) as (server, client):
        assert client.search_text("red").returned == 1
    assert len(server.received) == 3


def test_nobody_there_is_unreachable(asking: Asking) -> None:
    with asking(FOUND, retries=QUICK) as (server, client):
        server.stop()
        error = failing(client.info)
    assert (type(error), error.tries) == (Unreachable, 4)
    assert isinstance(error.__cause__, httpx.ConnectError)


def test_a_request_that_is_wrong_is_sent_once(asking: Asking) -> None:
    with asking(problem(422, "out_of_range"), FOUND) as (server, client):
        assert type(failing(client.search_text, "red", k=0)) is InvalidRequest
    assert len(server.received) == 1


def test_a_service_that_says_nothing_is_waited_for_no_longer_than_allowed(asking: Asking) -> None:
    with asking((30.0,), timeouts=Timeouts(read_s=0.2)) as (server, client):
        assert type(failing(client.search_text, "red")) is TimedOut
    assert len(server.received) == 1


def test_an_answer_that_drips_is_not_waited_for_beyond_the_whole_time(asking: Asking) -> None:
    drops = [part for byte in FOUND[-60:] for part in (0.02, bytes([byte]))]
    timeouts = Timeouts(read_s=5.0, total_s=0.3)
    with asking((FOUND[:-60], *drops), timeouts=timeouts) as (_, client):
        assert type(failing(client.search_text, "red")) is TimedOut
        assert client.with_options(timeouts=Timeouts()).search_text("red").returned == 1


def test_options_change_a_copy_over_the_same_connections(asking: Asking) -> None:
    busy = problem(503, "not_ready", {"Retry-After": "0"})
    with asking(busy, busy, LISTED, retries=QUICK) as (_, client):
        hasty = client.with_options(retries=ONE_TRY)
        assert failing(hasty.indexes).tries == 1
        assert client.indexes().indexes == []
        assert repr(hasty) == repr(client)


def test_a_closed_client_asks_no_more(asking: Asking) -> None:
    with asking(LISTED) as (_, client):
        client.indexes()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.indexes()


def test_redirects_are_not_followed_with_the_key(asking: Asking) -> None:
    with scripted(LISTED) as elsewhere:
        moved = answer(307, b"", {"Location": f"{elsewhere.url}/indexes"})
        with asking(moved, key=KEY) as (_, client):
            assert failing(client.indexes).status == 307
        assert elsewhere.received == []


def test_threads_may_share_a_client() -> None:
    with scripted(FOUND) as server, Client(server.url) as client, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: client.search_text("red", k=k), range(1, 21)))
    assert [one.returned for one in found] == [1] * 20
    assert sorted(one.json["k"] for one in server.received) == list(range(1, 21))


def test_a_cancelled_call_is_not_begun_again() -> None:
    async def leave(url: str) -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.search_text("red")

    with scripted((30.0,)) as server:
        asyncio.run(leave(server.url))
        assert len(server.received) == 1


def test_reading_a_picture_does_not_stop_the_event_loop() -> None:
    class Slow:
        """A file that comes only once the loop has turned."""

        def __init__(self) -> None:
            self.turned = threading.Event()

        def read(self, size: int = -1, /) -> bytes:
            assert self.turned.wait(10), "the event loop stood still"
            return b"picture"

    async def search(url: str, slow: Slow) -> None:
        async with AsyncClient(url) as client:
            searching = asyncio.create_task(client.search_image(slow))
            await asyncio.sleep(0.05)
            slow.turned.set()
            await searching

    with scripted(FOUND) as server:
        asyncio.run(search(server.url, Slow()))
    assert server.received[0].json == {"image": "cGljdHVyZQ=="}


LIMITS = {"max_batch": 3, "max_body_bytes": 500, "max_queue": 6}
INFO = answer(
    200,
    {
        "name": "hivlp",
        "version": "9",
        "indexes": [],
        "models": [],
        "limits": LIMITS,
        "request_id": "theirs",
    },
)


def test_when_the_limits_can_not_be_asked_for_the_whole_of_many_searches_fails(
    asking: Asking,
) -> None:
    with asking(problem(429, "overloaded"), retries=ONE_TRY) as (_, client):
        assert type(failing(client.search_many, [Search.text("red")])) is Overloaded


def test_when_a_batch_fails_each_of_its_searches_has_the_error(asking: Asking) -> None:
    with asking(INFO, problem(500, "internal_error"), retries=ONE_TRY) as (server, client):
        found = client.search_many([Search.text(str(i)) for i in range(7)], concurrency=2)
    assert [one.code for one in found] == ["internal_error"] * 7
    sizes = sorted(len(one.json["searches"]) for one in server.received[1:])
    assert sizes == [1, 3, 3]


def test_a_batch_refused_whole_is_halved_until_the_one_to_blame_stands_alone(
    asking: Asking,
) -> None:
    with asking(INFO, answer(413, b"<html>proxy</html>")) as (server, client):
        found = client.search_many([Search.text(str(i)) for i in range(3)])
    assert [one.code for one in found] == ["http_413"] * 3
    assert [len(one.json["searches"]) for one in server.received[1:]] == [3, 1, 2, 1, 1]


def test_a_batch_is_no_larger_in_bytes_than_the_service_takes(asking: Asking) -> None:
    short, long = Search.text("a"), Search.text("b" * 300)
    with asking(INFO, problem(500, "internal_error"), retries=ONE_TRY) as (server, client):
        wanted = [short, long, long, short, short, Search.text("c" * 900), short]
        client.search_many(wanted, concurrency=1)
    bodies = server.received[1:]
    sent = ["".join(one["query"][0] for one in body.json["searches"]) for body in bodies]
    assert sent == ["ab", "baa", "c", "a"]
    assert [len(body.body) <= LIMITS["max_body_bytes"] for body in bodies] == [
        *(True, True),
        False,  # alone, and for the service to refuse
        True,
    ]


def test_a_file_that_did_not_fit_into_one_request_is_whole_in_the_next(asking: Asking) -> None:
    files = [io.BytesIO(bytes([place]) * 200) for place in range(4)]
    with asking(INFO, problem(500, "internal_error"), retries=ONE_TRY) as (server, client):
        client.search_many([Search.image(file) for file in files], concurrency=1)
    sent = [one["image"] for body in server.received[1:] for one in body.json["searches"]]
    assert [base64.b64decode(image) for image in sent] == [file.getvalue() for file in files]


def test_results_are_taken_while_a_picture_is_being_read() -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        """A file that comes when the test says so."""

        def read(self, size: int = -1, /) -> bytes:
            reading.set()
            assert go_on.wait(10), "the one waited for the other"
            return b"picture"

    packing = Packing([Search.text("red"), Search.image(Slow())], 1, 500)
    first = packing.take()
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(packing.take)
        assert reading.wait(10)
        packing.settle(first, ClientError("none"))
        go_on.set()
        assert second.result() is not None


def test_a_batch_with_too_few_results_is_a_bad_answer(asking: Asking) -> None:
    none = answer(200, {"results": [], "took_ms": 1.0, "request_id": "theirs"})
    with asking(INFO, none) as (_, client):
        found = client.search_many([Search.text("a"), Search.text("b")])
    assert [one.code for one in found] == ["bad_answer"] * 2


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_than_asked_for_are_under_way_at_once(
    asking: Asking, concurrency: int
) -> None:
    slow = (0.1, problem(500, "internal_error"))
    with asking(INFO, slow, retries=ONE_TRY) as (server, client):
        began_s = time.monotonic()
        client.search_many([Search.text(str(i)) for i in range(18)], concurrency=concurrency)
        took_s = time.monotonic() - began_s
    assert len(server.received) == 1 + 6
    assert took_s >= 0.1 * 6 / concurrency
    assert server.most_at_once == concurrency


def test_what_breaks_a_worker_ends_the_others_and_is_raised(asking: Asking) -> None:
    looked_at: list[int] = []

    class Filter(dict[str, Any]):
        """One that has a bug in its third brother."""

        def values(self) -> Any:
            looked_at.append(self["place"])
            if self["place"] == 2:
                raise ZeroDivisionError
            return super().values()

    searches = [Search.text("red", filter=Filter(place=place)) for place in range(60)]
    script = (INFO, problem(500, "internal_error"))
    with asking(*script, retries=ONE_TRY) as (_, client), pytest.raises(ZeroDivisionError):
        client.search_many(searches, concurrency=2)
    assert 3 <= len(looked_at) < 60


def test_a_concurrency_of_none_is_refused(asking: Asking) -> None:
    with asking(INFO) as (_, client):
        with pytest.raises(ValueError, match="concurrency"):
            client.search_many([], concurrency=0)
        assert client.search_many([]) == []

"""Connections whose clients are slow, greedy, silent or speak something else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from hivlp.service.app import create_app
from hivlp.service.bounds import ConnectionSettings
from hivlp.service.connections import MAX_PIPELINED, TOLD, Connection
from hivlp.service.keys import KeySettings
from hivlp.service.unread import Unread
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, await_ready, serving

HASTY = ConnectionSettings(
    max=8, max_head_bytes=2_048, max_headers=20, head_timeout_s=0.3, answer_timeout_s=0.5
)
GET = b"GET /livez HTTP/1.1\r\n\r\n"
SEARCH = b'{"query": "red"}'


class Wire:
    """A connection without a client's good manners."""

    def __init__(self, client: httpx.Client, received_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if received_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
        self.socket.settimeout(20)
        self.socket.connect((client.base_url.host, client.base_url.port))
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of the next answer."""
        status = int(self._file.readline().split()[1])
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name] = value
        body = self._file.read(int(headers["content-length"]))
        return status, headers, json.loads(body)

    def code(self) -> tuple[int, str]:
        status, headers, body = self.answer()
        assert body["error"]["request_id"] == headers["x-request-id"]
        return status, body["error"]["code"]

    def ended(self) -> bool:
        """Whether the service closes it, rather than say anything."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def send_until_cut_off(self, data: bytes) -> None:
        """For as long as it takes; the test's time is the limit."""
        with contextlib.suppress(ConnectionError):
            while True:
                self.send(data)
                time.sleep(0.001)

    def send_while_taken(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send(data)

    def answers_until_it_ends(self) -> list[tuple[int, dict[str, str], Any]]:
        answers = []
        with contextlib.suppress(ConnectionError):
            while self._file.peek(1):
                answers.append(self.answer())
        return answers

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@contextlib.contextmanager
def wire(client: httpx.Client, received_bytes: int | None = None) -> Iterator[Wire]:
    with contextlib.closing(Wire(client, received_bytes)) as made:
        yield made


def post(path: str = "/search/text", *headers: str, length: int = len(SEARCH)) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    if not any(header.startswith("Transfer-Encoding") for header in headers):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, *headers, "", ""]).encode()


@contextlib.contextmanager
def served(settings: ConnectionSettings = HASTY, **more: Any) -> Iterator[httpx.Client]:
    app = create_app(SMALL.model_copy(update={"connections": settings, **more}), load=World().load)
    with serving(app) as client:
        yield client


@pytest.fixture(scope="module")
def hasty() -> Iterator[httpx.Client]:
    with served() as client:
        yield client


def rejected(client: httpx.Client, reason: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f'hivlp_rejected_total{{reason="{reason}"}}'):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 3_000,
        b"GET /" + b"a" * 3_000,
        b"GET /livez HTTP/1.1\r\n" + b"a" * 3_000,
        b"GET /livez HTTP/1.1\r\n" + b"A: a\r\n" * 21 + b"\r\n",
        b"GET /" + b"a" * 3_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /search/text HTTP/1.1\r\nContent-Length: 9\r\nA: " + b"a" * 2_100 + b"\r\n\r\n{}",
    ],
)
def test_a_head_that_is_too_large_is_refused_before_it_ends(
    hasty: httpx.Client, head: bytes
) -> None:
    before = rejected(hasty, "head_too_large")
    with wire(hasty) as one:
        one.send(head)
        assert one.code() == (431, "head_too_large")
        assert one.ended()
    assert rejected(hasty, "head_too_large") == before + 1


def test_a_head_as_large_as_may_be_is_taken(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 2_000 + b"\r\n\r\n")
        assert one.answer()[0] == 200
        one.send(b"GET /livez HTTP/1.1\r\n" + b"A: a\r\n" * 20 + b"\r\n")
        assert one.answer()[0] == 200


def test_a_slow_head_is_refused_and_counted(hasty: httpx.Client) -> None:
    before = rejected(hasty, "head_timeout")
    with wire(hasty) as one:
        one.send(b"GET /livez HTTP/1.1\r\nHost: ")
        assert one.code() == (408, "head_timeout")
        assert one.ended()
    assert rejected(hasty, "head_timeout") == before + 1


def test_a_head_that_comes_drop_by_drop_has_no_more_time(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(b"GET /livez HTTP/1.1\r\nA: ")
        one.send_until_cut_off(b"a")


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_who_never_asks_is_let_go(hasty: httpx.Client, sent: bytes) -> None:
    with wire(hasty) as one:
        one.send(sent)
        assert one.ended()


def test_a_connection_is_kept_for_the_next_request_and_not_for_ever() -> None:
    with served(HASTY.model_copy(update={"keep_alive_s": 0.2})) as client, wire(client) as one:
        for _ in range(2):
            one.send(post() + SEARCH)
            assert one.answer()[0] == 200
        assert one.ended()


def test_connections_beyond_the_limit_are_told_so_and_probes_answered() -> None:
    patient = HASTY.model_copy(update={"head_timeout_s": 20.0, "keep_alive_s": 20.0})
    with served(patient) as client, contextlib.ExitStack() as opened:
        for _ in range(HASTY.max - 1):  # the client has one
            one = opened.enter_context(wire(client))
            one.send(b"GET /livez HTTP/1.1\r\n\r\n")
            assert one.answer()[0] == 200
        with wire(client) as late:
            late.send(post() + SEARCH)
            status, headers, body = late.answer()
            assert (status, body["error"]["code"]) == (429, "too_many_connections")
            assert headers["retry-after"] == "1"
            assert late.ended()
        for path in ("/livez", "/readyz"):
            with wire(client) as probe:
                probe.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
                status, headers, _ = probe.answer()
                assert (status, headers["connection"]) == (200, "close")
                assert probe.ended()
        many = [opened.enter_context(wire(client)) for _ in range(TOLD + 1)]
        assert many[-1].ended()
        assert rejected(client, "too_many_connections") == 2
        assert f"hivlp_connections {HASTY.max + TOLD}.0" in client.get("/metrics").text


def test_connections_that_ended_make_room() -> None:
    with served(HASTY.model_copy(update={"max": 2})) as client:
        for _ in range(20):
            with wire(client) as one:
                one.send(post() + SEARCH)
                assert one.answer()[0] == 200


def test_who_is_refused_while_still_sending_can_read_why(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(post(length=10_000_000))
        for _ in range(50):
            one.send(b" " * 10_000)
        assert one.code() == (413, "body_too_large")
        assert one.ended()


def test_a_body_that_nobody_reads_has_little_time() -> None:
    keys = KeySettings(api=(SecretStr("a-key-that-is-not-sent"),))
    with served(keys=keys) as client, wire(client) as one:
        one.send(post("/search/text", "Transfer-Encoding: chunked"))
        assert one.code() == (401, "missing_key")
        one.send_until_cut_off(b"5\r\nhello\r\n" * 100)


def test_a_body_that_was_not_waited_for_may_still_end_and_the_connection_go_on(
    hasty: httpx.Client,
) -> None:
    with wire(hasty) as one:
        one.send(post("/nowhere"))
        assert one.code() == (404, "not_found")
        one.send(SEARCH)
        one.send(post() + SEARCH)
        assert one.answer()[0] == 200


def test_requests_sent_at_once_are_answered_in_order(hasty: httpx.Client) -> None:
    asked = b"".join(
        post(length=len(body)) + body
        for body in (b'{"query": "%s"}' % word for word in (b"red", b"green", b"blue"))
    )
    with wire(hasty) as one:
        one.send(asked + b"GET /nowhere HTTP/1.1\r\nHo")
        found = [one.answer()[2]["hits"][0]["id"] for _ in range(3)]
        assert found == ["red", "green", "blue"]
        one.send(b"st: localhost\r\n\r\n")
        assert one.code() == (404, "not_found")


def test_what_follows_a_body_is_no_header() -> None:
    keys = KeySettings(api=(SecretStr("a-key-that-comes-late"),))
    with served(keys=keys) as client, wire(client) as one:
        one.send(post("/search/text", "Transfer-Encoding: chunked"))
        one.send(b"%x\r\n%s\r\n0\r\nX-API-Key: a-key-that-comes-late\r\n\r\n" % (16, SEARCH))
        assert one.code() == (401, "missing_key")


def test_endless_framing_is_cut_off(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(post("/search/text", "Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nTrailer: ")
        one.send_until_cut_off(b"a" * 10_000)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /livez HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_counted_and_not_logged(
    hasty: httpx.Client, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = rejected(hasty, "malformed_request")
    with wire(hasty) as one:
        one.send(sent)
        assert one.code() == (400, "malformed_request")
        assert one.ended()
    assert rejected(hasty, "malformed_request") == before + 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_body_that_breaks_is_told_so(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(post("/search/text", "Transfer-Encoding: chunked") + b"1\r\n{\r\nzz\r\n")
        assert one.code() == (400, "malformed_request")
        assert one.ended()
    await_ready(hasty)


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_passed_over(hasty: httpx.Client, upgrade: str) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMA")
    with wire(hasty) as one:
        one.send(post("/search/text", *offer) + SEARCH[:5])
        one.send(SEARCH[5:] + post() + SEARCH)
        for _ in range(2):
            status, _, body = one.answer()
            assert (status, body["hits"][0]["id"]) == (200, "red")
        one.send("\r\n".join(["GET /livez HTTP/1.1", *offer, "", ""]).encode())
        assert one.answer()[0] == 200


def test_a_proxy_is_not_to_be_had_here(hasty: httpx.Client) -> None:
    with wire(hasty) as one:
        one.send(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
        assert one.answer()[0] in (400, 404)
        assert one.ended()


def test_requests_are_not_queued_without_end(hasty: httpx.Client) -> None:
    before = rejected(hasty, "pipeline_too_long")
    with wire(hasty) as one:
        sender = threading.Thread(target=one.send_while_taken, args=(GET * 100_000,))
        sender.start()
        answers = one.answers_until_it_ends()
        sender.join()
    assert 1 + MAX_PIPELINED <= len(answers) < 1_000
    assert [headers.get("connection") for _, headers, _ in answers[:-1]] == [None] * (
        len(answers) - 1
    )
    assert answers[-1][1]["connection"] == "close"
    assert rejected(hasty, "pipeline_too_long") == before + 1


@pytest.mark.parametrize("offer", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_one_read_queues_a_few_requests_whatever_it_holds(offer: str) -> None:
    queued = asyncio.run(queued_of((f"GET /livez HTTP/1.1\r\n{offer}\r\n").encode() * 10_000))
    assert queued == MAX_PIPELINED


async def queued_of(data: bytes) -> int:
    """How many requests wait once all this came in one read, and how the transport was left."""

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    config = uvicorn.Config(stuck, log_config=None)
    config.load()
    unread = Unread(10**8, time.monotonic)
    made = Connection(
        HASTY, 10**8, unread, str, float, config=config, server_state=ServerState(), app_state={}
    )
    transport = QuietTransport()
    made.connection_made(transport)
    made.data_received(data)
    made.data_received(data)
    assert not transport.reading
    queued = len(made.pipeline)
    for task in made.tasks:
        task.cancel()
    made.connection_lost(None)
    return queued


class QuietTransport(asyncio.Transport):
    """Knows whether more is to be read, and sends nothing."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        pass

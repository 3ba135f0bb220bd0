"""Bodies: how many values, how many bytes at once, and what is done off the event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from hivlp.models.errors import HivlpError
from hivlp.service.app import create_app
from hivlp.service.bodies import (
    OFF_LOOP_BYTES,
    SLICE_CHARS,
    Upload,
    decode_base64,
    off_loop,
    parse_object,
    read_upload,
)
from hivlp.service.errors import ServiceError
from hivlp.service.fetch_settings import FetchSettings
from hivlp.service.fetching import Fetcher
from hivlp.service.middleware import UNCOUNTED_BYTES
from hivlp.service.settings import Limits
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

LIMIT = 10 << 20


@pytest.mark.parametrize("inner", [b"[]", b"{}", b"1", b'"a"', b'{"a":[]}', b"null"])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(inner: bytes) -> None:
    body = b'{"vector": [' + b",".join([inner] * 5_000) + b"]}"
    with pytest.raises(ServiceError, match="more than 1000 values") as caught:
        parse_object(body, 1_000)
    assert (caught.value.status, caught.value.code) == (413, "too_many_values")
    assert len(parse_object(body, 30_000)["vector"]) == 5_000


def test_a_body_at_the_limit_of_values_is_taken() -> None:
    body = b'{"vector":[' + b",".join([b"1"] * 997) + b"]}"
    assert len(parse_object(body, 1_000)["vector"]) == 997
    with pytest.raises(ServiceError):
        parse_object(body, 999)


def test_a_long_text_is_one_value() -> None:
    body = b'{"image": "' + b"A" * 1_000_000 + b'"}'
    assert len(parse_object(body, 100)["image"]) == 1_000_000


def test_the_service_says_how_many_values_it_takes(shared: httpx.Client) -> None:
    body = {"vector": [1] * 20_000}
    app = create_app(
        SMALL.model_copy(
            update={"limits": SMALL.limits.model_copy(update={"max_body_values": 100})}
        ),
        load=World().load,
    )
    with serving(app) as client:
        for path in ("/search/vector", "/search/image", "/embed/text", "/search/batch"):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                413,
                "too_many_values",
            )
    assert shared.post("/search/vector", json=body).status_code == 422


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49_151, 49_152, 49_153, 98_304, 200_001])
def test_base64_in_slices_is_what_it_is_at_once(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    text = base64.b64encode(data[:size]).decode()
    assert decode_base64(text, LIMIT) == data[:size]
    assert decode_base64(f"data:image/png;base64,{text}", LIMIT) == data[:size]


def broken(place: int, by: str) -> str:
    text = "A" * (3 * SLICE_CHARS)
    return text[:place] + by + text[place + len(by) :]


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AA",
        "AAA",
        "====",
        "AA=A",
        "AAAA\n",
        " AAAA",
        "AA-_",
        "ÄAAA",
        broken(SLICE_CHARS - 2, "=="),
        broken(SLICE_CHARS - 1, "="),
        broken(2 * SLICE_CHARS - 4, "===="),
        broken(SLICE_CHARS + 1, "*"),
        broken(SLICE_CHARS, "=="),
        broken(0, "\n"),
        "A" * (SLICE_CHARS + 1),
    ],
)
def test_what_is_not_base64_is_refused_wherever_it_breaks(text: str) -> None:
    with pytest.raises(HivlpError, match="not valid base64"):
        decode_base64(text, LIMIT)


LONG = "A" * (2 * OFF_LOOP_BYTES)
ESCAPED = LONG[:-3] + "\\/+/"


@pytest.mark.parametrize(
    "body",
    [
        f'{{"image": "{LONG}", "k": 3}}',
        f'{{"k": 3, "image"\n:\t"{LONG}"}}',
        f'{{"image": "{ESCAPED}"}}',
        f'{{"image": "{LONG}", "image": "AAAA"}}',
        f'{{"image": "AAAA", "image": "{LONG}"}}',
        f'{{"filter": {{"image": "{LONG}"}}, "image": "AAAA"}}',
        f'{{"\\"image": "{LONG}", "image": "AAAA"}}',
        f'{{"im\\u0061ge": "{LONG}"}}',
        f'{{"query": "\\"image\\": \\"{LONG}", "image": "AAAA"}}',
        '{"image": "AAAA"}',
    ],
)
def test_a_long_picture_is_read_as_json_reads_it(body: str) -> None:
    whole = json.loads(body)
    assert len(whole) == len(set(whole))
    image = whole.pop("image")

    async def read() -> Upload:
        async def receive() -> Message:
            return {"type": "http.request", "body": body.encode()}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        return await read_upload(
            Request(scope, receive), Limits(), Fetcher(FetchSettings(), LIMIT).fetch
        )

    upload = asyncio.run(read())
    assert upload.image == base64.b64decode(image)
    assert upload.fields == whole


@pytest.mark.parametrize("end", ['"', '", ', '"}}', '", "k": }', "\x00", '\n"}', '\\q"}'])
def test_what_breaks_around_a_long_picture_is_refused(shared: httpx.Client, end: str) -> None:
    body = f'{{"image": "{LONG[:20_000]}{LONG[:20_000]}{end}'
    answer = shared.post(
        "/search/image", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 422)


def test_large_bodies_are_read_in_a_thread_and_small_ones_are_not() -> None:
    async def run() -> None:
        here = threading.get_ident()
        assert await off_loop(OFF_LOOP_BYTES, threading.get_ident) == here
        assert await off_loop(OFF_LOOP_BYTES + 1, threading.get_ident) != here

    asyncio.run(run())


HELD = Limits(
    max_body_bytes=200_000, max_image_bytes=100_000, max_held_bytes=200_000, max_text_chars=50
)


def begin(client: httpx.Client, length: int, sent: int) -> socket.socket:
    """A request whose body has begun to come."""
    url = client.base_url
    connection = socket.create_connection((url.host, url.port or 0), timeout=20)
    head = f"POST /search/text HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + b" " * sent)
    return connection


def finish(connection: socket.socket, missing: int) -> bytes:
    body = b'{"query": "red"}'
    connection.sendall(b" " * (missing - len(body)) + body)
    return connection.recv(12)


def test_bodies_on_their_way_are_bounded_together_and_small_ones_go_on() -> None:
    app = create_app(SMALL.model_copy(update={"limits": HELD}), load=World().load)
    with serving(app) as client, contextlib.ExitStack() as stack:
        first = stack.enter_context(begin(client, 190_000, 189_000))
        while app.state.hivlp.body_room.held < 189_000 - UNCOUNTED_BYTES:
            time.sleep(0.01)
        large = {"query": "red", "filter": {"x": " " * 190_000}}
        refused = client.post("/search/text", json=large)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "bytes of bodies" in refused.json()["error"]["message"]
        assert client.post("/search/text", json={"query": "red"}).status_code == 200
        small = {"query": "red", "filter": {"x": " " * (UNCOUNTED_BYTES - 1_000)}}
        assert client.post("/search/text", json=small).status_code == 422
        assert finish(first, 1_000) == b"HTTP/1.1 200"
        second = stack.enter_context(begin(client, 190_000, 0))
        assert finish(second, 190_000) == b"HTTP/1.1 200"


def test_a_client_that_leaves_gives_its_room_back() -> None:
    app = create_app(SMALL.model_copy(update={"limits": HELD}), load=World().load)
    with serving(app) as client:
        room = app.state.hivlp.body_room
        for i in range(1, 6):
            leaver = begin(client, 190_000, 189_000)
            while not room.held:  # it is being read: leaving before would be no request at all
                time.sleep(0.01)
            leaver.close()
            left = f'_seconds_count{{route="/search/text",status="499"}} {i}.0'
            while left not in client.get("/metrics").text:
                time.sleep(0.01)
            assert room.held == 0
        large = {"query": "red", "filter": {"x": " " * 190_000}}
        assert client.post("/search/text", json=large).status_code == 422

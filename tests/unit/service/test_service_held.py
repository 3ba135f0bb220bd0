"""What is held of requests and answers, where, and for how long."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from hivlp.service.app import create_app
from hivlp.service.bodies import read_json, read_upload
from hivlp.service.errors import BodyTooLarge
from hivlp.service.keys import KeySettings
from hivlp.service.middleware import Edge
from hivlp.service.settings import Limits
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

KEY = "k" * 32
PICTURE = b"p" * (3 << 20)


def request(kind: str, *parts: bytes, **headers: str) -> Request:
    """A request whose body comes in these parts."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    named = {"content-type": kind, **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def no_fetch(_: str) -> bytes:
    raise AssertionError("nothing is fetched")


def test_a_form_is_never_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    asked = request("multipart/form-data; boundary=x", head, PICTURE, b"\r\n--x--\r\n")
    assert asyncio.run(read_upload(asked, Limits(), no_fetch)).image == PICTURE


def test_json_without_a_picture_is_held_to_less() -> None:
    limits = Limits(max_json_bytes=4_096)
    body = b'{"text": "%s"}'
    assert asyncio.run(read_json(request("application/json", body % b"a"), limits)) == {"text": "a"}
    large = body % (b"a" * 5_000)
    said = request("application/json", large, content_length=str(len(large)))
    for asked in (said, request("application/json", large[:3_000], large[3_000:])):
        with pytest.raises(BodyTooLarge, match="4096"):
            asyncio.run(read_json(asked, limits))
    asked = request("application/json", large)
    assert len(asyncio.run(read_json(asked, limits, pictures=True))["text"]) == 5_000


@pytest.mark.parametrize(
    "path", ["/search/text", "/search/similar", "/search/vector", "/embed/text"]
)
def test_no_text_of_megabytes_is_taken(path: str) -> None:
    app = create_app(SMALL.model_copy(update={"limits": Limits()}), load=World().load)
    with serving(app) as client:
        response = client.post(path, json={"query": "a" * (1 << 20) + "\U0001f600"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_an_answer_that_is_not_read_yet_is_counted_as_held() -> None:
    app = create_app(SMALL, load=World().load)
    room = app.state.hivlp.body_room
    seen = []

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["hold"](50_000)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50_000})

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: Any) -> None:
        seen.append(room.held)

    edge = Edge(answering, metrics=app.state.hivlp.metrics, limits=SMALL.limits, room=room)
    scope = {"type": "http", "method": "GET", "path": "/items/a/image", "headers": []}
    asyncio.run(edge(scope, receive, send))
    assert seen == [50_000, 50_000]
    assert room.held == 0


def test_what_a_key_opens_is_kept_by_nobody_else(shared: httpx.Client) -> None:
    app = create_app(SMALL.model_copy(update={"keys": KeySettings.model_validate({"api": KEY})}),
                     load=World().load)  # fmt: skip
    with serving(app) as client:
        answer = client.get("/info", headers={"X-API-Key": KEY})
        assert answer.headers["cache-control"] == "private, no-store"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        page = client.get("/", headers={"X-API-Key": KEY})
        assert page.headers["cache-control"].startswith("private, ")
    assert "cache-control" not in shared.get("/info").headers

"""Whatever bytes or values come in, the answer is ours: 200 or a 4xx with our body, never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivlp.service.app import create_app
from hivlp.service.schemas import TextSearch
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

RELAXED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(sorted(TextSearch.model_fields)), VALUES, max_size=6)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(create_app(SMALL, load=World().load)) as client:
        yield client


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"code", "message", "param", "request_id"}


@RELAXED
@given(fields=FIELDS)
def test_any_values_in_known_fields(client: httpx.Client, fields: dict[str, Any]) -> None:
    for kind in ("text", "similar", "vector"):
        check(client.post(f"/search/{kind}", json=fields))
    check(client.post("/search/batch", json={"searches": [fields]}))


@RELAXED
@given(text=st.text(alphabet=st.characters(categories=("L", "M", "N", "S", "C", "Z")), max_size=60))
def test_any_text(client: httpx.Client, text: str) -> None:
    body = json.dumps({"query": text}).encode()  # escapes what UTF-8 has no bytes for
    check(client.post("/search/text", content=body, headers={"Content-Type": "application/json"}))


@RELAXED
@given(body=st.binary(max_size=200))
def test_any_bytes(client: httpx.Client, body: bytes) -> None:
    for path in ("/search/text", "/search/image"):
        check(client.post(path, content=body, headers={"Content-Type": "application/json"}))
    check(client.post("/search/image", files={"image": body}))
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    check(client.post("/search/image", content=b"--x\r\n" + body + b"\r\n--x--\r\n", headers=form))


@RELAXED
@given(path=st.text(max_size=30))
def test_any_item_id(client: httpx.Client, path: str) -> None:
    for suffix in ("", "/image", "/image?size=20"):
        quoted = "".join(f"%{byte:02X}" for byte in path.encode("utf-8"))
        check(client.get(f"/items/{quoted}{suffix}"))

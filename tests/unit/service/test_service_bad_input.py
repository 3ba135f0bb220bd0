"""Whatever is sent: a 4xx in our form that names the field, and the next request works."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from hivlp.service.bodies import MAX_BLAMED_BYTES, parse_object
from hivlp.service.errors import MAX_QUOTED_CHARS, Malformed, Problem
from hivlp.service.schemas import BatchSearch, TextSearch, VectorSearch
from tests.unit.service.fakes_service import FINEST
from tests.unit.service.pictures_service import noisy_jpeg, picture
from tests.unit.service.serving_app import SMALL

JSON = {"Content-Type": "application/json"}
LIMITS = SMALL.limits
DEEP = ".".join(["query", *["0"] * 900])
GOOD = {"query": "red"}


def expect(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    """Our error body, and nothing else."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"code", "message", "param", "request_id"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def still_works(client: httpx.Client) -> None:
    answer = client.post("/search/text", json=GOOD)
    assert answer.status_code == 200
    assert answer.json()["hits"][0]["id"] == "red"


FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("empty text", {"query": ""}, "empty_text", "query"),
    ("blank text", {"query": " \t\n "}, "empty_text", "query"),
    ("invisible text", {"query": "\u200b\u2060"}, "empty_text", "query"),
    ("nothing for the tokenizer", {"query": "∅"}, "empty_text", "query"),
    ("too long", {"query": "x" * (LIMITS.max_text_chars + 1)}, "text_too_long", "query"),
    ("NUL", {"query": "a\x00b"}, "invalid_text", "query"),
    ("control character", {"query": "a\x07b"}, "invalid_text", "query"),
    ("no query", {"k": 3}, "missing_field", "query"),
    ("number as text", {"query": 5}, "invalid_value", "query"),
    ("list as text", {"query": ["red"]}, "invalid_value", "query"),
    ("null as text", {"query": None}, "invalid_value", "query"),
    ("text as number", {**GOOD, "k": "5"}, "invalid_value", "k"),
    ("fraction as number", {**GOOD, "k": 1.5}, "invalid_value", "k"),
    ("boolean as number", {**GOOD, "k": True}, "invalid_value", "k"),
    ("number as boolean", {**GOOD, "explain": 1}, "invalid_value", "explain"),
    ("k = 0", {**GOOD, "k": 0}, "out_of_range", "k"),
    ("k negative", {**GOOD, "k": -1}, "out_of_range", "k"),
    ("k over the maximum", {**GOOD, "k": LIMITS.max_k + 1}, "out_of_range", "k"),
    ("k absurd", {**GOOD, "k": 2**70}, "invalid_value", "k"),
    ("offset negative", {**GOOD, "offset": -1}, "out_of_range", "offset"),
    ("offset over", {**GOOD, "offset": LIMITS.max_offset + 1}, "out_of_range", "offset"),
    ("unknown field", {**GOOD, "top_k": 5}, "unknown_field", "top_k"),
    ("unknown modality", {**GOOD, "modality": "audio"}, "invalid_value", "modality"),
    ("unknown plan", {**GOOD, "plan": "fast"}, "invalid_value", "plan"),
    ("unknown index", {**GOOD, "index": "nowhere"}, "no_such_index", "index"),
    ("index of no name", {**GOOD, "index": "../etc"}, "no_such_index", "index"),
    (
        "unknown snapshot",
        {**GOOD, "snapshot": "20990101T000000-000000"},
        "no_such_snapshot",
        "snapshot",
    ),
    ("max_level = 0", {**GOOD, "max_level": 0}, "out_of_range", "max_level"),
    ("max_level too deep", {**GOOD, "max_level": 4}, "invalid_plan", "max_level"),
    ("cascade of no list", {**GOOD, "cascade": "wide"}, "invalid_value", "cascade"),
    (
        "cascade without keep",
        {**GOOD, "cascade": [{"level": 1}]},
        "missing_field",
        "cascade.0.keep",
    ),
    (
        "cascade keep 0",
        {**GOOD, "cascade": [{"level": 1, "keep": 0}]},
        "out_of_range",
        "cascade.0.keep",
    ),
    (
        "cascade keep over",
        {**GOOD, "cascade": [{"level": 1, "keep": 501}]},
        "out_of_range",
        "cascade.0.keep",
    ),
    (
        "cascade growing",
        {**GOOD, "cascade": [{"level": 1, "keep": 20}, {"level": 2, "keep": 30}]},
        "invalid_plan",
        "cascade",
    ),
    (
        "cascade with exact",
        {**GOOD, "plan": "exact", "cascade": [{"level": 3, "keep": 20}]},
        "invalid_plan",
        "cascade",
    ),
    (
        "cascade beyond max_level",
        {**GOOD, "max_level": 1, "cascade": [{"level": 2, "keep": 20}]},
        "invalid_plan",
        "cascade",
    ),
    ("metadata of no list", {**GOOD, "with_metadata": 5}, "invalid_value", "with_metadata"),
    (
        "metadata of no names",
        {**GOOD, "with_metadata": ["name", 5]},
        "invalid_value",
        "with_metadata.1",
    ),
    ("unknown metadata", {**GOOD, "with_metadata": ["shoe"]}, "invalid_plan", "with_metadata"),
    ("too much metadata", {**GOOD, "with_metadata": ["n"] * 65}, "out_of_range", "with_metadata"),
    ("filter of no object", {**GOOD, "filter": "a = 1"}, "invalid_value", "filter"),
    ("filter unread", {**GOOD, "filter": {"a": 1}}, "invalid_filter", "filter"),
    (
        "filter of an unknown column",
        {**GOOD, "filter": {"not": {"field": "shoe", "eq": 1}}},
        "invalid_filter",
        "filter.not.eq",
    ),
    (
        "filter of the wrong type",
        {**GOOD, "filter": {"and": [{"field": "length", "eq": "three"}]}},
        "invalid_filter",
        "filter.and.0.eq",
    ),
    ("rerank", {**GOOD, "rerank": True}, "not_available", "rerank"),
    ("rerank_k", {**GOOD, "rerank_k": 5}, "invalid_value", "rerank_k"),
    ("no rerank_k", {**GOOD, "rerank": True, "rerank_k": 0}, "out_of_range", "rerank_k"),
    ("much rerank_k", {**GOOD, "rerank": True, "rerank_k": 101}, "out_of_range", "rerank_k"),
    ("rerank as text", {**GOOD, "rerank": "yes"}, "invalid_value", "rerank"),
    ("no deadline", {**GOOD, "rerank": True, "deadline_ms": 0}, "out_of_range", "deadline_ms"),
    ("rerank_k as text", {**GOOD, "rerank": True, "rerank_k": "5"}, "invalid_value", "rerank_k"),
    ("half a rerank_k", {**GOOD, "rerank": True, "rerank_k": 2.5}, "invalid_value", "rerank_k"),
    ("a rerank of nothing", {**GOOD, "rerank": None}, "invalid_value", "rerank"),
    (
        "deadline as text",
        {**GOOD, "rerank": True, "deadline_ms": "soon"},
        "invalid_value",
        "deadline_ms",
    ),
    (
        "early exit of a funnel",
        {**GOOD, "early_exit": True, "plan": "funnel"},
        "invalid_plan",
        "early_exit",
    ),
    (
        "early exit of exact",
        {**GOOD, "early_exit": True, "plan": "exact"},
        "invalid_plan",
        "early_exit",
    ),
    ("early exit of no kind", {**GOOD, "early_exit": "yes"}, "invalid_value", "early_exit"),
    ("min_score", {**GOOD, "min_score": "high"}, "invalid_value", "min_score"),
    ("deadline_ms", {**GOOD, "deadline_ms": 600_001}, "out_of_range", "deadline_ms"),
    (
        "an older snapshot",
        {**GOOD, "snapshot": "20250101T000000-000000"},
        "not_available",
        "snapshot",
    ),
]


@pytest.mark.parametrize(
    ("body", "code", "param"), [f[1:] for f in FIELDS], ids=[f[0] for f in FIELDS]
)
def test_a_bad_field_is_refused_by_name(
    shared: httpx.Client, body: dict[str, Any], code: str, param: str
) -> None:
    status = 404 if code.startswith("no_such") else 422
    expect(shared.post("/search/text", json=body), status, code, param)
    still_works(shared)


RAW: list[tuple[str, bytes, int, str, str | None]] = [
    ("lone surrogate", b'{"query": "\\ud83d"}', 422, "invalid_text", "query"),
    (
        "lone surrogate in a list",
        b'{"query": "a", "with_metadata": ["\\udc00"]}',
        422,
        "invalid_text",
        "with_metadata.0",
    ),
    ("lone surrogate as a name", b'{"query": "a", "\\ud83d": 1}', 422, "invalid_text", "body"),
    ("lone surrogate, and no JSON", b'{"query": "\\ud83d"', 400, "malformed_body", None),
    ("surrogate in UTF-8", b'{"query": "\xed\xa0\xbd"}', 400, "malformed_body", None),
    ("not UTF-8", b'{"query": "\xff\xfe"}', 400, "malformed_body", None),
    ("UTF-16", '{"query": "red"}'.encode("utf-16"), 400, "malformed_body", None),
    ("empty", b"", 400, "malformed_body", None),
    ("cut", b'{"query": "re', 400, "malformed_body", None),
    ("a list", b'["red"]', 400, "malformed_body", None),
    ("null", b"null", 400, "malformed_body", None),
    ("NaN", b'{"query": "red", "k": NaN}', 400, "malformed_body", None),
    ("Infinity", b'{"query": "red", "min_score": Infinity}', 400, "malformed_body", None),
    (
        "a number beyond doubles",
        b'{"query": "red", "min_score": 1e999}',
        400,
        "malformed_body",
        None,
    ),
    (
        "deeply nested",
        b'{"query": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        400,
        "malformed_body",
        None,
    ),
    (
        "deeply nested surrogate",
        b'{"query": ' + b"[" * 900 + b'"\\ud83d"' + b"]" * 900 + b"}",
        422,
        "invalid_text",
        DEEP,
    ),
    (
        "too large",
        b'{"query": "' + b"x" * LIMITS.max_body_bytes + b'"}',
        413,
        "body_too_large",
        None,
    ),
]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"), [r[1:] for r in RAW], ids=[r[0] for r in RAW]
)
def test_a_broken_body_is_refused(
    shared: httpx.Client, body: bytes, status: int, code: str, param: str | None
) -> None:
    expect(shared.post("/search/text", content=body, headers=JSON), status, code, param)
    still_works(shared)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_limits_are_inclusive(shared: httpx.Client, over: int) -> None:
    for field, limit in (("k", LIMITS.max_k), ("offset", LIMITS.max_offset)):
        answer = shared.post("/search/text", json={**GOOD, field: limit + over})
        assert answer.status_code == (422 if over > 0 else 200), field
    text = shared.post("/search/text", json={"query": "x" * (LIMITS.max_text_chars + over)})
    assert text.status_code == (422 if over > 0 else 200)


def test_a_chunked_body_without_a_length_is_cut_off_at_the_limit(shared: httpx.Client) -> None:
    chunks = (b"x" * 10_000 for _ in range(100))
    response = shared.post("/search/text", content=chunks, headers=JSON)
    expect(response, 413, "body_too_large", None)
    still_works(shared)


def test_a_body_that_is_not_said_to_be_json_is_refused(shared: httpx.Client) -> None:
    response = shared.post("/search/text", content=json.dumps(GOOD).encode())
    expect(response, 415, "unsupported_media_type", None)
    response = shared.post(
        "/search/image", content=picture(), headers={"Content-Type": "image/png"}
    )
    expect(response, 415, "unsupported_media_type", None)


PICTURES: list[tuple[str, bytes, int, str]] = [
    ("empty file", b"", 422, "empty_image"),
    ("text named .png", b"this is no picture", 415, "unsupported_image"),
    ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "unsupported_image"),
    ("HEIC", b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00", 415, "unsupported_image"),
    ("PDF", b"%PDF-1.7", 415, "unsupported_image"),
    ("truncated JPEG", noisy_jpeg()[: len(noisy_jpeg()) // 2], 422, "broken_image"),
    ("truncated PNG", picture(size=(90, 90))[:60], 422, "broken_image"),
    ("over the pixel limit", picture(size=(101, 100)), 413, "image_too_large"),
    (
        "over the byte limit",
        b"\x89PNG\r\n\x1a\n" + b"x" * LIMITS.max_image_bytes,
        413,
        "image_too_large",
    ),
]


@pytest.mark.parametrize(
    ("data", "status", "code"), [p[1:] for p in PICTURES], ids=[p[0] for p in PICTURES]
)
def test_a_bad_picture_is_refused_in_both_forms(
    shared: httpx.Client, data: bytes, status: int, code: str
) -> None:
    as_file = shared.post("/search/image", files={"image": ("photo.png", data, "image/png")})
    expect(as_file, status, code, "image")
    as_text = shared.post("/search/image", json={"image": base64.b64encode(data).decode()})
    expect(as_text, status, code, "image")
    still_works(shared)
    good = shared.post("/search/image", files={"image": picture()})
    assert good.json()["hits"][0]["id"] == "red"


def test_a_form_is_read_strictly(shared: httpx.Client) -> None:
    image = {"image": ("a.png", picture(), "image/png")}
    good = shared.post("/search/image", files=image, data={"k": "2", "with_metadata": '["name"]'})
    assert good.json()["returned"] == 2
    assert set(good.json()["hits"][0]["metadata"]) == {"name"}

    def send(**fields: str) -> httpx.Response:
        return shared.post("/search/image", files=image, data=fields)

    expect(send(k="many"), 422, "invalid_value", "k")
    expect(send(k='"5"'), 422, "invalid_value", "k")
    expect(send(k="0"), 422, "out_of_range", "k")
    expect(send(top_k="5"), 422, "unknown_field", "top_k")
    expect(send(rerank="true"), 422, "not_available", "rerank")
    nothing = shared.post("/search/image", files={"other": picture()})
    expect(nothing, 422, "invalid_value", "other")
    only_fields = shared.post("/search/image", files={"k": (None, "5")})
    expect(only_fields, 422, "missing_field", "image")
    as_text = shared.post("/search/image", files={"image": (None, "hello")})
    expect(as_text, 422, "invalid_value", "image")
    twice = [("image", ("a.png", picture())), ("image", ("b.png", picture()))]
    assert shared.post("/search/image", files=twice).status_code in (400, 422)
    boundless = shared.post(
        "/search/image", content=b"--x", headers={"Content-Type": "multipart/form-data"}
    )
    expect(boundless, 400, "malformed_body", None)
    still_works(shared)


@pytest.mark.parametrize(
    ("image", "code"),
    [
        ("not base64!", "invalid_value"),
        ("aGVsbG8", "invalid_value"),
        ("aGVs bG8=", "invalid_value"),
        ("é", "invalid_value"),
        ("data:image/png,rawbytes", "invalid_value"),
        ("data:image/png;base64", "invalid_value"),
        (5, "invalid_value"),
        (None, "invalid_value"),
        ("http://127.0.0.1/cat.png", "not_available"),
        ("https://example.com/cat.png", "not_available"),
    ],
)
def test_bad_base64_is_refused_not_guessed(shared: httpx.Client, image: object, code: str) -> None:
    expect(shared.post("/search/image", json={"image": image}), 422, code, "image")
    still_works(shared)


def test_a_picture_in_json_is_needed_and_may_be_a_data_uri(shared: httpx.Client) -> None:
    expect(shared.post("/search/image", json={"k": 3}), 422, "missing_field", "image")
    uri = "data:image/png;base64," + base64.b64encode(picture((0, 255, 0))).decode()
    answer = shared.post("/search/image", json={"image": uri, "k": 1})
    assert answer.json()["hits"][0]["id"] == "green"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 422, "missing_field", "id"),
        ({"id": ""}, 422, "invalid_value", "id"),
        ({"id": 5}, 422, "invalid_value", "id"),
        ({"id": "nobody"}, 404, "no_such_item", "id"),
        ({"id": "a\x00"}, 422, "invalid_text", "id"),
        ({"id": "red", "query": "x"}, 422, "unknown_field", "query"),
    ],
)
def test_similar_refuses_what_is_no_item(
    shared: httpx.Client, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    expect(shared.post("/search/similar", json=body), status, code, param)
    still_works(shared)


@pytest.mark.parametrize(
    ("vector", "code", "param"),
    [
        ([], "out_of_range", "vector"),
        ([1.0] * (FINEST - 1), "invalid_vector", "vector"),
        ([0.0] * FINEST, "invalid_vector", "vector"),
        (["1"] * FINEST, "invalid_value", "vector.0"),
        ([None] * FINEST, "invalid_value", "vector.0"),
        ("1,2", "invalid_value", "vector"),
    ],
)
def test_vector_refuses_what_is_no_vector(
    shared: httpx.Client, vector: object, code: str, param: str
) -> None:
    expect(shared.post("/search/vector", json={"vector": vector}), 422, code, param)
    still_works(shared)


def test_batch_answers_each_search_by_itself(shared: httpx.Client) -> None:
    searches = [
        {"kind": "text", "query": "red", "k": 1},
        {"kind": "text", "query": ""},
        {"kind": "shoe"},
        {"kind": "image", "image": "?"},
    ]
    body = shared.post("/search/batch", json={"searches": searches}).json()
    first, *rest = body["results"]
    assert first["hits"][0]["id"] == "red"
    assert [one["error"]["code"] for one in rest] == [
        "empty_text",
        "invalid_value",
        "invalid_value",
    ]
    assert [one["error"]["param"] for one in rest] == ["query", "kind", "image"]


@pytest.mark.parametrize(
    ("searches", "code", "param"),
    [
        ([], "out_of_range", "searches"),
        ([GOOD] * 5, "out_of_range", "searches"),
        (["red"] * 5, "out_of_range", "searches"),
        ("red", "invalid_value", "searches"),
        (["red"], "invalid_value", "searches.0"),
    ],
)
def test_batch_refuses_what_is_no_batch(
    shared: httpx.Client, searches: object, code: str, param: str
) -> None:
    expect(shared.post("/search/batch", json={"searches": searches}), 422, code, param)
    still_works(shared)


def test_unknown_routes_and_methods_have_our_body(shared: httpx.Client) -> None:
    expect(shared.get("/wp-admin.php"), 404, "not_found", None)
    expect(shared.get("/search/text"), 405, "method_not_allowed", None)
    expect(shared.post("/search/text/", json=GOOD), 404, "not_found", None)


def test_embed_refuses_like_search(shared: httpx.Client) -> None:
    expect(shared.post("/embed/text", json={"text": " "}), 422, "empty_text", "text")
    expect(shared.post("/embed/text", json={"text": "a", "k": 1}), 422, "unknown_field", "k")
    empty = shared.post("/embed/image", files={"image": b""})
    expect(empty, 422, "empty_image", "image")


MANY = 10_000


@pytest.mark.parametrize(
    ("model", "body", "first"),
    [
        (TextSearch, {**GOOD, **{f"x{i}": 1 for i in range(MANY)}}, ("x0",)),
        (
            TextSearch,
            {**GOOD, "cascade": [{"level": 0, "keep": 1}] * MANY},
            ("cascade", 0, "level"),
        ),
        (TextSearch, {**GOOD, "cascade": [{"level": 1, "keep": 1}] * MANY}, ("cascade",)),
        (
            TextSearch,
            {**GOOD, "cascade": [{"level": 1, "keep": 1, **{f"x{i}": 1 for i in range(MANY)}}]},
            ("cascade", 0, "x0"),
        ),
        (VectorSearch, {"vector": [""] * MANY}, ("vector", 0)),
        (BatchSearch, {"searches": [1] * MANY}, ("searches", 0)),
    ],
)
def test_many_mistakes_make_one_error(
    model: type[TextSearch], body: dict[str, Any], first: tuple[str | int, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert [error["loc"] for error in caught.value.errors()] == [first]


def test_many_wrong_or_surplus_columns_make_few_errors() -> None:
    for names in ([1] * MANY, ["name"] * MANY):
        with pytest.raises(ValidationError) as caught:
            TextSearch.model_validate({**GOOD, "with_metadata": names})
        assert caught.value.error_count() <= 2


def test_a_broken_text_is_not_looked_for_in_a_huge_body() -> None:
    huge = b'{"image": "' + b"A" * MAX_BLAMED_BYTES + b'", "index": "\\ud83d"}'
    with pytest.raises(Malformed):
        parse_object(huge, 100)


def test_what_was_sent_is_not_quoted_without_end() -> None:
    long = "k" * 1_000_000
    error = Problem(422, "unknown_field", f"{long}: is no field", long).body("1")["error"]
    assert len(error["message"]) == len(error["param"]) == MAX_QUOTED_CHARS + 1

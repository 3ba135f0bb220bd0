"""The client knows what the service takes, field for field, and imports nothing that serves."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import orjson
import pytest
from pydantic import BaseModel

import hivlp.service.client
from hivlp.models.levels import Modality
from hivlp.service.bounds import ConnectionSettings
from hivlp.service.client import AsyncClient, Client, Search, clients, endpoints, errors
from hivlp.service.client.exchange import Call
from hivlp.service.client.fields import BuildOptions, Options, Width, encode
from hivlp.service.schemas import (
    BatchSearch,
    EmbedImage,
    EmbedText,
    ImageSearch,
    PlanChoice,
    PutItem,
    SearchOptions,
    SimilarSearch,
    StartBuild,
    TextSearch,
    VectorSearch,
)
from hivlp.service.schemas import Width as ServedWidth
from hivlp.service.settings import Limits

DOCS = Path(__file__).resolve().parents[3] / "docs"
# Every option, none as it is by default.
EVERY: Options = {
    "index": "other",
    "snapshot": "v1",
    "k": 3,
    "offset": 2,
    "modality": "text",
    "filter": {"field": "colour", "in": ("red", "blue")},
    "with_metadata": ("name",),
    "explain": True,
    "rerank": True,
    "rerank_k": 7,
    "plan": "cascade",
    "cascade": ({"level": 1, "keep": 9},),
    "max_level": 2,
    "early_exit": True,
    "min_score": 0.25,
    "deadline_ms": 80.5,
}
ASKED: list[tuple[Search, type[SearchOptions], set[str]]] = [
    (Search.text("red", **EVERY), TextSearch, {"query"}),
    (Search.image(b"bytes", **EVERY), ImageSearch, {"image"}),
    (Search.similar("red", **EVERY), SimilarSearch, {"id"}),
    (Search.vector(np.ones(4, np.float32), **EVERY), VectorSearch, {"vector"}),
]
KINDS = [asked.kind for asked, _, _ in ASKED]
# Every endpoint with every parameter: what it is called in the document, and the call.
CALLS: dict[str, Call[Any]] = {
    "POST /search/text": endpoints.search_text("red"),
    "POST /search/image": endpoints.search_image(b"bytes"),
    "POST /search/similar": endpoints.search_similar("red"),
    "POST /search/vector": endpoints.search_vector([1.0]),
    "POST /search/batch": endpoints.search_batch([Search.text("red")]),
    "POST /embed/text": endpoints.embed_text("red"),
    "POST /embed/image": endpoints.embed_image(b"bytes"),
    "GET /items/{id}": endpoints.get_item("a"),
    "PUT /items/{id}": endpoints.put_item("a"),
    "DELETE /items/{id}": endpoints.delete_item("a"),
    "GET /items/{id}/image": endpoints.item_image("a", size=16),
    "GET /indexes": endpoints.indexes(),
    "GET /indexes/{name}/snapshots": endpoints.snapshots("a"),
    "POST /admin/indexes/{name}/activate": endpoints.activate("v1", index="a"),
    "POST /admin/indexes/{name}/rollback": endpoints.rollback("a"),
    "GET /admin/indexes/{name}/activation": endpoints.activation("a"),
    "POST /admin/builds": endpoints.start_build("/data"),
    "GET /admin/builds": endpoints.builds(limit=5),
    "GET /admin/builds/{id}": endpoints.build("a"),
    "DELETE /admin/builds/{id}": endpoints.cancel_build("a"),
    "GET /info": endpoints.info(),
    "GET /health": endpoints.health(),
    "GET /readyz": endpoints.ready(),
}
# For Kubernetes and Prometheus.
OF_NO_CLIENT = {"GET /livez", "GET /metrics"}


def operations() -> dict[str, dict[str, Any]]:
    document = orjson.loads((DOCS / "openapi.json").read_bytes())
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_there_is_a_method_for_every_endpoint() -> None:
    assert set(CALLS) == set(operations()) - OF_NO_CLIENT
    for name, call in CALLS.items():
        method, _, path = name.partition(" ")
        assert call.method == method
        assert re.fullmatch(re.sub(r"\{\w+\}", "a", path), call.path)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_parameter_of_a_query_string_can_be_given(name: str) -> None:
    known = {
        one["name"] for one in operations()[name].get("parameters", []) if one["in"] == "query"
    }
    assert set(CALLS[name].params) == known


def test_the_options_of_a_search_are_those_that_the_service_takes() -> None:
    assert set(Options.__annotations__) == set(SearchOptions.model_fields) == set(EVERY)
    hints = get_type_hints(Options)
    assert get_args(hints["plan"]) == get_args(PlanChoice)
    assert hints["modality"] == Modality
    assert set(Width.__annotations__) == set(ServedWidth.model_fields)


@pytest.mark.parametrize(
    ("asked", "model", "own"), ASKED, ids=[asked.kind for asked, _, _ in ASKED]
)
def test_every_field_of_a_search_arrives_as_it_was_given(
    asked: Search, model: type[SearchOptions], own: set[str]
) -> None:
    sent = orjson.loads(encode(asked.fields()))
    assert set(sent) == set(EVERY) | own
    assert set(model.model_fields) | own == set(sent)
    if asked.kind == "image":
        assert sent.pop("image") == "Ynl0ZXM="
    read = model.model_validate(sent)
    assert read.model_fields_set == set(sent)
    for name in EVERY:
        default = model.model_fields[name].get_default(call_default_factory=True)
        assert getattr(read, name) != default, name


@pytest.mark.parametrize(
    ("make", "model", "beside"),
    [
        (endpoints.put_item, PutItem, {"item_id", "index", "image"}),
        (endpoints.embed_text, EmbedText, set()),
        (endpoints.embed_image, EmbedImage, {"image"}),
        (endpoints.search_batch, BatchSearch, set()),
    ],
)
def test_other_bodies_have_the_fields_that_the_service_takes(
    make: Any, model: type[BaseModel], beside: set[str]
) -> None:
    assert set(inspect.signature(make).parameters) - beside == set(model.model_fields)


def test_the_options_of_a_build_are_those_that_the_service_takes() -> None:
    own = get_type_hints(BuildOptions)
    assert set(own) | {"corpus"} == set(StartBuild.model_fields)
    for name, hint in own.items():
        served = StartBuild.model_fields[name]
        assert _words(hint) == _words(served.annotation), name


def _words(hint: Any) -> set[object]:
    """The words that a type allows, however deep; those of `Literal`."""
    inner = get_args(hint)
    found = {one for one in inner if isinstance(one, str)}
    return found.union(*map(_words, inner)) if inner else set()


def test_a_build_without_a_key_gets_one_so_that_a_second_try_begins_no_other() -> None:
    calls = [endpoints.start_build("/data"), endpoints.start_build("/data")]
    keys = []
    for call in calls:
        assert call.fields is not None
        assert call.fields() == call.fields()
        keys.append(call.fields()["key"])
    assert len(set(keys)) == 2
    own = endpoints.start_build("/data", key="monday").fields
    assert own is not None
    assert own() == {"corpus": "/data", "key": "monday"}


def test_a_whole_item_arrives_as_it_was_given() -> None:
    call = endpoints.put_item(
        "a",
        texts=("one", "two"),
        image=b"bytes",
        vector=[1, 2],
        modality="text",
        metadata={"price": 9.5},
        index="other",
    )
    assert call.fields is not None
    sent = orjson.loads(encode(call.fields()))
    assert sent.pop("image") == "Ynl0ZXM="
    read = PutItem.model_validate(sent)
    assert read.model_dump() == {
        "texts": ["one", "two"],
        "vector": [1.0, 2.0],
        "modality": "text",
        "metadata": {"price": 9.5},
    }
    assert call.params == {"index": "other"}


def test_the_codes_of_errors_are_those_that_are_documented() -> None:
    table = (DOCS / "api.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|$", table.partition("\n## ")[0], re.MULTILINE)
    documented = {int(status): set(_codes(text)) for status, text in rows}
    documented[422].add("invalid_filter")  # said under Filters
    assert {status: set(codes) for status, codes in errors.CODES.items()} == documented
    for status, codes in errors.CODES.items():
        assert {errors.status_of(code) for code in codes} == {status}


def _codes(text: str) -> list[str]:
    """The words of a row, without those in brackets, which explain, and headers."""
    return re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)", "", text))


def test_the_limits_that_the_batch_helper_asks_for_exist() -> None:
    used = {"max_batch", "max_body_bytes", "max_queue"}
    assert used <= set(Limits.model_fields)


def test_an_idle_connection_is_let_go_before_the_service_closes_it() -> None:
    assert ConnectionSettings().keep_alive_s > clients.IDLE_S


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    for name, method in vars(Client).items():
        if name.startswith("_"):
            continue
        other = getattr(AsyncClient, name)
        assert inspect.iscoroutinefunction(other), name
        mine, theirs = inspect.signature(method), inspect.signature(other)
        assert mine.parameters == theirs.parameters, name
        assert next(iter(mine.parameters)) == "self"
        assert method.__doc__
        assert other.__doc__
    assert {n for n in vars(Client) if n[0] != "_"} == {n for n in vars(AsyncClient) if n[0] != "_"}


def test_a_method_shows_what_it_takes() -> None:
    signature = inspect.signature(Client("http://localhost").search_image)
    assert list(signature.parameters) == ["image", "options"]


def test_all_that_is_exported_is_there() -> None:
    exported = hivlp.service.client.__all__
    assert exported == sorted(exported)
    assert all(hasattr(hivlp.service.client, name) for name in exported)
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ClientError)
    }
    assert kinds <= set(exported)


def test_the_client_imports_nothing_that_serves() -> None:
    heavy = ["fastapi", "starlette", "uvicorn", "faiss", "onnxruntime", "torch", "pyarrow", "redis"]
    code = (
        "import sys, hivlp.service.client as c; c.Client('http://localhost', key='k').close();"
        f"print(sorted(m for m in {[*heavy, 'hivlp.index', 'hivlp.service.app']} "
        "if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

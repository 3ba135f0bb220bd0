"""Both clients against the service over real HTTP, in a small fake world."""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import pytest

from hivlp.service.answers import ErrorAnswer
from hivlp.service.app import create_app
from hivlp.service.client import (
    AsyncClient,
    Client,
    ClientError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    Retries,
    Search,
)
from hivlp.service.settings import ChangeSettings, Limits, Settings, Threads
from tests.unit.service.clients_both import BOTH, opening
from tests.unit.service.fakes_service import FINEST, NAMES, VERSION, FakeSearcher, World, vector_of
from tests.unit.service.pictures_service import picture, write
from tests.unit.service.serving_app import SMALL, serving

RED = picture((255, 0, 0))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The service, asked without the client."""
    root = tmp_path_factory.mktemp("corpus")
    write(root, "red.png", RED)
    write(root, "cup.png", picture((9, 9, 9)))
    images = {"red": "red.png", "café/☕": "cup.png"}
    world = World(searcher=FakeSearcher(images=images), pictures=root)
    settings = SMALL.model_copy(update={"changes": ChangeSettings(writes=False)})
    with serving(create_app(settings, load=world.load)) as client:
        yield client


@pytest.fixture(params=BOTH)
def client(request: pytest.FixtureRequest, raw: httpx.Client) -> Iterator[Any]:
    with opening(request.param)(str(raw.base_url)) as client:
        yield client


def failing(call: Callable[..., Any], *args: Any, **options: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        call(*args, **options)
    return caught.value


def ids(answer: Any) -> list[str]:
    return [hit.id for hit in answer.hits]


def test_a_text_finds_what_it_finds_without_the_client(client: Any, raw: httpx.Client) -> None:
    options = {"k": 3, "offset": 1, "explain": True, "with_metadata": ["name"], "plan": "cascade"}
    found = client.search_text("red", **options)
    told = raw.post("/search/text", json={"query": "red", **options}).json()
    for name in ("took_ms", "request_id", "cached", "stages"):
        told.pop(name)
    assert found.model_dump(mode="json", exclude_unset=True).items() >= told.items()
    assert found.hits[0].explain is not None
    assert found.snapshot == VERSION


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "view", "path", "text", "file", "memory"])
def test_a_picture_may_be_bytes_a_path_or_a_file(client: Any, tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, "red.png", RED)
    with path.open("rb") as file:
        sources = {
            "bytes": RED,
            "bytearray": bytearray(RED),
            "view": memoryview(RED),
            "path": path,
            "text": str(path),
            "file": file,
            "memory": io.BytesIO(RED),
        }
        assert ids(client.search_image(sources[kind], k=1)) == ["red"]
        assert not file.closed


def test_a_picture_that_can_not_be_read_is_said_before_anything_is_sent(
    client: Any, tmp_path: Path
) -> None:
    closed = io.BytesIO(RED)
    closed.close()
    for source in (tmp_path / "none.png", tmp_path, "a\0b", closed, io.StringIO("text")):
        error = failing(client.search_image, source)
        assert (type(error), error.code, error.param) == (
            InvalidRequest,
            "unreadable_image",
            "image",
        )
        assert (error.status, error.tries) == (None, 0)


def test_what_the_service_says_of_a_picture_is_told(client: Any) -> None:
    error = failing(client.search_image, b"no picture")
    assert (error.code, error.status, error.param) == ("unsupported_image", 415, "image")
    assert failing(client.search_image, b"").code == "empty_image"
    assert failing(client.search_image, b"a" * 40_000).status == 413
    assert failing(client.search_image, b"a" * 90_000).code == "body_too_large"


@pytest.mark.parametrize(
    "vector",
    [
        vector_of("green")[0],
        vector_of("green")[0].astype(np.float64),
        vector_of("green")[0].astype(np.float16),
        vector_of("green")[0].tolist(),
        tuple(vector_of("green")[0].tolist()),
        np.repeat(vector_of("green")[0], 2)[::2],
    ],
    ids=["float32", "float64", "float16", "list", "tuple", "strided"],
)
def test_a_vector_may_be_an_array_or_a_list(client: Any, vector: Any) -> None:
    assert ids(client.search_vector(vector, k=1)) == ["green"]


@pytest.mark.parametrize(
    "vector",
    [[1.0, math.nan], [[1.0]], 1.0, "123", ["1.0"], [[1.0], [1.0, 2.0]], np.array([True])],
    ids=str,
)
def test_a_vector_that_is_none_is_refused_here(client: Any, vector: Any) -> None:
    error = failing(client.search_vector, vector)
    assert (error.code, error.param, error.status) == ("invalid_vector", "vector", None)


def test_a_vector_of_another_space_is_refused_there(client: Any) -> None:
    error = failing(client.search_vector, np.ones(FINEST + 1))
    assert (error.code, error.status) == ("invalid_vector", 422)


def test_an_item_finds_others_and_one_that_is_not_there_is_not_found(client: Any) -> None:
    found = client.search_similar("red", k=10)
    assert len(found.hits) == len(NAMES) - 1
    error = failing(client.search_similar, "nobody")
    assert (type(error), error.code, error.param) == (NotFound, "no_such_item", "id")


def test_filters_and_widths_may_be_any_mapping_and_sequence(client: Any) -> None:
    only = MappingProxyType({"field": "name", "in": UserList(["Red", "Blue"])})
    widths = ({"level": 1, "keep": 5}, {"level": 3, "keep": 2})
    assert sorted(ids(client.search_text("red", filter=only))) == ["blue", "red"]
    assert len(client.search_text("red", cascade=widths, k=2).hits) == 2


def test_an_option_that_does_not_exist_is_named(client: Any) -> None:
    error = failing(client.search_text, "red", colour="blue")
    assert (error.code, error.param, error.status) == ("unknown_field", "colour", 422)


def test_half_a_character_is_named_before_anything_is_sent(client: Any) -> None:
    error = failing(client.search_text, "\ud83d")
    assert (error.code, error.param, error.status) == ("invalid_text", "query", None)
    assert failing(client.get_item, "\ud83d").code == "invalid_id"
    assert failing(client.search_text, "red", filter={"field": "a", "eq": {1}}).param == "filter"


def test_embeddings_come_level_by_level(client: Any) -> None:
    for answer in (client.embed_text("red"), client.embed_image(RED)):
        assert [one.dim for one in answer.levels] == [4, 8, FINEST]
        assert np.allclose(answer.levels[-1].vector, vector_of("red")[0], atol=1e-6)


def test_items_of_any_id_are_read_with_their_pictures(client: Any) -> None:
    item = client.get_item("café/☕")
    assert (item.id, item.metadata["length"]) == ("café/☕", len("café/☕"))
    assert client.item_image("red").data == RED
    small = client.item_image("café/☕", size=16)
    assert small.media_type.startswith("image/")
    assert small.etag
    assert failing(client.item_image, "white").code == "no_picture"


@pytest.mark.parametrize("item_id", [".", "..", "a/../b", "%2e%2e", "a?b", "a#b", "a b", "a\nb"])
def test_an_id_arrives_as_it_is(client: Any, item_id: str) -> None:
    error = failing(client.get_item, item_id)
    assert type(error) is NotFound
    assert repr(item_id) in error.message


def test_items_are_not_changed_where_they_may_not_be(client: Any) -> None:
    for call in (lambda: client.put_item("a", texts=["a"]), lambda: client.delete_item("red")):
        error = failing(call)
        assert (type(error), error.code, error.tries) == (NotAllowed, "read_only", 1)


def test_what_is_served_is_told(client: Any) -> None:
    (index,) = client.indexes().indexes
    assert (index.name, index.items, index.levels[-1].dim) == ("default", len(NAMES), FINEST)
    assert client.snapshots().active == VERSION
    assert failing(client.snapshots, "none").code == "no_such_index"
    assert type(failing(client.snapshots, "..")) is NotFound
    assert client.info().limits["max_batch"] == SMALL.limits.max_batch
    assert client.health().indexes == {"default": VERSION}
    assert client.ready() is True


def test_a_request_id_is_the_one_in_the_answer(client: Any) -> None:
    first, second = client.search_text("red"), client.search_text("red")
    assert first.request_id != second.request_id
    assert len(first.request_id) == 32


MIXED: Sequence[Search] = (
    Search.text("red", k=1),
    Search.image(RED, k=1),
    Search.text("", k=1),
    Search.similar("nobody"),
    Search.vector(vector_of("green")[0], k=1),
    Search.image("/none/such.png"),
    Search.text("half \ud83d"),
    Search.text("blue", k=99),
    Search.text("blue", k=1),
    Search.vector([math.nan]),
    Search.similar("red", k=1, filter={"field": "name", "eq": "White"}),
)
# What each of them finds, or its error's code and status.
EXPECTED = [
    ["red"],
    ["red"],
    ("empty_text", 422),
    ("no_such_item", 404),
    ["green"],
    ("unreadable_image", None),
    ("invalid_text", None),
    ("out_of_range", 422),
    ["blue"],
    ("invalid_vector", None),
    ["white"],
]


def outcomes(found: Sequence[Any]) -> list[Any]:
    return [(one.code, one.status) if isinstance(one, ClientError) else ids(one) for one in found]


@pytest.mark.parametrize("concurrency", [None, 1, 3])
def test_any_number_of_searches_each_have_their_result_or_error_in_order(
    client: Any, concurrency: int | None
) -> None:
    wanted = MIXED * 5
    assert outcomes(client.search_many(wanted, concurrency=concurrency)) == EXPECTED * 5


def test_many_searches_find_what_they_find_alone(client: Any) -> None:
    alone = []
    for search in MIXED:
        try:
            alone.append(client.search(search))
        except ClientError as error:
            alone.append(error)
    assert outcomes(alone) == EXPECTED
    together = client.search_many(MIXED)
    for one, other in zip(alone, together, strict=True):
        if isinstance(one, ClientError):
            assert type(one) is type(other)
            assert (one.message, one.param) == (other.message, other.param)
        else:
            assert one.hits == other.hits


def test_one_request_may_hold_several_searches(client: Any) -> None:
    answer = client.search_batch([Search.text("red", k=1), Search.similar("nobody")])
    first, second = answer.results
    assert ids(first) == ["red"]
    assert isinstance(second, ErrorAnswer)
    too_many = failing(client.search_batch, [Search.text("red")] * 5)
    assert (too_many.code, too_many.param) == ("out_of_range", "searches")
    bad = failing(client.search_batch, [Search.text("red"), Search.text("\ud83d")])
    assert (bad.param, bad.status) == ("searches.1.query", None)


def held_world() -> tuple[World, threading.Event, threading.Event]:
    """A world whose first stage waits for the second event and says so with the first."""
    world, reached, go_on = World(), threading.Event(), threading.Event()

    def wait(level: int) -> None:
        reached.set()
        assert go_on.wait(20)

    world.text.before = wait
    return world, reached, go_on


FULL_AT_ONE = Settings(
    limits=Limits(max_queue=0, max_batch=1), threads=Threads(workers=1), cache={"max_bytes": 0}
)


@pytest.mark.parametrize("kind", BOTH)
def test_a_search_that_meets_a_full_service_comes_back_and_is_answered(kind: str) -> None:
    world, reached, go_on = held_world()
    with serving(create_app(FULL_AT_ONE, load=world.load)) as raw:
        url = str(raw.base_url)
        with opening(kind)(url) as client, Client(url) as other:
            first = threading.Thread(target=other.search_text, args=("blue",))
            first.start()
            assert reached.wait(20)
            hasty = client.with_options(retries=Retries(tries=1))
            error = failing(hasty.search_text, "red")
            assert (type(error), error.retry_after_s) == (Overloaded, 1.0)
            threading.Timer(0.2, go_on.set).start()
            began_s = time.monotonic()
            assert ids(client.search_text("red", k=1)) == ["red"]
            assert time.monotonic() - began_s >= 1.0
            first.join()


def test_a_cancelled_search_leaves_the_client_usable() -> None:
    world, reached, go_on = held_world()

    async def leave(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            task = asyncio.create_task(client.search_text("red"))
            await asyncio.to_thread(reached.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            return ids(await client.search_text("green", k=1))

    with serving(create_app(SMALL, load=world.load)) as raw:
        assert asyncio.run(leave(str(raw.base_url))) == ["green"]


def test_a_loading_service_is_unhealthy_and_not_ready() -> None:
    world, go_on = World(), threading.Event()

    def load(settings: Settings) -> Any:
        assert go_on.wait(20)
        return world.load(settings)

    app = create_app(SMALL, load=load)
    with serving(app, wait_ready=False) as raw, Client(str(raw.base_url)) as client:
        assert client.health().status == "loading"
        assert client.ready() is False
        hasty = client.with_options(retries=Retries(tries=1))
        assert failing(hasty.search_text, "red").code == "not_ready"
        threading.Timer(0.2, go_on.set).start()
        assert ids(client.search_text("red", k=1)) == ["red"]
        assert client.ready() is True

"""Searches that share a worker: as they would be alone, and none of them harms another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.models.errors import ArtifactError
from hivlp.models.levels import EarlyOutput
from hivlp.service.app import create_app
from hivlp.service.queries import Setting, TextQuery
from hivlp.service.schemas import SearchOptions
from hivlp.service.settings import BatchSettings, CacheSettings, Limits, Settings, Threads
from hivlp.service.timeline import Timeline
from hivlp.service.together import Asked, find_together
from tests.unit.service.fakes_service import NAMES, World
from tests.unit.service.pictures_service import picture
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_load import WAIT_S, await_true, metric

PLAIN = {"took_ms", "request_id", "stages"}
ONE = Settings(threads=Threads(workers=1), cache=CacheSettings(max_bytes=0))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Queue:
    """A server whose only worker is held by one search until what was asked has queued."""

    def __init__(self, world: World, client: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.client = client
        self._world, self._pool = world, pool
        self._open, self._reached = threading.Event(), threading.Event()

    def hold(self) -> None:
        before = self._world.searcher.before

        def wait(level: int) -> None:
            before(level)
            self._reached.set()
            assert self._open.wait(WAIT_S)

        self._world.searcher.before = wait
        self._held = self._pool.submit(self._ask, {"query": "white", "plan": "exact"})
        assert self._reached.wait(WAIT_S)
        self._world.searcher.before = before

    def ask(self, *bodies: dict[str, Any]) -> list[Future[httpx.Response]]:
        """Ask in this order, each queued before the next is sent."""
        asked = []
        for place, body in enumerate(bodies, 1):
            asked.append(self._pool.submit(self._ask, body))
            await_true(lambda place=place: metric(self.client, "hivlp_queue_size") == place)
        return asked

    def release(self) -> None:
        self._open.set()
        assert self._held.result().status_code == 200

    def _ask(self, body: dict[str, Any]) -> httpx.Response:
        return self.client.post("/search/text", json=body)


@contextlib.contextmanager
def queueing(world: World, pool: ThreadPoolExecutor, settings: Settings = ONE) -> Iterator[Queue]:
    with serving(create_app(settings, load=world.load)) as client:
        queue = Queue(world, client, pool)
        queue.hold()
        try:
            yield queue
        finally:
            queue.release()


LONG_TEXT = "blue " + "and so on " * 20


def results(asked: list[Future[httpx.Response]]) -> list[dict[str, Any]]:
    return [one.result(WAIT_S).json() for one in asked]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in PLAIN}


BODIES: list[dict[str, Any]] = [
    {"query": "red", "k": 2, "plan": "funnel"},
    {"query": "blue", "plan": "funnel", "with_metadata": False, "k": 7},
    {"query": "green", "plan": "cascade", "offset": 1},
    {"query": "yellow", "plan": "cascade", "max_level": 2},
    {"query": "red", "plan": "funnel", "filter": {"field": "name", "in": ["Blue", "White"]}},
    {"query": "white", "plan": "funnel", "modality": "text", "min_score": 0.5},
]


def test_answers_are_the_same_alone_and_together(world: World, pool: ThreadPoolExecutor) -> None:
    with queueing(world, pool) as queue:
        asked = queue.ask(*BODIES)
        queue.release()
        together = results(asked)
        assert metric(queue.client, "hivlp_batch_size_sum") == 1 + len(BODIES)
        assert metric(queue.client, "hivlp_batch_size_count") == 2
        alone = [queue.client.post("/search/text", json=body).json() for body in BODIES]
    assert [plain(one) for one in together] == [plain(one) for one in alone]
    assert all(one["hits"] for one in together)
    assert {hit["score"] >= 0.5 for hit in together[5]["hits"]} == {True}


def test_a_long_text_is_not_what_short_ones_are_padded_to(
    world: World, pool: ThreadPoolExecutor
) -> None:
    texts = ["red", LONG_TEXT, "green", "white"]
    bodies: list[dict[str, Any]] = [{"query": text, "plan": "funnel"} for text in texts]
    with queueing(world, pool) as queue:
        asked = queue.ask(*bodies)
        queue.release()
        together = results(asked)
        assert metric(queue.client, "hivlp_batch_size_count") == 1 + 2
        assert metric(queue.client, "hivlp_batch_size_sum") == 1 + len(texts)
        waits = 'hivlp_stage_duration_seconds_count{level="",stage="queue"}'
        assert metric(queue.client, waits) == 1 + len(texts)  # one of each search
        alone = [queue.client.post("/search/text", json=body).json() for body in bodies]
    assert [plain(one) for one in together] == [plain(one) for one in alone]


def searched_together(world: World, *texts: str) -> tuple[list[Timeline], dict[int, Any]]:
    """The timelines of texts that one worker took together, and what came of them."""
    served = world.live.served
    timelines = [Timeline() for _ in texts]
    asked = [
        Asked(
            TextQuery(text),
            SearchOptions(plan="funnel"),
            Setting(served.searcher, served.model, "image", Limits(), timeline),
        )
        for text, timeline in zip(texts, timelines, strict=True)
    ]
    told: dict[int, Any] = {}
    find_together(asked, [timeline.origin for timeline in timelines], told.__setitem__)
    return timelines, told


def test_what_a_text_waits_for_the_others_is_time_in_the_queue(world: World) -> None:
    (short, long), told = searched_together(world, "red", LONG_TEXT)
    assert told[0]["hits"][0]["id"] == "red"
    for timeline in (short, long):
        waited, again = (span for span in timeline.spans if span.name == "queue")
        (prepared,) = (span for span in timeline.spans if span.name == "decode")
        encoded = min(span.start_s for span in timeline.spans if span.name == "encode")
        assert waited.start_s == timeline.origin
        assert waited.end_s <= prepared.start_s <= prepared.end_s <= again.start_s
        assert again.end_s <= encoded
    _, behind = (span for span in long.spans if span.name == "queue")
    done = [span for span in short.spans if span.name in ("encode", "search", "metadata")]
    assert {span.name for span in done} == {"encode", "search", "metadata"}
    assert all(behind.start_s <= span.start_s <= span.end_s <= behind.end_s for span in done)


def test_a_text_that_fails_in_a_part_of_its_own_is_told_why_and_not_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    encode, passes = world.text.encode, []

    def spoilt(batch: Any) -> Iterator[EarlyOutput]:
        passes.append(batch.size)
        if batch.size == 1:
            raise ArtifactError(Path("artifact"), "not finite")
        yield from encode(batch)

    world.text.encode = spoilt  # type: ignore[method-assign]
    _, told = searched_together(world, "red", LONG_TEXT, "green")
    assert [told[place]["hits"][0]["id"] for place in (0, 2)] == ["red", "green"]
    assert isinstance(told[1], ArtifactError)
    assert passes == [2, 1]
    assert "can't be encoded together" not in caplog.text


def test_each_of_a_batch_tells_its_own_stages(world: World, pool: ThreadPoolExecutor) -> None:
    with queueing(world, pool) as queue:
        asked = queue.ask(BODIES[0], BODIES[3])
        queue.release()
        funnel, capped = results(asked)
    stages = [(one["name"], one["level"]) for one in funnel["stages"]]
    assert [one for one in stages if one[0] == "encode"] == [("encode", n) for n in (1, 2, 3)]
    assert [one for one in stages if one[0] == "search"] == [("search", 1), ("search", 3)]
    # What needs no third level is answered before there is one.
    assert ("encode", 3) not in [(one["name"], one["level"]) for one in capped["stages"]]
    assert [one["name"] for one in capped["stages"]].count("queue") == 2


def test_what_is_wrong_with_one_harms_no_other(world: World, pool: ThreadPoolExecutor) -> None:
    bodies = [
        {"query": "red"},
        {"query": "∅"},  # the tokenizer leaves nothing of it
        {"query": "blue", "plan": "funnel", "early_exit": True},
        {"query": "green", "filter": {"field": "nothing", "eq": 1}},
        {"query": "green"},
    ]
    with queueing(world, pool) as queue:
        asked = queue.ask(*bodies)
        queue.release()
        got = results(asked)
        assert metric(queue.client, "hivlp_batch_size_sum") == 1 + 2
    assert [one["hits"][0]["id"] for one in (got[0], got[4])] == ["red", "green"]
    errors = [one["error"] for one in got[1:4]]
    assert [error["code"] for error in errors] == ["empty_text", "invalid_plan", "invalid_filter"]
    assert errors[0]["param"] == "query"


def test_when_encoding_together_fails_each_is_tried_alone(
    world: World, pool: ThreadPoolExecutor
) -> None:
    encode = world.text.encode

    def spoilt(batch: Any) -> Iterator[EarlyOutput]:
        for output in encode(batch):
            if output.level == 2 and batch.size > 1:
                raise ArtifactError(Path("artifact"), "not finite")
            yield output

    world.text.encode = spoilt  # type: ignore[method-assign]
    with queueing(world, pool) as queue:
        asked = queue.ask({"query": "red"}, {"query": "blue"}, {"query": "green", "max_level": 1})
        queue.release()
        got = results(asked)
    assert [one["hits"][0]["id"] for one in got] == ["red", "blue", "green"]


LONG = [
    {"plan": "exact"},
    {"explain": True},
    {"cascade": [{"level": 1, "keep": 5}], "k": 2},
    {"k": 150, "offset": 51},
]


@pytest.mark.parametrize("long", LONG)
def test_searches_that_take_long_have_a_worker_for_themselves(
    world: World, pool: ThreadPoolExecutor, long: dict[str, Any]
) -> None:
    with queueing(world, pool) as queue:
        asked = queue.ask(*({"query": name, **long} for name in NAMES[:3]))
        queue.release()
        assert {one.result(WAIT_S).status_code for one in asked} == {200}
        assert metric(queue.client, "hivlp_batch_size_sum") == 1 + 3
        assert metric(queue.client, "hivlp_batch_size_count") == 4


def test_batches_are_no_larger_than_the_setting(world: World, pool: ThreadPoolExecutor) -> None:
    small = ONE.model_copy(update={"batches": BatchSettings(max_size=2)})
    with queueing(world, pool, small) as queue:
        asked = queue.ask(*({"query": name} for name in NAMES[:5]))
        queue.release()
        assert [one["hits"][0]["id"] for one in results(asked)] == list(NAMES[:5])
        assert metric(queue.client, "hivlp_batch_size_count") == 1 + 3


def test_pictures_are_encoded_together_and_a_broken_one_fails_alone(
    world: World, pool: ThreadPoolExecutor
) -> None:
    red, broken = picture("red"), picture("red")[:40]
    with queueing(world, pool) as queue:

        def send(data: bytes) -> httpx.Response:
            return queue.client.post("/search/image", files={"image": data})

        asked = [pool.submit(send, data) for data in (red, broken)]
        await_true(lambda: metric(queue.client, "hivlp_queue_size") == 2)
        queue.release()
        well, ill = (one.result(WAIT_S) for one in asked)
    assert (well.status_code, well.json()["hits"][0]["id"]) == (200, "red")
    assert (ill.status_code, ill.json()["error"]["code"]) == (422, "broken_image")


def test_more_workers_than_cores_have_no_core_to_spare(
    world: World, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.service.settings.available_threads", lambda: 2)
    three = ONE.model_copy(update={"threads": Threads(workers=3)})
    with queueing(world, pool, three) as queue:
        busy = queue.client.post("/search/text", json={"query": "red"}).json()
    assert busy["plan"] == "funnel"  # the two that are at work have a core each


def test_auto_is_a_cascade_while_a_core_is_free_and_a_funnel_when_not(
    world: World, pool: ThreadPoolExecutor
) -> None:
    two = ONE.model_copy(update={"threads": Threads(workers=2)})
    with serving(create_app(two, load=world.load)) as client:
        assert client.post("/search/text", json={"query": "red"}).json()["plan"] == "cascade"
        queue = Queue(world, client, pool)
        queue.hold()
        try:
            busy = client.post("/search/text", json={"query": "red"}).json()
            asked = client.post("/search/text", json={"query": "blue", "plan": "cascade"}).json()
            capped = client.post("/search/text", json={"query": "red", "max_level": 2}).json()
        finally:
            queue.release()
        assert [busy["plan"], asked["plan"], capped["plan"]] == ["funnel", "cascade", "cascade"]
        assert metric(client, 'hivlp_plan_total{asked="auto",plan="funnel"}') == 1
        assert metric(client, 'hivlp_plan_total{asked="auto",plan="cascade"}') == 2

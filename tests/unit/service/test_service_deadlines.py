"""Deadlines and clients that leave: what is done by then is the answer, what waits is dropped."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hivlp.index.cascade import Plan, PlanRequest
from hivlp.models.errors import DeadlinePassed
from hivlp.service.app import create_app
from hivlp.service.overlap import PlanRun, early_outputs, run_plan
from hivlp.service.settings import Settings, Threads
from hivlp.service.timeline import Timeline
from tests.unit.service.fakes_service import FakeEncoder, FakeSearcher, World
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_load import WAIT_S, Gate, await_true, in_flight, metric

CASCADE = PlanRequest(searched="image", query="text", need=3, name="cascade")
TIGHT = Settings(threads=Threads(workers=1))
SOON_MS = 30
LATE_MS = 60_000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Held:
    """Holds one stage of the encoder or of the search until it is let go."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.reached, self.open = threading.Event(), threading.Event()

    def before(self, level: int) -> None:
        if level == self.level:
            self.reached.set()
            assert self.open.wait(WAIT_S)


def ask(client: httpx.Client, query: str = "red", **more: Any) -> httpx.Response:
    return client.post("/search/text", json={"query": query, **more})


@pytest.mark.parametrize("level", [2, 3])
def test_levels_done_by_the_deadline_are_the_answer_while_the_encoder_still_runs(
    world: World, level: int
) -> None:
    held = Held(level)
    world.text.before = held.before
    with serving(create_app(Settings(), load=world.load)) as client:
        answer = ask(client, deadline_ms=SOON_MS).json()
        held.open.set()
        assert (answer["exit_level"], answer["degraded"]) == (level - 1, True)
        assert answer["hits"][0]["id"] == "red"
        assert {hit["level"] for hit in answer["hits"]} == {level - 1}
        assert metric(client, 'hivlp_degraded_total{reason="deadline"}') == 1


def test_a_search_that_is_late_ends_with_what_it_found(world: World) -> None:
    def slowly(level: int) -> None:
        time.sleep(2 * SOON_MS / 1e3 if level == 2 else 0)

    world.searcher.before = slowly
    with serving(create_app(Settings(), load=world.load)) as client:
        answer = ask(client, deadline_ms=SOON_MS).json()
    assert (answer["exit_level"], answer["degraded"]) == (2, True)
    assert world.searcher.searched == [1, 2]


def test_without_a_first_level_it_is_504_and_the_next_request_works(world: World) -> None:
    held = Held(1)
    world.text.before = held.before
    with serving(create_app(Settings(), load=world.load)) as client:
        late = ask(client, deadline_ms=SOON_MS)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_passed")
        assert late.json()["error"]["param"] == "deadline_ms"
        held.open.set()
        assert ask(client).json()["hits"][0]["id"] == "red"


def test_a_deadline_that_comes_while_it_waits_for_a_worker_is_504_at_once(
    world: World, pool: ThreadPoolExecutor
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        assert ask(client, deadline_ms=SOON_MS).status_code == 504
        assert metric(client, "hivlp_queue_size") == 0
        gate.open.set()
        assert held.result().status_code == 200
    assert world.text.encoded.count(1) == 1


def test_a_deadline_that_is_kept_changes_nothing_and_the_answer_is_cached(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        first = ask(client, deadline_ms=LATE_MS).json()
        again = ask(client).json()
    assert (first["degraded"], first["exit_level"], first["plan"]) == (False, 3, "cascade")
    assert (first["cached"], again["cached"]) == (False, True)
    assert first["hits"] == again["hits"]


def test_what_a_deadline_cut_short_is_not_cached(world: World) -> None:
    held = Held(2)
    world.text.before = held.before
    with serving(create_app(Settings(), load=world.load)) as client:
        assert ask(client, deadline_ms=SOON_MS).json()["degraded"]
        held.open.set()
        full = ask(client).json()
    assert (full["cached"], full["degraded"], full["exit_level"]) == (False, False, 3)


def test_who_joins_a_search_in_a_hurry_is_not_answered_with_less(
    world: World, pool: ThreadPoolExecutor
) -> None:
    """Both have as long from their own arrival on; the second came later."""
    held = Held(1)
    world.text.before = held.before
    hurry_ms = 400
    with serving(create_app(Settings(), load=world.load)) as client:
        first = pool.submit(ask, client, deadline_ms=hurry_ms)
        assert held.reached.wait(WAIT_S)
        time.sleep(0.7 * hurry_ms / 1e3)
        second = pool.submit(ask, client, deadline_ms=hurry_ms)
        assert first.result().status_code == 504
        held.open.set()
        answer = second.result().json()
    assert (answer["hits"][0]["id"], answer["degraded"]) == ("red", False)


def test_without_a_free_thread_ahead_a_deadline_still_holds() -> None:
    """The encoder's own thread is busy with others: nothing was computed when time was up."""
    with ThreadPoolExecutor(1) as ahead:
        busy = threading.Event()
        ahead.submit(busy.wait, WAIT_S)
        encoder, searcher = FakeEncoder("text"), FakeSearcher()
        plan: Plan = searcher.plan(CASCADE)
        due_s = time.perf_counter() + SOON_MS / 1e3
        outputs = encoder.encode(encoder.prepare(["red"]))
        stream = early_outputs(outputs, 3, ahead, Timeline(), due_s)
        with contextlib.closing(stream), pytest.raises(DeadlinePassed):
            run_plan(PlanRun(searcher, plan, "image", Timeline(), due_s=due_s), stream)
        busy.set()
    assert encoder.encoded == []


HEAD = (
    "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    "Content-Length: {length}\r\n\r\n"
)


@contextlib.contextmanager
def asking(client: httpx.Client, path: str, body: bytes) -> Iterator[None]:
    """A client that has asked, and leaves at the end of the block."""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as leaver:
        leaver.sendall(HEAD.format(path=path, length=len(body)).encode() + body)
        yield


LEAVERS = [
    ("/search/text", b'{"query": "red"}', 1),
    (
        "/search/batch",
        b'{"searches": [{"kind": "text", "query": "red"}, {"kind": "text", "query": "blue"}]}',
        2,
    ),
    ("/embed/text", b'{"text": "red"}', 1),
]


@pytest.mark.parametrize(("path", "body", "searches"), LEAVERS)
def test_what_waits_for_a_client_that_left_is_dropped_and_counted(
    world: World, pool: ThreadPoolExecutor, path: str, body: bytes, searches: int
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        with asking(client, path, body):
            await_true(lambda: metric(client, "hivlp_queue_size") == searches)
        await_true(lambda: in_flight(client) == 1)
        assert metric(client, "hivlp_queue_size") == 0
        assert metric(client, "hivlp_cancelled_total") == searches
        gate.open.set()
        assert held.result().status_code == 200
        assert world.text.encoded.count(1) == 1
        assert ask(client).json()["hits"][0]["id"] == "red"


def test_a_leader_that_leaves_does_not_fail_who_joined_it(
    world: World, pool: ThreadPoolExecutor
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        with asking(client, "/search/text", b'{"query": "red"}'):
            await_true(lambda: metric(client, "hivlp_queue_size") == 1)
            follower = pool.submit(ask, client, "red")
            await_true(lambda: in_flight(client) == 3)
        await_true(lambda: in_flight(client) == 2)
        gate.open.set()
        assert follower.result().json()["hits"][0]["id"] == "red"
        assert held.result().status_code == 200
        assert metric(client, "hivlp_cancelled_total") == 0
        assert world.text.encoded.count(1) == 2


def test_after_the_last_one_left_the_same_question_begins_anew(
    world: World, pool: ThreadPoolExecutor
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        for _ in range(3):
            with asking(client, "/search/text", b'{"query": "red"}'):
                await_true(lambda: metric(client, "hivlp_queue_size") == 1)
            await_true(lambda: metric(client, "hivlp_queue_size") == 0)
        anew = pool.submit(ask, client, "red")
        await_true(lambda: metric(client, "hivlp_queue_size") == 1)
        gate.open.set()
        assert anew.result().json()["hits"][0]["id"] == "red"
        assert held.result().status_code == 200
        assert metric(client, "hivlp_cancelled_total") == 3


def test_readiness_tells_of_workers_that_are_no_more(world: World) -> None:
    def die(_: int) -> None:
        raise SystemExit

    app = create_app(TIGHT, load=world.load)
    with serving(app) as client:
        assert client.get("/readyz").status_code == 200
        world.searcher.before = die
        failed = [ask(client, name) for name in ("red", "green", "blue", "white", "black", "grey")]
        assert {one.status_code for one in failed} == {503}
        assert {one.json()["error"]["code"] for one in failed} == {"worker_died"}
        red = client.get("/readyz")
        assert (red.status_code, red.json()["error"]["code"]) == (503, "not_ready")
        assert "died too often" in red.json()["error"]["message"]
        assert client.get("/livez").status_code == 200
        assert metric(client, "hivlp_worker_deaths_total") == 6


def test_a_worker_that_died_once_is_replaced(world: World) -> None:
    def die(_: int) -> None:
        raise SystemExit

    with serving(create_app(TIGHT, load=world.load)) as client:
        world.searcher.before = die
        assert ask(client).status_code == 503
        world.searcher.before = lambda _: None
        assert ask(client).json()["hits"][0]["id"] == "red"
        assert client.get("/readyz").status_code == 200

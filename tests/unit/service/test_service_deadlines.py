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
from hivlp.service import pipeline
from hivlp.service.app import create_app
from hivlp.service.overlap import PlanRun, run_plan
from hivlp.service.settings import Limits, Settings, Threads
from hivlp.service.timeline import Timeline
from tests.unit.service.fakes_service import FakeEncoder, FakeSearcher, World, early_outputs
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_load import WAIT_S, Gate, await_true, in_flight, metric

CASCADE = PlanRequest(searched="image", query="text", need=3, name="cascade")
TIGHT = Settings(threads=Threads(workers=1))
SOON_MS = 150
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
    hurry_ms = 1_000
    with serving(create_app(Settings(), load=world.load)) as client:
        first = pool.submit(ask, client, deadline_ms=hurry_ms)
        assert held.reached.wait(WAIT_S)
        time.sleep(0.7 * hurry_ms / 1e3)
        second = pool.submit(ask, client, deadline_ms=hurry_ms)
        shared = 'hivlp_cache_requests_total{result="shared",tier="memory"}'
        await_true(lambda: metric(client, shared) == 1)
        assert first.result().status_code == 504
        held.open.set()
        answer = second.result().json()
    assert (answer["hits"][0]["id"], answer["degraded"]) == ("red", False)


def test_a_follower_has_at_least_what_was_found_for_the_first(
    world: World, pool: ThreadPoolExecutor
) -> None:
    """Level 2 never comes; the second has not enough time left to begin anew."""
    held = Held(2)
    world.text.before = held.before
    hurry_ms = 300
    with serving(create_app(Settings(), load=world.load)) as client:
        first = pool.submit(ask, client, deadline_ms=hurry_ms)
        assert held.reached.wait(WAIT_S)
        second = pool.submit(ask, client, deadline_ms=hurry_ms)
        shared = 'hivlp_cache_requests_total{result="shared",tier="memory"}'
        await_true(lambda: metric(client, shared) == 1)
        answers = [one.result() for one in (first, second)]
        held.open.set()
    assert [one.status_code for one in answers] == [200, 200]
    assert {one.json()["degraded"] for one in answers} == {True}


def test_an_answer_that_is_less_without_a_deadline_is_shared_all_the_same(
    world: World, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pipeline.find

    def find(*given: Any, **more: Any) -> dict[str, Any]:
        return {**whole(*given, **more), "degraded": True}

    monkeypatch.setattr(pipeline, "find", find)
    with serving(create_app(Settings(), load=world.load)) as client:
        gate = Gate(world)
        asked = [pool.submit(ask, client) for _ in range(6)]
        await_true(lambda: in_flight(client) == 6)
        gate.open.set()
        assert {one.result().status_code for one in asked} == {200}
    assert world.text.encoded.count(1) == 1


def test_searches_with_deadlines_stand_behind_nobody_of_a_batch(
    world: World, pool: ThreadPoolExecutor
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        asked = [pool.submit(ask, client, name, deadline_ms=LATE_MS) for name in ("red", "blue")]
        await_true(lambda: metric(client, "hivlp_queue_size") == 2)
        gate.open.set()
        assert [one.result().status_code for one in (held, *asked)] == [200] * 3
        assert metric(client, "hivlp_batch_size_count") == 3


def test_a_batchs_deadlines_count_from_its_arrival(world: World) -> None:
    body = b'{"searches": [{"kind": "text", "query": "red", "deadline_ms": 100}]}'
    with serving(create_app(Settings(), load=world.load)) as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as slow:
            slow.sendall(HEAD.format(path="/search/batch", length=len(body)).encode())
            time.sleep(0.2)
            slow.sendall(body)
            answered = b""
            while b"}}]" not in answered:
                answered += slow.recv(65_536)
    assert b"deadline_passed" in answered


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
    "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


def test_readiness_and_health_tell_of_workers_that_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(TIGHT, load=world.load)
    with serving(app) as client:
        assert client.get("/readyz").status_code == 200
        pool = app.state.hivlp.pipeline._batcher
        monkeypatch.setattr(pool, "_replace", lambda: None)

        def fail(_: float) -> None:
            raise SystemExit

        monkeypatch.setattr(pool, "_learn", fail)
        assert ask(client).status_code == 200
        await_true(lambda: client.get("/readyz").status_code == 503)
        red = client.get("/readyz").json()["error"]
        assert (red["code"], "workers died" in red["message"]) == ("not_ready", True)
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "workers died" in health.json()["reason"]
        assert client.get("/livez").status_code == 200
        assert metric(client, "hivlp_worker_deaths_total") == 1


def test_a_query_that_ends_threads_harms_itself_alone(world: World) -> None:
    def leave(_: int) -> None:
        raise SystemExit

    with serving(create_app(TIGHT, load=world.load)) as client:
        world.searcher.before = leave
        assert [ask(client, name).status_code for name in ("red", "green", "blue")] == [500] * 3
        world.searcher.before = lambda _: None
        assert ask(client).json()["hits"][0]["id"] == "red"
        assert client.get("/readyz").status_code == 200


def test_who_would_wait_too_long_gets_429(world: World, pool: ThreadPoolExecutor) -> None:
    short = TIGHT.model_copy(update={"limits": Limits(max_wait_ms=1)})
    with serving(create_app(short, load=world.load)) as client:
        world.searcher.before = lambda _: time.sleep(0.01)
        assert ask(client).status_code == 200  # from now on a search is known to take long
        gate = Gate(world)
        held = [pool.submit(ask, client, "white")]
        assert gate.reached.acquire(timeout=WAIT_S)  # nobody waits: the next one is let in
        held.append(pool.submit(ask, client, "green"))
        await_true(lambda: metric(client, "hivlp_queue_size") == 1)
        refused = ask(client, "blue")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "1 ms" in refused.json()["error"]["message"]
        gate.open.set()
        assert [one.result().status_code for one in held] == [200, 200]


def test_a_stage_of_what_failed_is_measured_too(world: World, pool: ThreadPoolExecutor) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        assert gate.reached.acquire(timeout=WAIT_S)
        assert ask(client, deadline_ms=SOON_MS).status_code == 504
        queued = 'hivlp_stage_duration_seconds_count{level="",stage="queue"}'
        assert metric(client, queued) == 1
        gate.open.set()
        assert held.result().status_code == 200
        assert metric(client, queued) == 2

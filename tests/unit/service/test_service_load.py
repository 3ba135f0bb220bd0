"""Many at once: permits, 429, single flight, the cache, clients that leave, errors in work."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hivlp.service.admission import Admission
from hivlp.service.app import create_app
from hivlp.service.cache.keys import answer_key
from hivlp.service.cache.memory import OVERHEAD_BYTES, MemoryCache
from hivlp.service.errors import Overloaded
from hivlp.service.logs import JsonLines
from hivlp.service.settings import CacheSettings, Limits, Settings, Threads
from tests.unit.service.fakes_service import NAMES, World
from tests.unit.service.serving_app import serving

WAIT_S = 20
TIGHT = Settings(limits=Limits(max_queue=2, max_batch=3), threads=Threads(workers=1))


class Gate:
    """Holds every search at its first level until it is opened."""

    def __init__(self, world: World) -> None:
        self.open = threading.Event()
        self.fail: Exception | None = None
        self.reached = threading.Semaphore(0)
        world.searcher.before = self.before

    def before(self, level: int) -> None:
        if level == 1:
            self.reached.release()
            assert self.open.wait(WAIT_S)
            if self.fail is not None:
                raise self.fail


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def ask(client: httpx.Client, text: str, request_id: str | None = None) -> httpx.Response:
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    return client.post("/search/text", json={"query": text, "k": 1}, headers=headers)


def await_true(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def in_flight(client: httpx.Client) -> float:
    return metric(client, "hivlp_in_flight")


def metric(client: httpx.Client, name: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    return 0.0


def test_a_full_server_answers_429_at_once_and_recovers(
    world: World, pool: ThreadPoolExecutor
) -> None:
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        accepted = [pool.submit(ask, client, name) for name in NAMES[:3]]
        await_true(lambda: in_flight(client) == 3)
        for response in (
            ask(client, "white"),
            client.post("/search/similar", json={"id": "red"}),
            client.post("/search/batch", json={"searches": [{"kind": "similar", "id": "red"}]}),
            client.post("/embed/text", json={"text": "red"}),
        ):
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
        assert client.get("/readyz").status_code == 200
        gate.open.set()
        assert [f.result().status_code for f in accepted] == [200, 200, 200]
        assert ask(client, "white").status_code == 200
        assert in_flight(client) == 0
        assert metric(client, 'hivlp_rejected_total{reason="overloaded"}') == 4


def test_a_batch_needs_a_permit_for_each_of_its_searches(
    world: World, pool: ThreadPoolExecutor
) -> None:
    batch = {"searches": [{"kind": "text", "query": name} for name in NAMES[:3]]}
    with serving(create_app(TIGHT, load=world.load)) as client:
        assert client.post("/search/batch", json=batch).status_code == 200
        gate = Gate(world)
        held = pool.submit(ask, client, "white")
        await_true(lambda: in_flight(client) == 1)
        assert client.post("/search/batch", json=batch).status_code == 429
        gate.open.set()
        assert held.result().status_code == 200
        assert client.post("/search/batch", json=batch).status_code == 200


def test_identical_questions_are_computed_once(world: World, pool: ThreadPoolExecutor) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        gate = Gate(world)
        asked: list[Future[httpx.Response]] = [pool.submit(ask, client, "red") for _ in range(8)]
        await_true(lambda: in_flight(client) == 8)
        gate.open.set()
        answers = [one.result().json() for one in asked]
        assert world.text.encoded.count(1) == 1
        assert world.live.leases == 0
        assert {answer["hits"][0]["id"] for answer in answers} == {"red"}
        assert sorted(answer["cached"] for answer in answers) == [False] + [True] * 7
        assert len({answer["request_id"] for answer in answers}) == 8
        shared = 'hivlp_cache_requests_total{result="shared",tier="memory"}'
        assert metric(client, shared) == 7


def test_a_repeated_question_comes_from_the_cache(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        first, second = ask(client, "red").json(), ask(client, "  red ").json()
        other = client.post("/search/text", json={"query": "red", "k": 2}).json()
        assert (first["cached"], second["cached"], other["cached"]) == (False, True, False)
        assert second["stages"] == []
        assert first["hits"] == second["hits"]
        assert world.text.encoded.count(1) == 2


def test_the_cache_can_be_off(world: World) -> None:
    off = Settings(cache=CacheSettings(max_bytes=0))
    with serving(create_app(off, load=world.load)) as client:
        assert not ask(client, "red").json()["cached"]
        assert not ask(client, "red").json()["cached"]


def test_an_error_is_not_cached_and_not_leaked(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: int) -> None:
        raise RuntimeError("the secret path /srv/keys")

    with (
        caplog.at_level(logging.ERROR, "hivlp.service"),
        serving(create_app(Settings(), load=world.load)) as client,
    ):
        world.searcher.before = broken
        response = ask(client, "red")
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "internal_error"
        assert "secret" not in response.text
        assert error["request_id"] in caplog.text
        world.searcher.before = lambda _: None
        assert ask(client, "red").json()["hits"][0]["id"] == "red"
        assert world.live.leases == 0
        assert in_flight(client) == 0


def test_one_failure_that_many_wait_for_is_logged_in_full_once(
    world: World, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR, "hivlp.service"),
        serving(create_app(Settings(), load=world.load)) as client,
    ):
        gate = Gate(world)
        asked = [pool.submit(ask, client, "red", "first")]
        await_true(lambda: in_flight(client) == 1)
        asked += [pool.submit(ask, client, "red", f"other-{n}") for n in range(7)]
        await_true(lambda: in_flight(client) == 8)
        gate.fail = RuntimeError("broken on purpose")
        gate.open.set()
        answers = [one.result().json()["error"] for one in asked]
    assert {one["code"] for one in answers} == {"internal_error"}
    full, *short = sorted(caplog.records, key=lambda record: record.exc_info is None)
    assert full.exc_info is not None
    assert full.getMessage() == "request first failed"
    assert sorted(record.getMessage() for record in short) == [
        f"request other-{n} failed as request first did: RuntimeError" for n in range(7)
    ]
    assert all(record.exc_info is None for record in short)


def test_a_failure_stands_under_who_began_the_search_though_that_one_has_left(
    world: World, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR, "hivlp.service"),
        serving(create_app(Settings(), load=world.load)) as client,
    ):
        gate = Gate(world)
        body = b'{"query": "red", "k": 1}'
        head = (
            "POST /search/text HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: first\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as left:
            left.sendall(head + body)
            await_true(lambda: in_flight(client) == 1)
            other = pool.submit(ask, client, "red", "other")
            await_true(lambda: in_flight(client) == 2)
        await_true(lambda: in_flight(client) == 1)
        gate.fail = RuntimeError("broken on purpose")
        gate.open.set()
        assert other.result().status_code == 500
    lines = [JsonLines().format(record) for record in caplog.records]
    full, short = (json.loads(line) for line in lines)
    assert (full["message"], full["request_id"]) == ("request first failed", "first")
    assert "broken on purpose" in full["exception"]
    assert (short["request_id"], "exception" in short) == ("other", False)


def test_failures_of_two_searches_are_both_logged_in_full(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR, "hivlp.service"),
        serving(create_app(Settings(), load=world.load)) as client,
    ):
        gate = Gate(world)
        gate.open.set()
        for name in ("one", "two"):
            gate.fail = RuntimeError(name)
            assert ask(client, "red", name).status_code == 500
    assert [record.getMessage() for record in caplog.records] == [
        "request one failed", "request two failed",
    ]  # fmt: skip
    assert all(record.exc_info is not None for record in caplog.records)


def test_one_bad_search_of_a_batch_harms_no_other(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        calls: list[int] = []

        def once(_: int) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("only the first")

        world.searcher.before = once
        searches = [{"kind": "text", "query": name, "k": 1} for name in NAMES]
        results = client.post("/search/batch", json={"searches": searches}).json()["results"]
    failed = [one for one in results if "error" in one]
    assert [one["error"]["code"] for one in failed] == ["internal_error"]
    assert len(results) == len(NAMES)


def test_answers_do_not_depend_on_what_runs_beside_them(
    world: World, pool: ThreadPoolExecutor
) -> None:
    off = Settings(cache=CacheSettings(max_bytes=0), threads=Threads(workers=4))
    with serving(create_app(off, load=world.load)) as client:
        alone = {name: ask(client, name).json()["hits"] for name in NAMES}
        crowd = list(pool.map(lambda name: (name, ask(client, name).json()["hits"]), NAMES * 8))
    assert all(hits == alone[name] for name, hits in crowd)


def test_a_client_that_leaves_harms_nobody(world: World, pool: ThreadPoolExecutor) -> None:
    body = b'{"query": "red", "k": 1}'
    head = (
        "POST /search/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as leaver:
            leaver.sendall(head + body)
            assert gate.reached.acquire(timeout=WAIT_S)
            follower = pool.submit(ask, client, "red")
            await_true(lambda: in_flight(client) == 2)
        await_true(lambda: in_flight(client) == 1)  # its permit is free again
        with socket.create_connection(address) as half:
            half.sendall(head + body[:5])  # and gone in the middle of its body
        gate.open.set()
        assert follower.result().json()["hits"][0]["id"] == "red"
        await_true(lambda: in_flight(client) == 0)
        assert ask(client, "green").status_code == 200
        left = 'hivlp_request_duration_seconds_count{route="/search/text",status="499"}'
        await_true(lambda: metric(client, left) == 2)


def test_stopping_finishes_what_was_accepted(world: World, pool: ThreadPoolExecutor) -> None:
    """One runs and two wait when the server is told to stop."""
    with serving(create_app(TIGHT, load=world.load)) as client:
        gate = Gate(world)
        url = str(client.base_url)

        def ask_apart(name: str) -> httpx.Response:
            with httpx.Client(base_url=url, timeout=WAIT_S) as own:
                return ask(own, name)

        accepted = [pool.submit(ask_apart, NAMES[0])]
        assert gate.reached.acquire(timeout=WAIT_S)  # else two might be taken together
        accepted += [pool.submit(ask_apart, name) for name in NAMES[1:3]]
        await_true(lambda: metric(client, "hivlp_queue_size") == 2)
        threading.Timer(0.3, gate.open.set).start()  # the server is stopping by then
    assert [one.result(WAIT_S).status_code for one in accepted] == [200, 200, 200]
    assert world.searcher.closed


def test_who_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    admission = Admission(10, max_wait_s=0.5)
    wait_s = 0.5
    admission.expected_wait_s = lambda: wait_s
    with admission.permits(3):
        wait_s = 3.1
        for wanted in (1, 3):  # one rule for single and batch
            with pytest.raises(Overloaded, match="500 ms") as refused, admission.permits(wanted):
                pass
            assert refused.value.headers == {"Retry-After": "3"}
        assert admission.in_flight == 3
    assert admission.in_flight == 0


def test_permits_are_given_back_whatever_happens() -> None:
    seen: list[int] = []
    admission = Admission(2, seen.append)
    with pytest.raises(ValueError, match="inside"), admission.permits(2):
        raise ValueError("inside")
    with admission.permits(), pytest.raises(Overloaded), admission.permits(2):
        pass
    assert admission.in_flight == 0
    assert seen == [2, 0, 1, 0]


def test_the_memory_cache_is_bounded_in_bytes() -> None:
    async def fill() -> None:
        cache = MemoryCache(max_bytes=10 * (OVERHEAD_BYTES + 100), ttl_s=60)
        for number in range(100):
            await cache.set(str(number), b"x" * 100)
        kept = [await cache.get(str(number)) for number in range(100)]
        assert sum(one is not None for one in kept) == 10
        assert kept[99] == b"x" * 100
        await cache.set("huge", b"x" * 100_000)
        assert await cache.get("huge") is None

    asyncio.run(fill())


def test_the_key_covers_everything_an_answer_depends_on() -> None:
    base: dict[str, Any] = {
        "query_encoder": "e",
        "index": "i",
        "version": "v",
        "kind": "text",
        "content": b"red",
        "parameters": {"k": 1, "plan": "auto"},
    }
    changes: list[dict[str, Any]] = [
        {"query_encoder": "f"},
        {"index": "j"},
        {"version": "w"},
        {"kind": "image"},
        {"content": b"blue"},
        {"parameters": {"k": 2, "plan": "auto"}},
    ]
    keys = {answer_key(**{**base, **change}) for change in [{}, *changes]}
    assert len(keys) == 7
    assert answer_key(**base) == answer_key(**{**base, "parameters": {"plan": "auto", "k": 1}})


def test_probes_and_metrics_answer_while_every_worker_is_busy_and_the_queue_full(
    world: World, pool: ThreadPoolExecutor
) -> None:
    gate = Gate(world)
    with serving(create_app(TIGHT, load=world.load)) as client:
        asked = [
            pool.submit(client.post, "/search/text", json={"query": f"red {n}"}) for n in range(3)
        ]
        await_true(lambda: in_flight(client) == 3)
        assert ask(client, "one more").status_code == 429
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert client.get(path).status_code == 200
        gate.open.set()
        assert {one.result(WAIT_S).status_code for one in asked} == {200}

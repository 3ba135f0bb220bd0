"""Whatever happens to the Redis behind the answer cache, every search is answered right.

A real redis-server, the real app over HTTP; the time-out is long and trials are frequent, so that a
slow machine sees the same as a fast one.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from hivlp.service import pipeline
from hivlp.service.app import create_app
from hivlp.service.serving import ServedModel
from hivlp.service.settings import CacheSettings, Settings, Threads
from tests.redis_server import Link, RedisServer, running
from tests.unit.service.fakes_service import NAMES, World, fake_manifest
from tests.unit.service.serving_app import serving

pytestmark = pytest.mark.redis

WAIT_S = 20
FAILURES = 3
TIMEOUT_MS = 250.0
SECRET = "s3cr3t'word"
UNUSABLE = ("error", "timeout", "garbage")
# So that the Redis is asked, every time.
NO_MEMORY = 0


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def server(redis_path: str) -> Iterator[RedisServer]:
    with running(redis_path) as server:
        yield server


def settings(url: str, **cache: Any) -> Settings:
    given: dict[str, Any] = {
        "redis_url": SecretStr(url),
        "redis_timeout_ms": TIMEOUT_MS,
        "breaker_failures": FAILURES,
        "breaker_window_s": 60,
        "breaker_retry_s": 0.05,
        "max_bytes": NO_MEMORY,
    }
    return Settings(cache=CacheSettings(**(given | cache)), threads=Threads(workers=2))


@contextlib.contextmanager
def served(world: World, url: str, **cache: Any) -> Iterator[httpx.Client]:
    with serving(create_app(settings(url, **cache), load=world.load)) as client:
        yield client


def ask(client: httpx.Client, text: str, **options: Any) -> dict[str, Any]:
    """The answer, which must be right."""
    response = client.post("/search/text", json={"query": text, "k": 2, **options})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["hits"][0]["id"] == text
    assert answer["returned"] == 2
    return answer


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    samples = [
        sample
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"hivlp_{name}" and labels.items() <= sample.labels.items()
    ]
    assert samples, (name, labels)
    return sum(sample.value for sample in samples)


def lookups(client: httpx.Client, result: str) -> float:
    return metric(client, "cache_requests_total", tier="redis", result=result)


def writes(client: httpx.Client, result: str) -> float:
    return metric(client, "cache_writes_total", tier="redis", result=result)


def is_open(client: httpx.Client, direction: str) -> bool:
    return metric(client, "cache_breaker_open", tier="redis", direction=direction) == 1


def await_true(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def await_closed(client: httpx.Client) -> None:
    await_true(lambda: not is_open(client, "read") and not is_open(client, "write"))


def ask_until_open(client: httpx.Client, direction: str) -> None:
    """Ask right answers of it until the breaker opens."""
    end = time.monotonic() + WAIT_S
    while not is_open(client, direction):
        assert time.monotonic() < end, "the breaker never opened"
        ask(client, random.choice(NAMES))


def keep(client: httpx.Client, text: str) -> None:
    """Ask for it until the answer lies in the Redis."""
    await_true(lambda: bool(ask(client, text)["cached"]))
    await_true(lambda: writes(client, "done") >= 1)


def keys(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        found: list[bytes] = [key for key in client.keys("hivlp:*") if key != b"hivlp:trial"]
    return found


def test_processes_share_what_one_of_them_found(server: RedisServer) -> None:
    first, second = World(), World()
    with served(first, server.url) as one, served(second, server.url, max_bytes=1 << 20) as other:
        await_closed(one)
        await_closed(other)
        found = ask(one, "red")
        await_true(lambda: writes(one, "done") == 1)
        shared = ask(other, "red")
        assert (found["cached"], shared["cached"], shared["stages"]) == (False, True, [])
        assert shared["hits"] == found["hits"]
        assert second.text.encoded == []
        assert [stage["name"] for stage in found["stages"]].count("cache") == 1
        assert lookups(other, "hit") == 1
        assert ask(other, "red")["cached"]
        assert lookups(other, "hit") == 1, "the second time it lay in this process"
        assert metric(other, "cache_requests_total", tier="memory", result="hit") == 1
        stage = {"stage": "cache", "level": ""}
        assert metric(other, "stage_duration_seconds_count", **stage) == 1
    with server.client() as client:
        (key,) = keys(server)
        assert 0 < client.pttl(key) <= 600_000
        assert b"red" not in key


def test_another_prefix_shares_nothing(server: RedisServer, world: World) -> None:
    with served(world, server.url) as one, served(World(), server.url, redis_prefix="b:") as other:
        await_closed(one)
        await_closed(other)
        keep(one, "red")
        assert not ask(other, "red")["cached"]


def other_version(world: World) -> None:
    world.searcher.info = replace(world.searcher.info, version="20270101T000000-000000")


def other_encoder(world: World) -> None:
    manifest = fake_manifest().model_copy(update={"query_encoder": "c" * 64})
    model = ServedModel(manifest, {"text": world.text, "image": world.image})
    world.live.served = replace(world.live.served, model=model)


@pytest.mark.parametrize("change", [other_version, other_encoder])
def test_another_version_or_model_takes_nothing_of_this_one(
    server: RedisServer, world: World, change: Callable[[World], None]
) -> None:
    changed = World()
    change(changed)
    with served(world, server.url) as one, served(changed, server.url) as other:
        await_closed(one)
        await_closed(other)
        keep(one, "red")
        found = ask(other, "red")
        assert (found["cached"], changed.text.encoded.count(1)) == (False, 1)
        assert found["snapshot"] == changed.searcher.info.version
        await_true(lambda: len(keys(server)) == 2)


def test_a_burst_of_one_new_query_looks_and_computes_once(server: RedisServer) -> None:
    world = World()
    link = Link(server)
    with (
        link.up(),
        served(world, link.url, redis_timeout_ms=1_000) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        await_closed(client)
        link.delay_s = 0.2
        asked: list[Future[dict[str, Any]]] = [pool.submit(ask, client, "red") for _ in range(16)]
        answers = [one.result() for one in asked]
        assert world.text.encoded.count(1) == 1
        assert sum(not answer["cached"] for answer in answers) == 1
        assert lookups(client, "miss") == 1
        await_true(lambda: writes(client, "done") == 1)
        assert world.live.leases == 0


def test_an_answer_on_its_way_to_redis_is_not_computed_again(server: RedisServer) -> None:
    world = World()
    link = Link(server)
    with link.up(), served(world, link.url, redis_timeout_ms=1_000) as client:
        await_closed(client)
        link.delay_s = 0.3
        assert not ask(client, "red")["cached"]
        assert writes(client, "done") == 0
        assert ask(client, "red")["cached"]
        assert world.text.encoded.count(1) == 1


def test_a_leader_that_leaves_while_redis_is_slow_fails_nobody(server: RedisServer) -> None:
    world = World()
    link = Link(server)
    body = b'{"query": "red", "k": 2}'
    head = (
        "POST /search/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with (
        link.up(),
        served(world, link.url, redis_timeout_ms=1_000) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        await_closed(client)
        link.delay_s = 0.4
        with socket.create_connection((client.base_url.host, client.base_url.port)) as leaver:
            leaver.sendall(head + body)
            await_true(lambda: metric(client, "in_flight") == 1)
            follower = pool.submit(ask, client, "red")
            await_true(lambda: metric(client, "in_flight") == 2)
        assert follower.result()["cached"]
        assert world.text.encoded.count(1) == 1
        await_true(lambda: metric(client, "in_flight") == 0)


@pytest.mark.parametrize("less", ["degraded", "partial"])
def test_an_answer_that_is_less_than_was_asked_for_is_never_kept(
    server: RedisServer, world: World, monkeypatch: pytest.MonkeyPatch, less: str
) -> None:
    whole = pipeline.find
    monkeypatch.setattr(
        pipeline, "find", lambda *given, **more: {**whole(*given, **more), less: True}
    )
    with served(world, server.url, max_bytes=1 << 20) as client:
        await_closed(client)
        assert [ask(client, "red")["cached"] for _ in range(3)] == [False] * 3
        assert metric(client, "cache_writes_total", tier="redis") == 0
    assert keys(server) == []


def test_a_redis_that_is_absent_at_the_start_is_used_once_it_is_there(
    redis_path: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(redis_path)
    try:
        with served(world, server.url) as client:
            for name in NAMES:
                assert not ask(client, name)["cached"]
            assert lookups(client, "open") == len(NAMES)
            assert lookups(client, "error") == lookups(client, "timeout") == 0
            assert client.get("/readyz").status_code == 200
            server.start()
            await_closed(client)
            keep(client, "red")
        said = [record.message for record in caplog.records if "answer cache" in record.message]
        assert sum("can't read Redis: ConnectionError" in one for one in said) == 1
    finally:
        server.close()


def test_a_redis_that_is_killed_and_started_again_is_missed_for_a_while(
    server: RedisServer, world: World
) -> None:
    with served(world, server.url) as client:
        await_closed(client)
        keep(client, "red")
        server.kill()
        ask_until_open(client, "read")
        before = lookups(client, "error")
        assert FAILURES <= before <= FAILURES + 1
        for name in NAMES:
            assert not ask(client, name)["cached"]
        assert lookups(client, "error") == before, "an open breaker asks nothing"
        assert metric(client, "cache_breaker_trips_total", direction="read") == 1
        server.start()
        await_closed(client)
        keep(client, "red")


def test_a_redis_that_starts_again_at_once_is_not_missed(server: RedisServer, world: World) -> None:
    with served(world, server.url) as client:
        await_closed(client)
        keep(client, "red")
        server.kill()
        server.start()
        keep(client, "green")
        assert not is_open(client, "read")
        assert lookups(client, "error") <= 1


def test_a_redis_that_is_stopped_costs_a_few_searches_the_time_out(
    server: RedisServer, world: World
) -> None:
    with served(world, server.url) as client:
        await_closed(client)
        keep(client, "red")
        server.stop()
        ask_until_open(client, "read")
        assert lookups(client, "timeout") == FAILURES
        await_true(lambda: is_open(client, "write"))  # nothing is on its way any more
        for name in NAMES:
            assert not ask(client, name)["cached"]
        assert lookups(client, "timeout") == FAILURES
        server.go_on()
        await_closed(client)
        assert ask(client, "red")["cached"]


def test_an_app_ends_though_its_redis_is_stopped(server: RedisServer, world: World) -> None:
    with served(world, server.url) as client:
        await_closed(client)
        ask(client, "red")
        server.stop()
        ask(client, "green")
    server.go_on()
    assert world.searcher.closed


def test_a_redis_that_is_too_slow_is_left_alone_until_it_is_fast(
    server: RedisServer, world: World
) -> None:
    link = Link(server)
    with link.up(), served(world, link.url) as client:
        await_closed(client)
        keep(client, "red")
        link.delay_s = 4 * TIMEOUT_MS / 1e3
        ask_until_open(client, "read")
        assert lookups(client, "timeout") == FAILURES
        await_true(lambda: is_open(client, "write"))  # nothing is on its way any more
        assert not ask(client, "red")["cached"]
        link.delay_s = 0
        await_closed(client)
        assert ask(client, "red")["cached"]


def test_many_at_once_wait_for_a_stopped_redis_one_time_out_and_no_longer(
    server: RedisServer, world: World
) -> None:
    with (
        served(world, server.url, redis_connections=1, breaker_failures=100) as client,
        ThreadPoolExecutor(len(NAMES)) as pool,
    ):
        await_closed(client)
        server.stop()
        assert not any(answer["cached"] for answer in pool.map(lambda n: ask(client, n), NAMES))
        server.go_on()
        assert lookups(client, "timeout") >= 1
        assert lookups(client, "busy") >= 1
        assert lookups(client, "timeout") + lookups(client, "busy") == len(NAMES)


def test_a_full_redis_still_answers_what_it_holds(server: RedisServer, world: World) -> None:
    with served(world, server.url) as client, server.client() as redis:
        await_closed(client)
        keep(client, "red")
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", "1")
        ask_until_open(client, "write")
        assert FAILURES <= writes(client, "error") <= FAILURES + 1
        assert ask(client, "red")["cached"]
        assert not is_open(client, "read")
        redis.config_set("maxmemory", "0")
        await_closed(client)
        keep(client, "blue")


def test_a_redis_that_answers_errors_is_left_alone_until_it_does_not(
    server: RedisServer, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with served(world, server.url) as client, server.client() as redis:
        await_closed(client)
        keep(client, "red")
        redis.execute_command("ACL", "SETUSER", "default", "-getrange")
        ask_until_open(client, "read")
        assert lookups(client, "error") == FAILURES
        assert not is_open(client, "write")
        redis.execute_command("ACL", "SETUSER", "default", "+getrange")
        await_closed(client)
        assert ask(client, "red")["cached"]
    assert "doesn't read Redis any more: NoPermissionError" in caplog.text


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$9999999999\r\nx",
        b"*3\r\n:1\r\n",
        b"+\xff\xfe\r\n",
        b":1\r\n",
        b"\0" * 5_000,
    ],
)
def test_what_is_no_redis_is_never_believed(server: RedisServer, world: World, says: bytes) -> None:
    link = Link(server)
    with link.up(), served(world, link.url) as client:
        await_closed(client)
        keep(client, "red")
        link.says = says
        for _ in range(FAILURES):
            ask(client, "red")
            ask(client, "green")
        assert any(lookups(client, result) for result in UNUSABLE)
        link.says = None
        await_closed(client)
        await_true(lambda: bool(ask(client, "red")["cached"]))


def spoil_truncated(redis: Any, key: bytes, other: bytes) -> None:
    redis.set(key, redis.get(key)[:-3])


def spoil_changed(redis: Any, key: bytes, other: bytes) -> None:
    redis.setrange(key, 40, b"\0\0\0")


def spoil_foreign(redis: Any, key: bytes, other: bytes) -> None:
    redis.set(key, b'{"hits": [], "returned": 0}')


def spoil_swapped(redis: Any, key: bytes, other: bytes) -> None:
    redis.set(key, redis.get(other))


def spoil_huge(redis: Any, key: bytes, other: bytes) -> None:
    redis.setrange(key, 200 << 20, b"x")


def spoil_listed(redis: Any, key: bytes, other: bytes) -> None:
    redis.delete(key)
    redis.rpush(key, b"x")


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_truncated,
        spoil_changed,
        spoil_foreign,
        spoil_swapped,
        spoil_huge,
        spoil_listed,
    ],
)
def test_garbage_under_our_key_is_a_miss_and_is_written_over(
    server: RedisServer, world: World, spoil: Callable[[Any, bytes, bytes], None]
) -> None:
    with served(world, server.url) as client, server.client() as redis:
        await_closed(client)
        keep(client, "green")
        (other,) = keys(server)
        keep(client, "red")
        await_true(lambda: len(keys(server)) == 2)
        (key,) = set(keys(server)) - {other}
        spoil(redis, key, other)
        assert not ask(client, "red")["cached"]
        assert lookups(client, "garbage") == 1
        await_true(lambda: redis.type(key) == b"string" and redis.strlen(key) < 10_000)
        await_true(lambda: bool(ask(client, "red")["cached"]))
        assert metric(client, "cache_breaker_trips_total", direction="read") == 0


def test_an_answer_that_is_too_large_is_not_written(server: RedisServer, world: World) -> None:
    with served(world, server.url, redis_max_value_bytes=1_024) as client:
        await_closed(client)
        large = {"query": "red", "k": len(NAMES), "explain": True}
        for _ in range(2):
            answer = client.post("/search/text", json=large).json()
            assert (answer["returned"], answer["cached"]) == (len(NAMES), False)
        assert writes(client, "too_large") == 2
        keep(client, "red")


def test_the_password_is_used_and_shown_nowhere(
    redis_path: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(redis_path, "--requirepass", SECRET)
    url = f"unix://:s3cr3t%27word@{server.socket}"
    caplog.set_level(logging.DEBUG)
    try:
        server.start(SECRET)
        with served(world, url) as client:
            await_closed(client)
            await_true(lambda: bool(ask(client, "red")["cached"]))
            with server.client(SECRET) as redis:
                redis.config_set("requirepass", "another")
                redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            ask_until_open(client, "read")
            shown = [client.get(path).text for path in ("/info", "/metrics", "/health")]
            assert client.get("/readyz").status_code == 200
    finally:
        server.close()
    said = caplog.text + "".join(shown)
    assert "invalid username-password pair" in said
    for secret in (SECRET, "s3cr3t"):
        assert secret not in said


def test_a_user_who_may_read_and_write_our_keys_and_nothing_else_is_enough(
    server: RedisServer, world: World
) -> None:
    with server.client() as redis:
        rule = "hivlp on >word ~hivlp:* -@all +getrange +set +ping"
        redis.execute_command("ACL", "SETUSER", *rule.split())
    with served(world, f"unix://hivlp:word@{server.socket}") as client:
        await_closed(client)
        keep(client, "red")


def test_a_server_that_repeats_the_password_does_not_get_it_into_the_log(
    redis_path: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with running(redis_path, "--rename-command", "AUTH", "") as server:
        with served(world, f"unix://:s3cr3t%27word@{server.socket}") as client:
            await_true(lambda: "can't read Redis" in caplog.text)
            assert not ask(client, "red")["cached"]
        assert "unknown command" in caplog.text
        assert "s3cr3t" not in caplog.text

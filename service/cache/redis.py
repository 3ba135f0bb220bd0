"""The cache that processes share: a Redis, asked in time or not at all.

Whatever is wrong with it (gone, stopped, slow, full, answering errors, holding what others wrote),
nothing is raised, and a look-up is over after `redis_timeout_ms`. Writes are made in the
background. Each direction has its breaker: a Redis that is full still answers what it holds.

    look-up ─► breaker open? ─► a free connection ─► GETRANGE ─► seal whole? ─► value
    trial    ─► connect (may take longer) ─► the same command, in time ─► breaker closes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from hivlp.service.cache.breaker import Breaker
from hivlp.service.cache.sealing import seal, unseal
from hivlp.service.cache.settings import CacheSettings
from hivlp.service.metrics import Metrics

log = logging.getLogger("hivlp.service")

TIER = "redis"
DIRECTIONS = ("read", "write")
LOOKUPS = ("hit", "miss", "garbage", "timeout", "error", "busy", "open")
WRITES = ("done", "timeout", "error", "busy", "open", "too_large")
# Under the prefix; what a trial reads and writes.
TRIAL_KEY = "trial"
# Writes that wait for a connection or an answer; beyond, an answer isn't written.
MAX_WRITES = 64
# So many different reasons are logged until a trial succeeds, each once.
MAX_REASONS = 5
MAX_SAID_CHARS = 200
# A timer of the event loop is late by up to 1 ms, and a connection that was given up is closed:
# taken off the time-out, so that all of it together costs a search no more (bench/redis_faults.py).
CLEANING_UP_MS = 2.0

Watch = Callable[[], Awaitable[None]]
Command = tuple[bytes | str | int, ...]


class Outcome(NamedTuple):
    """What came of a command: `done` with an answer, or why there is none."""

    result: str
    answer: bytes | None = None


class RedisCache:
    """An AnswerCache in a Redis. Lives on one event loop, which runs what `watches` names."""

    def __init__(self, url: str, settings: CacheSettings, metrics: Metrics) -> None:
        self._settings = settings
        timeout_ms = settings.redis_timeout_ms
        self._timeout_s = (timeout_ms - min(CLEANING_UP_MS, timeout_ms / 5)) / 1e3
        self._connect_timeout_s = settings.redis_connect_timeout_ms / 1e3
        # No time-out of the client's for commands: one of ours is around all that it does.
        pool = ConnectionPool.from_url(
            url,
            max_connections=settings.redis_connections,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=self._connect_timeout_s,
        )
        self._password = str(pool.connection_kwargs.get("password") or "")
        self._client: Any = Redis.from_pool(pool)  # its commands aren't typed
        # Every command holds one of these, so that the pool has a connection for it.
        self._free = asyncio.Semaphore(settings.redis_connections)
        self._writing: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups = metrics.cache_requests
        self._writes = metrics.cache_writes
        for counter, results in ((self._lookups, LOOKUPS), (self._writes, WRITES)):
            for result in results:
                counter.labels(TIER, result)  # 0 is a figure too
        self._breakers = {name: self._breaker(name, metrics) for name in DIRECTIONS}

    async def get(self, key: str) -> bytes | None:
        """What was kept under `key`, or None; after the time-out at the latest."""
        outcome = await self._look_up(key)
        self._lookups.labels(TIER, outcome.result).inc()
        return outcome.answer

    async def set(self, key: str, value: bytes) -> None:
        """Write `value` in the background; one that is too large, or one too many, isn't."""
        refused = self._begin_write(key, value)
        if refused is not None:
            self._writes.labels(TIER, refused).inc()

    def watches(self) -> dict[str, Watch]:
        """What must run as long as the app does, by name: the trials of each direction."""
        return {
            "trying to read from Redis": lambda: self._watch("read"),
            "trying to write to Redis": lambda: self._watch("write"),
        }

    async def close(self) -> None:
        """Let writes under way end, which takes the time-out at most, and close the connections."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def _look_up(self, key: str) -> Outcome:
        if key in self._writing:
            return Outcome("hit", self._writing[key])
        if self._breakers["read"].is_open:
            return Outcome("open")
        outcome = await self._ask("read", *self._reading(key))
        if outcome.result != "done":
            return outcome
        if not outcome.answer:
            return Outcome("miss")
        value = unseal(key, outcome.answer, self._settings.redis_max_value_bytes)
        return Outcome("garbage") if value is None else Outcome("hit", value)

    def _begin_write(self, key: str, value: bytes) -> str | None:
        """None when it has begun, else why it hasn't."""
        limit = self._settings.redis_max_value_bytes
        if self._breakers["write"].is_open:
            return "open"
        if len(self._writing) >= MAX_WRITES or key in self._writing:
            return "busy"
        if len(value) > limit or len(sealed := seal(key, value)) > limit:
            return "too_large"
        self._writing[key] = value
        task = asyncio.create_task(self._write(key, sealed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _write(self, key: str, sealed: bytes) -> None:
        try:
            outcome = await self._ask("write", *self._setting(key, sealed))
            self._writes.labels(TIER, outcome.result).inc()
        finally:
            del self._writing[key]

    def _reading(self, key: str) -> Command:
        # Not GET: whatever lies there, no more of it is read than one of ours could be.
        last = self._settings.redis_max_value_bytes - 1
        return ("GETRANGE", self._settings.redis_prefix + key, 0, last)

    def _setting(self, key: str, sealed: bytes) -> Command:
        kept_ms = max(1, round(self._settings.ttl_s * 1e3))
        return ("SET", self._settings.redis_prefix + key, sealed, "PX", kept_ms)

    async def _ask(self, direction: str, *command: bytes | str | int) -> Outcome:
        """One command, in time, connecting included. The breaker hears what came of it."""
        breaker, asked = self._breakers[direction], False
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                asked = True
                answer = _checked(direction, await self._client.execute_command(*command))
        except Exception as error:  # whatever the client raises: it is only a cache
            if not asked:
                return Outcome("busy")
            if _is_wrong_type(error):
                breaker.succeeded()
                return Outcome("garbage")
            breaker.failed(self._said(error))
            return Outcome("timeout" if _is_late(error) else "error")
        breaker.succeeded()
        return Outcome("done", answer)

    async def _watch(self, direction: str) -> None:
        """Close the direction's breaker when a trial succeeds; one trial in `breaker_retry_s`."""
        breaker, said = self._breakers[direction], set[str]()
        while True:
            await breaker.wait_open()
            reason = await self._trial(direction)
            if reason is None:
                breaker.close()
                said.clear()
            elif reason not in said and len(said) < MAX_REASONS:
                log.warning("answer cache: can't %s Redis: %s", direction, reason)
                said.add(reason)
            await asyncio.sleep(self._settings.breaker_retry_s)

    async def _trial(self, direction: str) -> str | None:
        """Do what searches would. None where that succeeds, else what went wrong."""
        reads = direction == "read"
        command = self._reading(TRIAL_KEY) if reads else self._setting(TRIAL_KEY, b"")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connect(self._settings.redis_connections if reads else 1)
            async with asyncio.timeout(self._timeout_s):
                _checked(direction, await self._send(*command))
        except Exception as error:
            return None if _is_wrong_type(error) else self._said(error)
        return None

    async def _connect(self, connections: int) -> None:
        """Have so many connections, or raise: one first, then the others at once."""
        await self._send("PING")
        more = (self._send("PING") for _ in range(connections - 1))
        # All are waited for: one that was left behind would keep its place in the pool.
        for result in await asyncio.gather(*more, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _send(self, *command: bytes | str | int) -> object:
        async with self._free:
            return await self._client.execute_command(*command)

    def _breaker(self, direction: str, metrics: Metrics) -> Breaker:
        is_open = metrics.cache_breaker_open.labels(TIER, direction)
        trips = metrics.cache_breaker_trips.labels(TIER, direction)
        is_open.set(1)

        def opened(reason: str) -> None:
            is_open.set(1)
            trips.inc()
            log.warning("answer cache: doesn't %s Redis any more: %s", direction, reason)

        def closed() -> None:
            is_open.set(0)
            log.info("answer cache: can %s Redis", direction)

        return Breaker(
            failures=self._settings.breaker_failures,
            window_s=self._settings.breaker_window_s,
            on_open=opened,
            on_close=closed,
        )

    def _said(self, error: Exception) -> str:
        """An error in a line for the log. A server may repeat what it was sent: not here."""
        if _is_late(error):
            return "no answer in time"
        text = str(error).partition(", with args")[0]
        if self._password:
            text = text.replace(self._password, "***")
        text = text.encode("unicode_escape").decode("ascii")
        return f"{type(error).__name__}: {text}"[:MAX_SAID_CHARS]


def _checked(direction: str, answer: object) -> bytes | None:
    """What a read found, None for a write. Raises InvalidResponse for what no Redis answers."""
    if direction == "read" and isinstance(answer, bytes):
        return answer
    if direction == "write" and answer is True:
        return None
    raise InvalidResponse(f"no answer to what was asked: {type(answer).__name__}")


def _is_late(error: Exception) -> bool:
    return isinstance(error, TimeoutError | RedisTimeoutError)


def _is_wrong_type(error: Exception) -> bool:
    """Whether somebody's list or hash lies under our key: Redis itself is well."""
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")

"""`Client` and `AsyncClient`: the same methods over a blocking and an asyncio transport.

Each method is made from the function of its endpoint and keeps its arguments, their types and its
docstring; all that the two classes don't share is how a step of a call is taken.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from hivlp.service.answers import BatchAnswer
from hivlp.service.client import endpoints
from hivlp.service.client.batching import Found, Packing, packing_for
from hivlp.service.client.errors import ClientError
from hivlp.service.client.exchange import (
    Call,
    Outcome,
    Prepare,
    Reply,
    Send,
    Step,
    Terms,
    Wait,
    exchange,
)
from hivlp.service.client.fields import Search
from hivlp.service.client.timing import DEFAULT_RETRIES, DEFAULT_TIMEOUTS, Retries, Timeouts

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
# The service closes an idle connection after 5 s; one let go earlier never meets that moment.
IDLE_S = 4.0
MAX_CONNECTIONS = 100


def _blocking(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method that makes a call and waits for it."""

    @functools.wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(make(*args, **kwargs))

    return _with_self(method, make)


def _awaiting(
    make: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method that makes a call and awaits it."""

    @functools.wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(make(*args, **kwargs))

    return _with_self(method, make)


def _with_self(method: F, make: Callable[..., object]) -> F:
    """Say what the method takes: `functools.wraps` alone forgets `self`."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    wanted = inspect.signature(make)
    parameters = [own, *wanted.parameters.values()]
    method.__signature__ = wanted.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


class _Endpoint:
    """Where the service is, and how patient to be with it."""

    _url: str
    _terms: Terms

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def with_options(
        self, *, timeouts: Timeouts | None = None, retries: Retries | None = None
    ) -> Self:
        """A client that is more patient, or less, over the same connections; close only one."""
        terms = self._terms
        other = copy.copy(self)
        other._terms = replace(
            terms, timeouts=timeouts or terms.timeouts, retries=retries or terms.retries
        )
        return other


def _http_arguments(url: str, key: str | None, verify: ssl.SSLContext | bool) -> dict[str, Any]:
    """What both of httpx's clients are made with. Raises ValueError, never quoting the key."""
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError("url: must begin with http:// or https:// and a host")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError("url: must not hold a user, a query or a fragment")
    headers = {"User-Agent": f"hivlp-client/{version('hivlp')}", "Accept": "application/json"}
    if key is not None:
        if not (key.isascii() and key.isprintable() and key) or " " in key:
            raise ValueError("key: must be printable ASCII characters without blanks")
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=IDLE_S)
    return {"base_url": parsed, "headers": headers, "limits": limits, "verify": verify}


class Client(_Endpoint):
    """A blocking client, to be shared by any number of threads.

    `url` may hold a path that everything lies below. `key` is sent as a bearer token and shown
    nowhere. `transport` takes the place of httpx's own: for a proxy, a client certificate, a test.
    Raises ValueError for a URL or a key that can't be one.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retries: Retries = DEFAULT_RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url, self._terms = url, Terms(timeouts, retries)
        self._http = httpx.Client(**_http_arguments(url, key, verify), transport=transport)

    search = _blocking(endpoints.search)
    search_text = _blocking(endpoints.search_text)
    search_image = _blocking(endpoints.search_image)
    search_similar = _blocking(endpoints.search_similar)
    search_vector = _blocking(endpoints.search_vector)
    search_batch = _blocking(endpoints.search_batch)
    embed_text = _blocking(endpoints.embed_text)
    embed_image = _blocking(endpoints.embed_image)
    get_item = _blocking(endpoints.get_item)
    put_item = _blocking(endpoints.put_item)
    delete_item = _blocking(endpoints.delete_item)
    item_image = _blocking(endpoints.item_image)
    indexes = _blocking(endpoints.indexes)
    snapshots = _blocking(endpoints.snapshots)
    activate = _blocking(endpoints.activate)
    rollback = _blocking(endpoints.rollback)
    activation = _blocking(endpoints.activation)
    start_build = _blocking(endpoints.start_build)
    builds = _blocking(endpoints.builds)
    build = _blocking(endpoints.build)
    cancel_build = _blocking(endpoints.cancel_build)
    info = _blocking(endpoints.info)
    health = _blocking(endpoints.health)
    ready = _blocking(endpoints.ready)

    def search_many(
        self, searches: Iterable[Search], *, concurrency: int | None = None
    ) -> list[Found]:
        """Any number of searches, in batches as large as the service takes, several at once.

        An answer or an error for each, in order: a bad search harms no other. `concurrency` is how
        many requests are under way at once, by default as many as the service's queue holds, at
        most 4. Raises ClientError only where the service's limits can't be asked for.
        """
        packing, workers = packing_for(searches, self.info().limits, concurrency)
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in [pool.submit(self._work, packing) for _ in range(workers)]:
                    done.result()
            finally:
                packing.stop()
        return packing.results()

    def _work(self, packing: Packing) -> None:
        while (pack := packing.take()) is not None:
            outcome: BatchAnswer | ClientError
            try:
                outcome = self._run(pack.call())
            except ClientError as error:
                outcome = error
            packing.settle(pack, outcome)

    def _run(self, call: Call[T]) -> T:
        steps, outcome = exchange(call, self._terms), None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            outcome = self._take(step)

    def _take(self, step: Step) -> Outcome:
        if isinstance(step, Prepare):
            return step.fields()
        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None
        try:
            return self._send(step)
        except (httpx.HTTPError, TimeoutError) as error:
            return error

    def _send(self, step: Send) -> Reply:
        """httpx bounds each piece of an answer; the time of all of them is looked at in between."""
        end_s = time.monotonic() + step.left_s
        pieces = []
        with self._http.stream(**step.arguments) as response:
            for piece in response.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > end_s:
                    raise TimeoutError
        return Reply(response.status_code, response.headers, b"".join(pieces))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_Endpoint):
    """A client for asyncio; all else as `Client`. It belongs to the event loop it is used in."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retries: Retries = DEFAULT_RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url, self._terms = url, Terms(timeouts, retries)
        self._http = httpx.AsyncClient(**_http_arguments(url, key, verify), transport=transport)

    search = _awaiting(endpoints.search)
    search_text = _awaiting(endpoints.search_text)
    search_image = _awaiting(endpoints.search_image)
    search_similar = _awaiting(endpoints.search_similar)
    search_vector = _awaiting(endpoints.search_vector)
    search_batch = _awaiting(endpoints.search_batch)
    embed_text = _awaiting(endpoints.embed_text)
    embed_image = _awaiting(endpoints.embed_image)
    get_item = _awaiting(endpoints.get_item)
    put_item = _awaiting(endpoints.put_item)
    delete_item = _awaiting(endpoints.delete_item)
    item_image = _awaiting(endpoints.item_image)
    indexes = _awaiting(endpoints.indexes)
    snapshots = _awaiting(endpoints.snapshots)
    activate = _awaiting(endpoints.activate)
    rollback = _awaiting(endpoints.rollback)
    activation = _awaiting(endpoints.activation)
    start_build = _awaiting(endpoints.start_build)
    builds = _awaiting(endpoints.builds)
    build = _awaiting(endpoints.build)
    cancel_build = _awaiting(endpoints.cancel_build)
    info = _awaiting(endpoints.info)
    health = _awaiting(endpoints.health)
    ready = _awaiting(endpoints.ready)

    async def search_many(
        self, searches: Iterable[Search], *, concurrency: int | None = None
    ) -> list[Found]:
        """As `Client.search_many`."""
        limits = (await self.info()).limits
        packing, workers = packing_for(searches, limits, concurrency)
        working = [asyncio.create_task(self._work(packing)) for _ in range(workers)]
        try:
            await asyncio.gather(*working)
        finally:
            for worker in working:
                worker.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        return packing.results()

    async def _work(self, packing: Packing) -> None:
        while (pack := await asyncio.to_thread(packing.take)) is not None:
            outcome: BatchAnswer | ClientError
            try:
                outcome = await self._run(pack.call())
            except ClientError as error:
                outcome = error
            packing.settle(pack, outcome)

    async def _run(self, call: Call[T]) -> T:
        steps, outcome = exchange(call, self._terms), None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            outcome = await self._take(step)

    async def _take(self, step: Step) -> Outcome:
        if isinstance(step, Prepare):
            return await asyncio.to_thread(step.fields) if step.blocks else step.fields()
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None
        try:
            async with asyncio.timeout(step.left_s):
                response = await self._http.request(**step.arguments)
        except (httpx.HTTPError, TimeoutError) as error:
            return error
        return Reply(response.status_code, response.headers, response.content)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

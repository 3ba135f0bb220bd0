"""The outermost layer of every request: its id, its size limit, its metrics, its headers.

Plain ASGI, so that it sees the bytes as they arrive: a body is counted while it streams, whatever
Content-Length says, and an exception that nobody expected still gets an answer in our form.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hivlp.service.admission import Room
from hivlp.service.bounds import CROWDED, WAITING
from hivlp.service.errors import (
    BodyTimeout,
    BodyTooLarge,
    TooManyConnections,
    internal_problem,
    let_go,
    problem_of,
    problem_response,
)
from hivlp.service.logs import REQUEST_ID as LOGGED_ID
from hivlp.service.metrics import UNMATCHED, Metrics
from hivlp.service.request_log import Ended
from hivlp.service.settings import Limits

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLIENT_LEFT = 499
# Answered whatever else is full: a probe that isn't makes things worse.
PROBES = frozenset({"/livez", "/readyz"})
# Of each body; so much of every connection's is held without being counted.
UNCOUNTED_BYTES = 64 << 10
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Edge:
    """ASGI middleware around the whole app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        limits: Limits,
        room: Room,
        ended: Callable[[Ended], dict[str, str] | None] = lambda _: None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._limits = limits
        self._room = room
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answered as GET everywhere; the server below keeps the body to itself.
            scope = {**scope, "method": "GET"}
        with self._room.share() as take:
            exchange = _Exchange(scope, receive, send, self._limits, take)
            token = LOGGED_ID.set(exchange.state["request_id"])
            try:
                exchange.admit()
                await self._app(scope, exchange.receive, exchange.send)
            except ClientDisconnect:
                exchange.status = CLIENT_LEFT
            except Exception as error:
                await exchange.fail(error)
            finally:
                self._count(exchange)
                LOGGED_ID.reset(token)

    def _count(self, exchange: _Exchange) -> None:
        route = getattr(exchange.scope.get("route"), "path", UNMATCHED)
        status = str(exchange.status)
        ended = exchange.ended(route)
        exemplar = self._ended(ended)
        duration = self._metrics.request_duration.labels(route, status)
        duration.observe(ended.duration_s, exemplar)
        code = exchange.state.get("error_code")
        if code is not None and exchange.status != 500:
            self._metrics.rejected.labels(code).inc()


class _Exchange:
    """One request and its answer, as they pass."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: Limits,
        take: Callable[[int], None],
    ) -> None:
        self.scope = scope
        self.status = CLIENT_LEFT
        self._receive = receive
        self._send = send
        self._take = take
        self._max_body_bytes = limits.max_body_bytes
        self._body_timeout_s = limits.body_timeout_s
        self._received_bytes = 0
        self._taken_bytes = 0
        self._received_all = scope["method"] == "GET"
        self._started = False
        headers = Headers(scope=scope)
        self._declared = headers.get("content-length", "")
        given = headers.get("x-request-id", "")
        self._request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.state: dict[str, Any] = scope.setdefault("state", {})
        self.state["request_id"] = self._request_id
        self.state["hold"] = take
        self.state["started_s"] = time.perf_counter()
        self._due_s = asyncio.get_running_loop().time() + limits.body_timeout_s

    def admit(self) -> None:
        """Raise TooManyConnections on a connection beyond the limit, unless it asks for health."""
        if CROWDED in self.state and self.scope["path"] not in PROBES:
            raise TooManyConnections(self.state[CROWDED])

    async def receive(self) -> Message:
        """The next message, unless the body is or says it is too large, or is late."""
        if self._declared.isdigit() and int(self._declared) > self._max_body_bytes:
            raise BodyTooLarge(self._max_body_bytes)
        message = await self._next()
        self._received_bytes += len(message.get("body", b""))
        self._received_all = not message.get("more_body", False)
        if self._received_bytes > self._max_body_bytes:
            raise BodyTooLarge(self._max_body_bytes)
        self._take_more()
        return message

    def _take_more(self) -> None:
        """Count what is held of this body. Raises Overloaded."""
        counted = max(0, self._received_bytes - UNCOUNTED_BYTES)
        self._take(counted - self._taken_bytes)
        self._taken_bytes = counted

    async def _next(self) -> Message:
        if self._received_all:  # what comes now is that the client left
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._due_s):
                return await self._receive()
        except TimeoutError:
            raise BodyTimeout(self._body_timeout_s) from None

    async def send(self, message: Message) -> None:
        """Pass a message on, with our headers on its start."""
        if message["type"] == "http.response.start":
            self._started = True
            self.status = CLIENT_LEFT if self._has_left() else message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._request_id
            if CROWDED in self.state:
                headers["Connection"] = "close"
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            if self.state.get("role"):  # what a key opens is for whoever has it
                kept = headers.get("Cache-Control", "no-store")
                headers["Cache-Control"] = f"private, {kept}"
            with self._waiting(headers):
                await self._send(message)
            return
        await self._send(message)

    def _waiting(self, headers: MutableHeaders) -> AbstractContextManager[None]:
        """None is written before the one ahead of it on its connection is read: it waits whole."""
        waiting = self.state.get(WAITING)
        size = int(headers.get("content-length", 0))
        return contextlib.nullcontext() if waiting is None else waiting(size)

    def _has_left(self) -> bool:
        """Whether nobody waits for the answer any more; a body still to come isn't asked for."""
        if not self._received_all:
            return False
        # One step of `receive`: a client that left is told at once, all else would be waited for.
        waiting = self._receive().__await__()
        try:
            next(waiting)
        except StopIteration as told:
            return bool(told.value["type"] == "http.disconnect")
        waiting.close()
        return False

    def ended(self, route: str) -> Ended:
        """What there is to say about it in the end."""
        return Ended(
            request_id=self._request_id,
            method=self.scope["method"],
            route=route,
            status=self.status,
            started_s=self.state["started_s"],
            duration_s=time.perf_counter() - self.state["started_s"],
            error=self.state.get("error_code"),
            noted=self.state.get("noted", []),
            headers=self.scope["headers"],
        )

    async def fail(self, error: Exception) -> None:
        """Answer what no handler did; an answer already begun can only be cut off."""
        problem = problem_of(error) or internal_problem(error, self._request_id)
        if self._started:
            self.status = problem.status
            raise error
        self.state["error_code"] = problem.code
        let_go(error)
        response = problem_response(problem, self._request_id)
        await response(self.scope, self._receive, self.send)

"""One connection of the server: uvicorn's, with bounds on what comes before a request is one.

uvicorn over httptools waits for ever for a request's head, takes one of any size, queues as many
requests as are sent before the first is answered, and discards for ever what is still sent of a
body once it was answered. Here a head has a size and a time, a body that nobody reads any more a
time, and an answer that isn't fetched too; what all of them leave unread has a size (`unread.py`).
Of requests sent ahead a few wait for their turn; what comes behind those is not read, and the last
that waits is told that the connection ends. Where a client is refused while it still sends, it is
told so before the connection ends: the socket is closed for writing first, and what comes meanwhile
is dropped; closed at once, the client would see a reset and not the answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from hivlp.service.answering import Answering
from hivlp.service.bounds import CROWDED, KIB, WAITING, ConnectionSettings
from hivlp.service.errors import Problem
from hivlp.service.unread import Unread

if TYPE_CHECKING:
    from hivlp.service.state import ServingState

# Seconds that a client that was refused has to take the answer.
LINGER_S = 2.0
# Connections beyond the limit that are told so; those beyond these are dropped.
TOLD = 64
# Requests of one connection that wait for those before them; an answered one frees no place.
MAX_PIPELINED = 16
# Times `answer_timeout_s` that a client may take which does read, but slowly.
READING_SHARE = 20
# Of a message whose head is here; framing of tiny chunks is several times the body.
WIRE_SHARE, WIRE_MORE = 8, 64 * KIB


def connection_options(state: ServingState) -> dict[str, Any]:
    """What `uvicorn.Config` is told of connections, and no more of anything."""
    settings, metrics = state.settings, state.metrics

    def count(reason: str) -> None:
        metrics.rejected.labels(reason).inc()

    wire = WIRE_SHARE * settings.limits.max_body_bytes + WIRE_MORE
    unread = Unread(settings.limits.max_unread_bytes, time.monotonic)
    made = partial(Connection, settings.connections, wire, unread, count, metrics.connections.set)
    keep_alive_s = settings.connections.keep_alive_s
    return {"http": made, "timeout_keep_alive": keep_alive_s, "ws": "none"}


class Connection(HttpToolsProtocol):
    """Made by uvicorn, one a connection."""

    def __init__(
        self,
        settings: ConnectionSettings,
        max_wire_bytes: int,
        unread: Unread,
        count: Callable[[str], None],
        connected: Callable[[int], None],
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, WAITING: self.waiting}, _loop)
        self._settings = settings
        self._max_wire_bytes = max_wire_bytes
        self._unread = unread
        self._count = count
        self._connected = connected
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._whole = True  # nothing of a message is on its way
        self._idle = True  # nor was, when the bytes came that are being read
        self._bytes = 0  # of the head, or of all that follows it
        self._lingering = False
        self._offered = False  # another protocol, which is to be passed over
        self._full = False  # of requests sent ahead: nothing is parsed any more
        self._waiting_bytes = 0  # of an answer that waits for the one before it to be read
        self._left_bytes = 0  # of answers, when that was looked at last
        self._reader_due_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, unless there are too many that do."""
        super().connection_made(transport)
        over = len(self.connections) - self._settings.max
        self._connected(len(self.connections))
        if over > TOLD:
            self._count("too_many_connections")
            transport.abort()
            return
        if over > 0:
            self.app_state = {**self.app_state, CROWDED: self._settings.max}
        self._set_timer(self._settings.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """All is over."""
        self._stop_timer()
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._connected(len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Some bytes of a message, or of several."""
        self._idle = self._whole
        self._bytes = len(data) if self._idle else self._bytes + len(data)
        if self._lingering:
            if self._bytes > self._max_wire_bytes:
                self.transport.abort()
            return
        if self._full:  # whoever waits for a body lets it be read on
            self.flow.pause_reading()
            return
        self._unset_keepalive_if_required()
        if self._whole and self._timer is None:
            self._set_timer(self._settings.head_timeout_s, self._head_is_late)
        self._feed(data)
        if self._lingering:
            return
        if self._in_head and self._timer is None:  # it came behind another message
            self._set_timer(self._settings.head_timeout_s, self._head_is_late)
        if self._in_head and self._bytes > self._settings.max_head_bytes:
            self._refuse_head()
        elif not self._in_head and not self._whole and self._bytes > self._max_wire_bytes:
            self._count("body_too_large")
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._offered:
                self._offered = False
                self._feed(self._head_without_offer() + data[offer.args[0] :])
            elif self.cycle is not None:  # CONNECT, and what follows is not HTTP
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            if self._full:
                return
            self._refuse(Problem(400, "malformed_request", "this is not HTTP/1.1"))

    def _head_without_offer(self) -> bytes:
        """The head that was just read, without the offer to go on in another protocol."""
        method = self.parser.get_method()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        lines = [b"%s %s HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._in_head, self._whole = True, False
        if not self._idle:  # it follows another, and how much of these bytes is its own isn't known
            self._bytes = 0
        self._idle = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those that follow a body are nobody's concern, and come too late to be."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A whole head."""
        self._stop_timer()
        self._in_head, self._bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        most = self._settings
        if self._lingering:
            return
        if size > most.max_head_bytes or len(self.headers) > most.max_headers:
            self._refuse_head()
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing()
            raise _Full
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # httptools takes what follows, a body too, for the other protocol.
            self._offered = True
            return
        super().on_headers_complete()
        self.cycle.transport = Answering(  # type: ignore[assignment]
            self.cycle, self.transport, self.loop, self.close_for_writing
        )

    def on_body(self, body: bytes) -> None:
        """Some of a body."""
        if not self._lingering:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a message is here."""
        if self._offered:
            return
        self._whole = True
        if self._lingering:
            return
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:  # it was answered before
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """All of an answer is on its way; what is still sent to it has little time."""
        if self._lingering:
            self.pipeline.clear()
            return
        super().on_response_complete()
        if self.pipeline or self._full:  # uvicorn reads on
            self.flow.pause_reading()
        if self._whole or self.pipeline or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if not self._in_head:
            self._set_timer(LINGER_S, self.close_for_writing)

    def pause_writing(self) -> None:
        """The client does not fetch what was written."""
        super().pause_writing()
        self._watch_reader()
        self._unread.add(self)

    def resume_writing(self) -> None:
        """It does."""
        self._unread.discard(self)
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        if self.flow is not None:
            super().resume_writing()

    @property
    def unread_bytes(self) -> int:
        """Of answers that the client hasn't taken."""
        return self.transport.get_write_buffer_size() + self._waiting_bytes

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """While an answer of `size` bytes may have to wait for the one before it to be read."""
        self._waiting_bytes += size
        if self.flow.write_paused:
            self._unread.look()
        try:
            yield
        finally:
            self._waiting_bytes -= size

    def give_up(self) -> None:
        """The client takes nothing, and others need the room."""
        self._count("answers_unread")
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long enough."""
        self._end()

    def close_for_writing(self) -> None:
        """Let the client read what it was told; what it sends is dropped, and soon refused."""
        if self._lingering or self.transport.is_closing():
            return
        if self._whole:
            self._end()
            return
        self._lingering, self._bytes = True, 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_S, self.transport.abort)

    def _end(self) -> None:
        """Close; where the client doesn't take what was written, give it up."""
        if not self.transport.is_closing():
            self.transport.close()
            self._stop_timer()
            self._watch_reader()

    def _set_timer(self, wait_s: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(wait_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # not for want of sending
            self._set_timer(self._settings.head_timeout_s, self._head_is_late)
        elif not self._in_head:
            self._end()
        else:
            limit_s = self._settings.head_timeout_s
            message = f"the head of the request did not come within {limit_s:g} s"
            self._refuse(Problem(408, "head_timeout", message))

    def _watch_reader(self) -> None:
        """Give up a client that leaves what was written unread."""
        if self._reader_timer is not None:
            return
        wait_s = self._settings.answer_timeout_s
        self._reader_due_s = self.loop.time() + READING_SHARE * wait_s
        self._look_again()

    def _look_again(self) -> None:
        self._left_bytes = self.transport.get_write_buffer_size()
        wait_s = self._settings.answer_timeout_s
        self._reader_timer = self.loop.call_later(wait_s, self._reader_is_late)

    def _reader_is_late(self) -> None:
        reads = self.transport.get_write_buffer_size() < self._left_bytes
        if reads and self.loop.time() < self._reader_due_s:
            self._look_again()
            return
        self._count("answer_timeout")
        self.transport.abort()

    def _stop_parsing(self) -> None:
        """So many requests wait that no more are taken: the last of them is answered, and then
        the connection ends.
        """
        self._full = True
        self._count("pipeline_too_long")
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def _refuse_head(self) -> None:
        most = self._settings
        message = (
            f"the head of a request may have {most.max_head_bytes} bytes and {most.max_headers} "
            "headers"
        )
        self._refuse(Problem(431, "head_too_large", message))

    def _refuse(self, problem: Problem) -> None:
        """Answer what never became a request, and end."""
        if self._lingering or self.transport.is_closing():
            return
        self._count(problem.code)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.close()  # in the middle of another answer nothing can be said
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        request_id = uuid.uuid4().hex
        body = orjson.dumps(problem.body(request_id))
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + body)
        self._whole = False
        self.close_for_writing()


class _Full(Exception):
    """Ends the parsing of what was read, from within it."""

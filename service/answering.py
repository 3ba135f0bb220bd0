"""The transport of a connection as one answer sees it.

uvicorn writes an answer's head and its body apart, and each is a system call that wakes the client.
Here the head goes out together with what is written in the same turn of the event loop. And closing
lets the client read the answer first (`Connection.close_for_writing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Cycle(Protocol):
    """uvicorn's request and its answer."""

    scope: Any
    response_started: bool


class Answering:
    """What uvicorn needs of a transport, for one answer."""

    def __init__(
        self,
        cycle: Cycle,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        close: Callable[[], None],
    ) -> None:
        self._cycle: Cycle | None = cycle  # until the head is written: the cycle holds this
        self._transport = transport
        self._loop = loop
        self._close = close
        self._head = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Send; the head waits for this turn's end, or for what is written before."""
        cycle = self._cycle
        if self._head:
            data, self._head = self._head + data, b""
        elif cycle is not None and cycle.response_started:  # "100 Continue" is no answer's head
            self._cycle = None
            if cycle.scope["method"] != "HEAD":  # of which nothing but the head is written
                self._head = data
                self._loop.call_soon(self._send_head)
                return
        self._transport.write(data)

    def close(self) -> None:
        """Send what there is, and let the client read it before the connection ends."""
        self._send_head()
        self._close()

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

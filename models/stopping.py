"""Long work that ends early when whoever asked for it is to end.

    with until(event):      around it, in its thread
        file_record(path)   it calls `go_on` between blocks

Notable: the event goes by a context variable. What takes long lies far below who knows that it
must end, and the same functions serve commands, which end by a signal and need none of this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hivlp.models.errors import HivlpError

_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


class Stopped(HivlpError):
    """The work was given up, because the service ends."""

    def __init__(self) -> None:
        super().__init__("given up: the service ends")


@contextmanager
def until(stop: threading.Event) -> Iterator[None]:
    """Have what runs in here end, by Stopped, once `stop` is set."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def go_on() -> None:
    """Called by long work, now and then. Raises Stopped."""
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise Stopped

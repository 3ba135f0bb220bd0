"""Admission: a permit before any work, for single and batch requests by one rule; and room for what
is held meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hivlp.service.errors import Overloaded


class Admission:
    """Counts what is in flight. Used from the event loop alone, so it needs no lock.

    `expected_wait_s()` is how long who comes now would wait; over `max_wait_s` nobody is let in.
    """

    def __init__(
        self,
        limit: int,
        on_change: Callable[[int], None] = lambda _: None,
        *,
        max_wait_s: float = math.inf,
    ) -> None:
        self.limit = limit
        self.in_flight = 0
        self.expected_wait_s: Callable[[], float] = lambda: 0.0
        self._on_change = on_change
        self._max_wait_s = max_wait_s

    @contextmanager
    def permits(self, wanted: int = 1) -> Iterator[None]:
        """Hold `wanted` permits. Raises Overloaded when there aren't that many or the wait would be
        too long, and takes none.
        """
        wait_s = self.expected_wait_s()
        if self.in_flight + wanted > self.limit:
            raise Overloaded(f"{self.limit} requests are in flight", retry_s=wait_s)
        if wait_s > self._max_wait_s:
            allowed = f"a wait of {1e3 * self._max_wait_s:g} ms is expected"
            raise Overloaded(allowed, retry_s=wait_s - self._max_wait_s)
        self._move(wanted)
        try:
            yield
        finally:
            self._move(-wanted)

    def _move(self, step: int) -> None:
        self.in_flight += step
        self._on_change(self.in_flight)


class Room:
    """Counts the bytes that requests hold. Used from the event loop alone, so it needs no lock."""

    def __init__(self, limit: int, what: str) -> None:
        self.limit = limit
        self.held = 0
        self._what = what

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many bytes more; all are given back when the block ends.

        It raises Overloaded when there aren't that many, and takes none.
        """
        own = 0

        def take(size: int) -> None:
            nonlocal own
            if self.held + size > self.limit:
                raise Overloaded(f"{self.limit} {self._what}")
            self.held += size
            own += size

        try:
            yield take
        finally:
            self.held -= own

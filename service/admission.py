"""Admission: a permit before any work, for single and batch requests by one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hivlp.service.errors import Overloaded


class Admission:
    """Counts what is in flight. Used from the event loop alone, so it needs no lock."""

    def __init__(self, limit: int, on_change: Callable[[int], None] = lambda _: None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._on_change = on_change

    @contextmanager
    def permits(self, wanted: int = 1) -> Iterator[None]:
        """Hold `wanted` permits. Raises Overloaded when there aren't that many, and takes none."""
        if self.in_flight + wanted > self.limit:
            raise Overloaded(self.limit)
        self._move(wanted)
        try:
            yield
        finally:
            self._move(-wanted)

    def _move(self, step: int) -> None:
        self.in_flight += step
        self._on_change(self.in_flight)

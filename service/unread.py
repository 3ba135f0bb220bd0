"""Answers that clients have not taken, of all connections together: so many bytes and no more.

What a client doesn't read waits in memory until it does or is given up, and a large answer on each
of many connections is more than there is. Where all of it together is too much, the one that has
taken nothing for longest is given up, never the only one: who reads, however slowly, goes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Reader(Protocol):
    """A client that is behind, as its connection sees it."""

    @property
    def unread_bytes(self) -> int:
        """What waits for it."""

    def give_up(self) -> None:
        """End its connection, with all that waits."""


class Unread:
    """Who is behind, and since when without taking anything. For one event loop."""

    def __init__(self, limit_bytes: int, time_s: Callable[[], float]) -> None:
        self._limit = limit_bytes
        self._time_s = time_s
        self._behind: dict[Reader, tuple[int, float]] = {}

    def add(self, reader: Reader) -> None:
        """It is behind from now on; somebody may have to go for it."""
        self._behind.setdefault(reader, (reader.unread_bytes, self._time_s()))
        self.look()

    def discard(self, reader: Reader) -> None:
        """It has taken what there was, or is gone."""
        self._behind.pop(reader, None)

    def look(self) -> None:
        """Give up who has taken nothing for longest, until no more waits than may."""
        now = self._time_s()
        for reader, (before, since_s) in self._behind.items():
            size = reader.unread_bytes
            self._behind[reader] = (size, now if size < before else since_s)
        total = sum(size for size, _ in self._behind.values())
        while total > self._limit and len(self._behind) > 1:
            slowest = min(self._behind, key=lambda reader: self._behind[reader][1])
            total -= self._behind.pop(slowest)[0]
            slowest.give_up()

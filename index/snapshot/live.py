"""The swap cell: answers in flight keep what they began with; new ones get the new version.

with live.lease() as snapshot: ...     # stays open for the whole block
live.swap(new)                         # returns at once; the old one closes with its last lease
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What is swapped: a snapshot alone, or a unit of models, searcher and snapshot."""

    def close(self) -> None:
        """Let go of memory and files."""


T = TypeVar("T", bound=Closable)


class _Generation(Generic[T]):
    """One value and the number of leases on it; `retired` once another took its place."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.leases = 0
        self.retired = False


class LiveSnapshot(Generic[T]):
    """Holds the value that is live. Safe to use from several threads at once."""

    def __init__(self, value: T) -> None:
        self._lock = threading.Lock()
        self._now = _Generation(value)

    @contextlib.contextmanager
    def lease(self) -> Iterator[T]:
        """The live value, kept open until the block ends. Raises RuntimeError once closed."""
        with self._lock:
            generation = self._now
            if generation.retired:
                raise RuntimeError("nothing is live: it was closed")
            generation.leases += 1
        try:
            yield generation.value
        finally:
            self._release(generation)

    def swap(self, value: T) -> None:
        """Make `value` live; the old one closes now, or when its last lease ends."""
        with self._lock:
            old, self._now = self._now, _Generation(value)
            close = not old.retired and old.leases == 0
            old.retired = True
        if close:
            old.value.close()

    def close(self) -> None:
        """Retire the live value: it closes when its last lease ends, and no new lease is given."""
        with self._lock:
            close = not self._now.retired and self._now.leases == 0
            self._now.retired = True
        if close:
            self._now.value.close()

    def _release(self, generation: _Generation[T]) -> None:
        with self._lock:
            generation.leases -= 1
            close = generation.retired and generation.leases == 0
        if close:
            generation.value.close()

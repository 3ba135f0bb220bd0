"""The swap cell: answers in flight keep what they began with; new ones get the new version.

with live.lease() as snapshot: ...     # stays open for the whole block
live.swap(new)                         # returns at once; the old one closes with its last lease

What was superseded may be kept for a while, for those who go on with an answer that they began
(`keep_s`, `keep`): `lease(wanted)` finds it. Closing can take its time, since it unmaps files:
`close_in` names a pool for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("hivlp.index")


class Closable(Protocol):
    """What is swapped: a snapshot alone, or a unit of models, searcher and snapshot."""

    def close(self) -> None:
        """Let go of memory and files."""


T = TypeVar("T", bound=Closable)


class NotKept(LookupError):
    """Neither the live value nor one that is kept is what was wanted."""


class _Generation(Generic[T]):
    """One value, the leases on it, and until when it is kept; `retired`: nobody gets it any more.

    The cell itself holds a live or kept generation without a lease.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.leases = 0
        self.retired = False
        self.until_s = 0.0


class LiveSnapshot(Generic[T]):
    """Holds the value that is live. Safe to use from several threads at once."""

    def __init__(
        self,
        value: T,
        *,
        keep_s: float = 0.0,
        keep: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `keep` superseded values stay, each for `keep_s` seconds."""
        self._lock = threading.Lock()
        self._now = _Generation(value)
        self._kept: list[_Generation[T]] = []
        self._keep_s, self._keep = keep_s, keep
        self._clock = clock
        self._pool: Executor | None = None

    def close_in(self, pool: Executor) -> None:
        """Close what is superseded in this pool from now on; here, once the pool is shut down."""
        self._pool = pool

    @contextlib.contextmanager
    def lease(self, wanted: Callable[[T], bool] | None = None) -> Iterator[T]:
        """The live value, kept open until the block ends; or the newest one that is `wanted`.

        Raises NotKept where none is, RuntimeError once the cell was closed.
        """
        with self._lock:
            generation = self._find(wanted)
            generation.leases += 1
        try:
            yield generation.value
        finally:
            self._release(generation)

    def swap(self, value: T, keep: Callable[[T], bool] = lambda _: True) -> None:
        """Make `value` live. What was superseded closes with its last lease, or once it was kept
        for long enough; at once where it isn't to `keep`.
        """
        with self._lock:
            old, self._now = self._now, _Generation(value)
            if not old.retired:
                old.until_s = self._clock() + self._keep_s
                self._kept.append(old)
            idle = self._drop(keep)
        self._close_all(idle)

    def expire(self, keep: Callable[[T], bool] = lambda _: True) -> None:
        """Let go of what was kept for long enough, or isn't to `keep`; to be called often."""
        with self._lock:
            idle = self._drop(keep)
        self._close_all(idle)

    def close(self) -> None:
        """Retire everything: each closes when its last lease ends, and no new lease is given."""
        with self._lock:
            idle = self._retire([*self._kept, self._now])
            self._kept = []
        self._close_all(idle)

    def _find(self, wanted: Callable[[T], bool] | None) -> _Generation[T]:
        if self._now.retired:
            raise RuntimeError("nothing is live: it was closed")
        if wanted is None:
            return self._now
        for generation in (self._now, *reversed(self._kept)):
            if wanted(generation.value):
                return generation
        raise NotKept

    def _drop(self, keep: Callable[[T], bool]) -> list[T]:
        """Forget what is kept no longer; returns what nobody has leased. Under the lock."""
        now = self._clock()
        newest = self._kept[-self._keep :] if self._keep else []
        stay = [own for own in newest if own.until_s > now and keep(own.value)]
        gone = [own for own in self._kept if own not in stay]
        self._kept = stay
        return self._retire(gone)

    def _retire(self, generations: list[_Generation[T]]) -> list[T]:
        idle = [own.value for own in generations if not own.retired and own.leases == 0]
        for own in generations:
            own.retired = True
        return idle

    def _release(self, generation: _Generation[T]) -> None:
        with self._lock:
            generation.leases -= 1
            close = generation.retired and generation.leases == 0
        if close:
            self._close_all([generation.value])

    def _close_all(self, values: list[T]) -> None:
        for value in values:
            if self._pool is not None:
                with contextlib.suppress(RuntimeError):  # it was shut down
                    self._pool.submit(_close_and_say, value)
                    continue
            value.close()


def _close_and_say(value: Closable) -> None:
    try:
        value.close()
    except Exception:
        log.exception("a superseded version could not be closed")

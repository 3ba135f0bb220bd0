"""A breaker: what keeps failing isn't asked any more until a trial has succeeded.

Trials are no business of requests: a task of their own makes them, see `hivlp.service.cache.redis`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class Breaker:
    """Opens when `failures` of the last twice as many outcomes are failures, all within `window_s`
    seconds: a rare failure among successes never opens it. Begins open: nothing was tried yet.

    Used from the event loop alone. `on_open` is told the last failure, `on_close` that it is over.
    """

    def __init__(
        self,
        *,
        failures: int,
        window_s: float,
        on_open: Callable[[str], None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = failures
        self._window_s = window_s
        self._on_open = on_open
        self._on_close = on_close
        self._clock = clock
        # When each of the last outcomes failed, None for a success.
        self._last: deque[float | None] = deque(maxlen=2 * failures)
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether nothing is to be asked now."""
        return self._opened.is_set()

    def succeeded(self) -> None:
        """Something that was asked was answered."""
        self._last.append(None)

    def failed(self, reason: str) -> None:
        """Something that was asked wasn't answered, or not in time."""
        if self.is_open:  # asked before it opened
            return
        now_s = self._clock()
        self._last.append(now_s)
        recent = [one for one in self._last if one is not None and one > now_s - self._window_s]
        if len(recent) >= self._failures:
            self._opened.set()
            self._on_open(reason)

    def close(self) -> None:
        """A trial succeeded: ask again."""
        self._last.clear()
        self._opened.clear()
        self._on_close()

    async def wait_open(self) -> None:
        """Wait until it is open."""
        await self._opened.wait()

"""Work in the time that requests leave: checks of answers that were given already.

One thing at a time, in a thread that gives way to all others. Work calls `breathe` every few
milliseconds, which lets requests go first: while there are some, the work rests for nine times as
long as it worked; while there are as many as cores, it doesn't work at all, and is given up in the
end, so that nothing is held for long. What it may cost in all is a share of one core, however large
the index: work that took long is followed by a pause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hivlp.models.errors import HivlpError
from hivlp.service.priority import behind

T = TypeVar("T")
LOOK_S = 0.002
"""How often is looked whether there are requests."""
REST = 9.0
"""While there are requests, a rest is so many times as long as the work before it."""


class NoTime(HivlpError):
    """Requests needed the cores for so long that the work was given up; or the service ends."""


class Spare:
    """A thread for what may wait."""

    def __init__(
        self,
        in_flight: Callable[[], int],
        *,
        cores: int,
        core_share: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_flight = in_flight
        self._cores = cores
        self._core_share = core_share
        self._patience_s = patience_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, "hivlp-spare", behind)
        self._closing = threading.Event()
        self._turn = asyncio.Lock()
        self._free_s = 0.0
        self._waited_s = 0.0
        self._began_s = 0.0

    @property
    def free(self) -> bool:
        """Whether anything more may be begun: nothing runs, and the share isn't used up."""
        return not self._turn.locked() and self._clock() >= self._free_s

    def breathe(self) -> None:
        """Let requests go first. Called by the work, in its thread. Raises NoTime."""
        paused_s = self._clock()
        rest_s = REST * (paused_s - self._began_s)
        while not self._closing.is_set():
            now_s = self._clock()
            requests = self._in_flight()
            if not requests or (requests < self._cores and now_s - paused_s >= rest_s):
                break
            if self._waited_s + now_s - paused_s >= self._patience_s:
                raise NoTime("requests needed the cores")
            self._closing.wait(LOOK_S)
        if self._closing.is_set():
            raise NoTime("the service ends")
        self._began_s = self._clock()
        self._waited_s += self._began_s - paused_s

    async def run(self, work: Callable[[], T], spent: Callable[[float], None]) -> T:
        """What `work` returns, done in the thread once it is free. Raises NoTime, and its errors.

        `spent` is told the seconds of a core that it took. The pause that has to follow begins
        then; whoever looks at `free` before a next one keeps it.
        """
        async with self._turn:
            used_s = 0.0

            def timed() -> T:
                nonlocal used_s
                began_s = time.thread_time()
                self._waited_s, self._began_s = 0.0, self._clock()
                try:
                    self.breathe()
                    return work()
                finally:
                    used_s = time.thread_time() - began_s

            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, timed)
            finally:
                spent(used_s)
                self._free_s = self._clock() + used_s / self._core_share

    def close(self) -> None:
        """End what runs, at its next breath, and the thread. Blocking."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

"""Flights: one computation that everybody shares who asks the same meanwhile.

A flight goes on as long as somebody waits for it. When the last one leaves before a worker has
begun, the work is dropped and counted; once begun it is finished, and cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hivlp.service.failures import begun_by
from hivlp.service.logs import REQUEST_ID

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Landed:
    """What came of a flight; `kept`: it was in the cache; `cut`: by the deadline."""

    answer: Answer
    kept: bool = False
    cut: bool = False


class Flight:
    """One computation under way, and how many wait for it. Lives on one event loop.

    `due_s` is when it will be over at the latest (`time.perf_counter`; None: who knows).
    """

    def __init__(self, due_s: float | None = None) -> None:
        self.due_s = due_s
        self.waiting = 0
        self.drop: Callable[[], bool] | None = None
        """Takes the work back if no worker has begun it; set once it is queued."""
        self._task: asyncio.Task[Landed] | None = None
        self._request_id = REQUEST_ID.get()  # of whoever begins it
        self._over: Callable[[], None] = lambda: None

    def begin(self, work: Coroutine[Any, Any, Landed], over: Callable[[], None]) -> None:
        """Take off; `over` is called when nobody may join any more, once or twice."""
        self._over = over
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._landed)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits any more."""
        return self.waiting == 0

    async def wait(self) -> Landed:
        """What comes of it. Whoever waits last and leaves takes what hasn't begun along."""
        assert self._task is not None, "a flight is waited for once it has begun"
        self.waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self.waiting -= 1
            if self.abandoned and not self._task.done() and self.drop is not None and self.drop():
                self.close()

    def close(self) -> None:
        """Let nobody join any more."""
        self._over()

    def _landed(self, done: asyncio.Task[Landed]) -> None:
        self.close()
        if not done.cancelled():
            error = done.exception()  # seen, even when everyone who waited has left
            if error is not None:
                begun_by(error, self._request_id)

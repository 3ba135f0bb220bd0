"""Tasks that must run as long as the app does: one that ends is begun again, and watched.

One that keeps failing is given up, and named in `dead`: the app isn't ready then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("hivlp.service")
ATTEMPTS = 5
"""So often a task that failed is begun again, unless it ran for `FINE_S` seconds meanwhile."""
PAUSE_S = 1.0
FINE_S = 300.0

Run = Callable[[], Awaitable[None]]


class Supervisor:
    """Begins tasks on the running event loop, and ends them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dead: set[str] = set()
        self._stopping = False

    @property
    def dead(self) -> list[str]:
        """What was given up, by name."""
        return sorted(self._dead)

    def start(self, name: str, run: Run) -> None:
        """Run this for ever, unless all are to end. `run` is called anew each time it has ended."""
        if self._stopping:
            return
        task = asyncio.get_running_loop().create_task(self._again_and_again(name, run), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    async def stop(self) -> None:
        """Cancel every task, and wait until it has ended."""
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _again_and_again(self, name: str, run: Run) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while failures <= ATTEMPTS:
            began = loop.time()
            try:
                await run()
                log.error("%s ended, which it never should", name)
            except Exception:
                log.exception("%s failed", name)
            failures = 1 if loop.time() - began > FINE_S else failures + 1
            await asyncio.sleep(PAUSE_S * failures)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen
        if not self._stopping:
            self._dead.add(name)
            log.critical("%s is given up: restart the service", name)

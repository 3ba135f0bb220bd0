"""Items put and deleted over HTTP: checked, encoded and published together, a few times a second.

    request ─► queue ─► a thread of the index: encode ─► publish a version ─► serve it ─► answer

An answer is given when the change is on the disk and can be found. Everything that waits goes into
the next version, several changes of one id too: nothing waits for longer than the publication
under way and its own take, or than `changes.wait_s` where another process changes the index.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from hivlp.index.build.upserts import Draft
from hivlp.index.snapshot.changes import Delete
from hivlp.service.errors import NotWritable, Overloaded
from hivlp.service.metrics import Metrics
from hivlp.service.priority import behind
from hivlp.service.publishing import STOPPING, Changed, Publisher, Waiting
from hivlp.service.serving import Catalogue, Source
from hivlp.service.settings import Settings
from hivlp.service.swap import Swapper

MOST_AT_ONCE = 256


class ItemWriter:
    """Publishes the changes of one index. Lives on one event loop, with one thread."""

    def __init__(
        self,
        name: str,
        catalogue: Catalogue,
        source: Source,
        swapper: Swapper,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._stopping = threading.Event()
        self._publisher = Publisher(name, catalogue, source, swapper, settings, self._stopping)
        self._settings = settings
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, f"hivlp-change-{name}", behind)
        self._queue: deque[Waiting] = deque()
        self._wake = asyncio.Event()

    async def change(self, change: Draft | Delete) -> Changed:
        """Publish one change. Raises InputError, NoSuchItem, Overloaded, NotWritable."""
        if self._stopping.is_set():
            raise NotWritable(STOPPING)
        if len(self._queue) >= self._settings.limits.max_changes:
            raise Overloaded(f"{self._settings.limits.max_changes} changes wait to be published")
        waiting = Waiting(change, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._wake.set()
        return await waiting.done

    async def run(self) -> None:
        """Publish what waits, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
            began = loop.time()
            await self._publish(self._together())
            await asyncio.sleep(self._settings.changes.publish_s - (loop.time() - began))

    def stop(self) -> None:
        """Take no more changes, refuse those that wait, and let what is under way come to an end.

        The thread stops waiting for others; what it publishes it finishes.
        """
        self._stopping.set()
        while self._queue:
            self._settle(self._queue.popleft(), NotWritable(STOPPING))

    async def close(self) -> None:
        """End the thread, once it has finished."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    def _together(self) -> list[Waiting]:
        """What waits, in order, but for those who have left."""
        batch: list[Waiting] = []
        while len(batch) < MOST_AT_ONCE and self._queue:
            waiting = self._queue.popleft()
            if not waiting.done.done():
                batch.append(waiting)
        return batch

    async def _publish(self, batch: list[Waiting]) -> None:
        if not batch:
            return
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._thread, self._publisher.publish, batch
            )
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # what is being published is finished all the same
                raise
        finally:
            for waiting in batch:
                self._settle(waiting, NotWritable("nothing was published"))

    def _settle(self, waiting: Waiting, otherwise: NotWritable) -> None:
        if waiting.done.done():  # whoever asked has left
            return
        if isinstance(waiting.outcome, Changed):
            kind = "delete" if isinstance(waiting.change, Delete) else "upsert"
            self._metrics.changes.labels(kind).inc()
            waiting.done.set_result(waiting.outcome)
        else:
            waiting.done.set_exception(waiting.outcome or otherwise)

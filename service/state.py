"""Everything one running app holds: threads, cache, metrics, and what was loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from fastapi import Request

from hivlp.service.admission import Admission
from hivlp.service.cache.memory import MemoryCache
from hivlp.service.errors import NotReady
from hivlp.service.metrics import Metrics
from hivlp.service.pictures import Pictures
from hivlp.service.pipeline import Pipeline, Workers
from hivlp.service.scrubbing import Scrubbing
from hivlp.service.serving import Catalogue
from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")

LoadCatalogue = Callable[[Settings], Catalogue]
PICTURE_THREADS = 2
LAG_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Threads:
    """`searches` runs whole requests, `ahead` encoders' next stages, `reading` items' pictures."""

    searches: ThreadPoolExecutor
    ahead: ThreadPoolExecutor
    reading: ThreadPoolExecutor


class ServingState:
    """Made by `create_app`, started and stopped by its lifespan."""

    def __init__(self, settings: Settings, load: LoadCatalogue) -> None:
        self.settings = settings
        self.started_s = time.monotonic()
        self.metrics = Metrics()
        in_flight = self.metrics.in_flight
        capacity = settings.workers + settings.limits.max_queue
        self.admission = Admission(capacity, in_flight.set)
        self.picture_admission = Admission(capacity)
        self.cache = MemoryCache(settings.cache.max_bytes, settings.cache.ttl_s)
        self.pictures = Pictures(settings.limits.max_pixels)
        self.scrubbing = Scrubbing(settings.scrub_mib_per_s, self.metrics)
        self.failure: BaseException | None = None
        self._load = load
        self._catalogue: Catalogue | None = None
        self._pipeline: Pipeline | None = None
        self._threads: Threads | None = None

    @property
    def catalogue(self) -> Catalogue:
        """What is served. Raises NotReady until it is."""
        if self._catalogue is None:
            raise self._not_ready()
        return self._catalogue

    @property
    def pipeline(self) -> Pipeline:
        """What answers searches. Raises NotReady until everything is loaded."""
        if self._pipeline is None:
            raise self._not_ready()
        return self._pipeline

    @property
    def status(self) -> str:
        """Loading, ready or failed."""
        if self.failure is not None:
            return "failed"
        return "ready" if self._pipeline is not None else "loading"

    @property
    def threads(self) -> Threads:
        """The pools, from start to stop."""
        assert self._threads is not None, "the app was not started"
        return self._threads

    def start_threads(self) -> None:
        """Begin; called on the event loop that will serve."""
        workers = self.settings.workers
        self._threads = Threads(
            searches=ThreadPoolExecutor(workers, "hivlp-search"),
            ahead=ThreadPoolExecutor(workers, "hivlp-ahead"),
            reading=ThreadPoolExecutor(PICTURE_THREADS, "hivlp-picture"),
        )

    async def load(self) -> None:
        """Load and warm in a thread; ready afterwards. What goes wrong is kept in `failure`."""
        threads = self.threads
        loop = asyncio.get_running_loop()
        try:
            catalogue = await loop.run_in_executor(threads.searches, self._load, self.settings)
        except Exception as error:
            log.error("loading failed: %s", error)
            self.failure = error
            raise
        workers = Workers(threads.searches, threads.ahead, self.settings.workers)
        self._pipeline = Pipeline(
            catalogue=catalogue,
            workers=workers,
            admission=self.admission,
            cache=self.cache,
            metrics=self.metrics,
            limits=self.settings.limits,
        )
        self._catalogue = catalogue
        self._show(catalogue)
        self.scrubbing.start(catalogue)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, for ever."""
        while True:
            due_s = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due_s))

    async def stop_threads(self) -> None:
        """Wait for what runs, then end the threads and close the indexes."""
        for pool in (self.threads.searches, self.threads.ahead, self.threads.reading):
            await asyncio.to_thread(pool.shutdown, wait=True)
        await asyncio.to_thread(self.scrubbing.close)
        for index in self._catalogue.indexes.values() if self._catalogue else ():
            index.live.close()

    def _show(self, catalogue: Catalogue) -> None:
        for name in catalogue.indexes:
            with catalogue.lease(name) as searcher:
                info = searcher.info
            created = datetime.fromisoformat(info.created_at)
            self.metrics.show_snapshot(
                index=name,
                version=info.version,
                model=info.model,
                items=info.items,
                created_s=created.timestamp(),
            )

    def _not_ready(self) -> NotReady:
        return NotReady("loading failed; the log says why") if self.failure else NotReady()


def state_of(request: Request) -> ServingState:
    """The state of the app that a request came to."""
    state = request.app.state.hivlp
    assert isinstance(state, ServingState)
    return state

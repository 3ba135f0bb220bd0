"""Everything one running app holds: threads, cache, metrics, and what was loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from fastapi import Request

from hivlp.index.pictures import MAX_PICTURE_BYTES
from hivlp.service.admission import Admission, Room
from hivlp.service.cache.tiers import make_tiers
from hivlp.service.changes import ItemWriter
from hivlp.service.cores import Cores, OwnCores
from hivlp.service.errors import NotReady, NotWritable, ReadOnly
from hivlp.service.fetching import Fetcher
from hivlp.service.jobs.builds import Builds
from hivlp.service.keys import Keyring
from hivlp.service.metrics import Metrics
from hivlp.service.newcomers import Newcomers
from hivlp.service.pictures import Pictures
from hivlp.service.pipeline import Pipeline, Workers
from hivlp.service.priority import behind
from hivlp.service.queries import image_limits
from hivlp.service.recall import RecallWatch
from hivlp.service.regressions import Regressions
from hivlp.service.request_log import Ended, RequestLog
from hivlp.service.scrubbing import Scrubbing
from hivlp.service.serving import Catalogue, Live, Source
from hivlp.service.settings import Settings
from hivlp.service.shadow import ShadowWatch
from hivlp.service.spare import Spare
from hivlp.service.staging import Stager
from hivlp.service.swap import Swapper
from hivlp.service.tasks import Supervisor
from hivlp.service.tracing import open_tracing
from hivlp.service.watch_metrics import RecallMetrics, ShadowMetrics

log = logging.getLogger("hivlp.service")

LoadCatalogue = Callable[[Settings], Catalogue]
PICTURE_THREADS = 2
LAG_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Threads:
    """`ahead` runs encoders' next stages, `reading` items' pictures.

    `loading` opens other versions, `closing` closes those that nobody has leased any more. Each
    index whose items may be changed has one more, in its `ItemWriter`.
    """

    ahead: ThreadPoolExecutor
    reading: ThreadPoolExecutor
    loading: ThreadPoolExecutor
    closing: ThreadPoolExecutor


class ServingState:
    """Made by `create_app`, started and stopped by its lifespan."""

    def __init__(self, settings: Settings, load: LoadCatalogue, cores: Cores | None = None) -> None:
        self.settings = settings
        self._cores = cores or OwnCores(settings.shared_cores)
        self.started_s = time.monotonic()
        self.keys = Keyring.of(settings.keys)
        self.metrics = Metrics()
        in_flight = self.metrics.in_flight
        capacity = settings.workers + settings.limits.max_queue
        self.admission = Admission(
            capacity, in_flight.set, max_wait_s=settings.limits.max_wait_ms / 1e3
        )
        self.picture_admission = Admission(capacity)
        self.change_admission = Admission(settings.limits.max_changes)
        bodies = "bytes of bodies are here or on their way"
        self.body_room = Room(settings.limits.max_held_bytes, bodies)
        items = "bytes of items are on their way or wait"
        self.change_room = Room(settings.limits.max_change_bytes, items)
        self.fetcher = Fetcher(settings.fetch, settings.limits.max_image_bytes)
        self.cache = make_tiers(settings.cache, self.metrics)
        self.builds = Builds(settings, self.metrics.registry)
        self.pictures = Pictures(image_limits(settings.limits, MAX_PICTURE_BYTES))
        self.scrubbing = Scrubbing(settings.scrub_mib_per_s / settings.processes, self.metrics)
        self.request_log = RequestLog(settings.log)
        self.tracing = open_tracing(settings.trace)
        self.spare = Spare(
            lambda: self.admission.in_flight,
            cores=settings.workers,
            core_share=settings.spare.core_share / settings.processes,
            patience_s=settings.spare.patience_s,
        )
        recall_metrics = RecallMetrics(self.metrics.registry)
        self.recall = RecallWatch(settings.recall, self.spare, settings.limits, recall_metrics)
        self.shadow = ShadowWatch(settings, self.spare, ShadowMetrics(self.metrics.registry))
        self.failure: BaseException | None = None
        self.draining = False  # told to stop: what comes is still answered, and readiness is red
        self._load = load
        self._catalogue: Catalogue | None = None
        self._pipeline: Pipeline | None = None
        self._threads: Threads | None = None
        self._stager: Stager | None = None
        self._newcomers: Newcomers | None = None
        self._writers: dict[str, ItemWriter] = {}
        self._tasks = Supervisor()

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
        """Loading, ready, draining or failed."""
        if self.failure is not None or self.dead:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self._pipeline is not None else "loading"

    @property
    def dead(self) -> list[str]:
        """Tasks that were given up; only another start of the process brings them back."""
        return self._tasks.dead

    @property
    def threads(self) -> Threads:
        """The pools, from start to stop."""
        assert self._threads is not None, "the app was not started"
        return self._threads

    def start_threads(self) -> None:
        """Begin; called on the event loop that will serve."""
        workers = self.settings.workers
        self._threads = Threads(
            ahead=ThreadPoolExecutor(workers, "hivlp-ahead"),
            reading=ThreadPoolExecutor(PICTURE_THREADS, "hivlp-picture"),
            loading=ThreadPoolExecutor(1, "hivlp-load", behind),
            closing=ThreadPoolExecutor(1, "hivlp-close"),
        )
        for name, run in self.cache.watches().items():
            self._tasks.start(name, run)

    async def load(self) -> None:
        """Load and warm in a thread; ready afterwards. What goes wrong is kept in `failure`."""
        threads = self.threads
        try:
            catalogue = await asyncio.to_thread(self._load, self.settings)
        except Exception as error:
            log.error("loading failed: %s", error)
            self.failure = error
            raise
        self._catalogue = catalogue
        for live in catalogue.indexes.values():
            live.close_in(threads.closing)
        if catalogue.source is not None:
            await self._follow(catalogue, catalogue.source)
        self.scrubbing.start(catalogue)
        for name in catalogue.indexes:
            self.show(name)
        batches = self.settings.batches
        workers = Workers(
            self.settings.workers,
            self.threads.ahead,
            batches.max_size,
            batches.overlap,
            self._cores,
        )
        self._pipeline = Pipeline(
            catalogue=catalogue,
            workers=workers,
            admission=self.admission,
            cache=self.cache,
            metrics=self.metrics,
            limits=self.settings.limits,
        )
        self.admission.expected_wait_s = self._pipeline.expected_wait_s
        if self.recall.on:
            self._tasks.start("checking recall", lambda: self.recall.run(catalogue))
        if self.shadow.on:
            loading = threads.loading
            self._tasks.start("comparing", lambda: self.shadow.run(catalogue, loading))
        for name, run in self.builds.watches().items():
            self._tasks.start(name, run)
        self.metrics.processes.set(1)

    def writer(self, name: str) -> ItemWriter:
        """What changes the items of an index. Raises SnapshotMissing, ReadOnly."""
        self.catalogue.live(name)
        if name not in self._writers:
            raise ReadOnly
        return self._writers[name]

    def stager(self, name: str) -> Stager:
        """What activates versions of an index. Raises SnapshotMissing, NotWritable."""
        self.catalogue.live(name)
        if self._stager is None:
            raise NotWritable("what is served here follows no store")
        return self._stager

    async def admitted(self, name: str) -> Stager:
        """As `stager`, also for an index of the home that isn't served yet.

        Raises SnapshotMissing, InputError, ServiceError.
        """
        if self._newcomers is not None:
            await asyncio.to_thread(self._newcomers.admit, name)
            assert self._stager is not None
            return self._stager
        return self.stager(name)

    async def _follow(self, catalogue: Catalogue, source: Source) -> None:
        """Begin to watch for other versions, and to take changes of items.

        What moved or came while everything was loaded is served first: from `join` on nothing moves
        without this process.
        """
        changes = self.settings.changes
        swapper = Swapper(catalogue, source, self.metrics, self._swapped, changes.poll_s)
        self.scrubbing.on_corrupt = swapper.fall_back
        loading, loop = self.threads.loading, asyncio.get_running_loop()
        self._stager = stager = Stager(catalogue, source, swapper, self.settings, self.metrics)
        await asyncio.to_thread(stager.join)
        take_in = partial(self._take_in, swapper=swapper, loop=loop)
        for name, live in catalogue.indexes.items():
            take_in(name, live)
            await loop.run_in_executor(loading, swapper.follow, name)
        newcomers = Newcomers(catalogue, source, swapper, stager, self.settings, take_in)
        await newcomers.look(loading)
        self._newcomers = newcomers
        self._tasks.start("looking for new indexes", lambda: newcomers.run(loading))
        if self.recall.on and self.settings.activation.recall_checks:
            own = Regressions(
                stager, self.recall, catalogue, source, self.settings.activation, self.metrics
            )
            self._tasks.start("looking after activations", own.run)
        self._tasks.start("flipping to staged versions", stager.flip)
        self._tasks.start("staging versions", lambda: stager.stage(loading))
        self._tasks.start("watching for other versions", lambda: swapper.watch(loading))
        self._tasks.start("letting go of superseded versions", swapper.expire)

    def _take_in(
        self, name: str, live: Live, *, swapper: Swapper, loop: asyncio.AbstractEventLoop
    ) -> None:
        """What belongs to an index that is served; in any thread, before it is."""
        catalogue = self.catalogue
        assert catalogue.source is not None, "what follows no store has no more indexes"
        live.close_in(self.threads.closing)
        self.scrubbing.begin(name, catalogue.store)
        if self.settings.writable:
            writer = ItemWriter(
                name, catalogue, catalogue.source, swapper, self.settings, self.metrics
            )
            self._writers[name] = writer
            label = f"publishing items of index {name}"
            loop.call_soon_threadsafe(self._tasks.start, label, writer.run)

    def stop_changes(self) -> None:
        """Refuse changes of items, and make no version ready any more: the service is to end."""
        for writer in list(self._writers.values()):
            writer.stop()
        if self._stager is not None:
            self._stager.stop()

    def _swapped(self, name: str) -> None:
        """Another version is served: in a thread."""
        self.show(name)
        with self.catalogue.lease(name) as served:
            self.scrubbing.watch(name, served.searcher.info.version)

    def ended(self, request: Ended) -> dict[str, str] | None:
        """Trace and log a request that was answered; its exemplar's labels, if it has a line."""
        traced = {} if self.tracing is None else self.tracing.ended(request)
        if not self.request_log.ended(request, traced):
            return None
        ids = {name: traced[name] for name in ("trace_id",) if name in traced}
        return {"request_id": request.request_id, **ids}

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, for ever."""
        while True:
            due_s = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due_s))

    async def stop_threads(self) -> None:
        """Wait for what runs, then end the threads and close the indexes."""
        self.stop_changes()
        await self._tasks.stop()
        await asyncio.to_thread(self.spare.close)
        for writer in list(self._writers.values()):
            await writer.close()
        own = self.threads
        if self._pipeline is not None:
            await self._pipeline.stop()
        for pool in (own.loading, own.ahead, own.reading):
            await asyncio.to_thread(pool.shutdown, wait=True)
        await asyncio.to_thread(self.shadow.close)
        if self._stager is not None:
            await asyncio.to_thread(self._stager.leave)
        await self.cache.close()
        await self.fetcher.close()
        await asyncio.to_thread(self.scrubbing.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        for live in self._catalogue.indexes.values() if self._catalogue else ():
            live.close()
        await asyncio.to_thread(own.closing.shutdown, wait=True)

    def show(self, name: str) -> None:
        """Tell the metrics which version of an index is served."""
        with self.catalogue.lease(name) as served:
            info, snapshot, built = served.searcher.info, served.snapshot, served.built
        changes = None if snapshot is None else snapshot.manifest.changes
        self.metrics.show_snapshot(
            index=name,
            version=built,
            model=info.model,
            items=info.items,
            created_s=datetime.fromisoformat(info.created_at).timestamp(),
            changes=0 if changes is None else sum(s.upserts + s.deletes for s in changes.pending),
        )

    def _not_ready(self) -> NotReady:
        return NotReady("loading failed; the log says why") if self.failure else NotReady()


def state_of(request: Request) -> ServingState:
    """The state of the app that a request came to."""
    state = request.app.state.hivlp
    assert isinstance(state, ServingState)
    return state

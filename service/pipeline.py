"""One search: admission, cache, single flight, then one hop to a worker thread that does it all.

    request ─► permit ─► flight ─► cache ─► worker: open the query ─► plan ─► levels ─► items

Which way a worker goes depends on what else there is to do. While requests in flight are fewer than
cores it overlaps encoding with searching; what has queued meanwhile is encoded as one batch and
searched after (`together.py`). Overlap is a latency tool and costs throughput under load.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from hivlp.index.searcher import Searcher
from hivlp.models.errors import DeadlinePassed
from hivlp.models.levels import EarlyOutput
from hivlp.service.admission import Admission
from hivlp.service.batcher import Deliver, Job, MicroBatcher
from hivlp.service.cache.keys import answer_key
from hivlp.service.cache.memory import TIER
from hivlp.service.cache.tiers import Tiers
from hivlp.service.cores import Cores
from hivlp.service.flights import Answer, Flight, Landed
from hivlp.service.metrics import Metrics
from hivlp.service.overlap import TOO_LATE
from hivlp.service.queries import Query, Setting
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import Catalogue, QueryModel
from hivlp.service.settings import Limits
from hivlp.service.timeline import Timeline
from hivlp.service.together import Asked, find_together
from hivlp.service.work import find

# Of the request models: what the query itself holds, and so its content hash covers.
OWN_FIELDS = frozenset({"query", "id", "vector"})
# What says nothing about a whole answer: one that isn't whole is never cached.
UNKEYED = frozenset({"index", "snapshot", "deadline_ms", *OWN_FIELDS})
HUNG_S = 60.0
"""A search that takes or waits for so long, and twice as long as re-ranking may, is stuck."""
LONG_PAGE = 200
"""Hits that a search may look at, k and offset, to be run with others."""
HASHED_AT_ONCE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Workers:
    """How many threads run whole requests, and those of the encoder's next stages meanwhile.

    At most `max_batch` searches are run by one of them at a time; `overlap` False: none encodes and
    searches at once. `cores`: those they share with other processes (None: with none).
    """

    count: int
    ahead: Executor
    max_batch: int = 8
    overlap: bool = True
    cores: Cores | None = None


class Pipeline:
    """Answers searches. Lives on one event loop."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        workers: Workers,
        admission: Admission,
        cache: Tiers,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._catalogue = catalogue
        self._workers = workers
        self._admission = admission
        self._cache = cache
        self._metrics = metrics
        self._limits = limits
        self._flights: dict[tuple[str, float | None], Flight] = {}
        self._batcher = MicroBatcher(
            workers=workers.count,
            max_batch=workers.max_batch,
            together=self._together,
            on_queue=metrics.queue_size.set,
            on_death=metrics.searching.worker_deaths.inc,
            hung_s=max(HUNG_S, 2 * limits.max_rerank_ms / 1e3),
            cores=workers.cores,
        )

    def sick(self) -> str | None:
        """What is wrong with the worker threads, in words; None where nothing is."""
        return self._batcher.sick()

    def expected_wait_s(self) -> float:
        """How long a search that came now would wait for a worker."""
        return self._batcher.expected_wait_s()

    async def stop(self) -> None:
        """Finish what was accepted, then end the worker threads."""
        await self._batcher.stop()

    async def search(self, query: Query, options: SearchOptions, timeline: Timeline) -> Answer:
        """The body of an answer, without its request id. The caller holds a permit.

        Cancelled, it drops what no worker has begun, unless others wait for the same. Raises
        DeadlinePassed where not even the first level was searched in time.
        """
        due_s = None
        if options.deadline_ms is not None:
            due_s = timeline.origin + options.deadline_ms / 1e3
        content = await _content_hash(query)
        joined, landed = await self._ride(query, content, options, timeline, due_s)
        if joined and (landed is None or landed.cut) and _has_time(due_s):
            # Who began it was in a greater hurry: what is left of the own time may find more.
            try:
                joined, landed = await self._ride(query, content, options, timeline, due_s)
            except DeadlinePassed:
                if landed is None:
                    raise
        if landed is None:
            raise DeadlinePassed(TOO_LATE)
        if joined or landed.kept:
            return _repeated(landed.answer, timeline)
        took_ms, stages = timeline.elapsed_ms(), timeline.as_stages()
        return {**landed.answer, "took_ms": took_ms, "cached": False, "stages": stages}

    async def _ride(
        self,
        query: Query,
        content: bytes,
        options: SearchOptions,
        timeline: Timeline,
        due_s: float | None,
    ) -> tuple[bool, Landed | None]:
        """Whether somebody else's flight was joined, and what came of it (None: not in time)."""
        flight, joined = self._board(query, content, options, timeline, due_s)
        try:
            return joined, await flight.wait()
        except DeadlinePassed:
            if joined:
                return joined, None
            raise

    async def embed(
        self, query: Query, index: str, timeline: Timeline
    ) -> tuple[list[EarlyOutput], bool, QueryModel]:
        """Every early output of a query, whether it was cut short, and the model that made it."""
        with self._catalogue.lease(index) as served:
            model = served.model
            setting = Setting(served.searcher, model, "image", self._limits, timeline)

            queued_s = time.perf_counter()

            def work(_: bool) -> tuple[list[EarlyOutput], bool]:
                timeline.add("queue", queued_s, time.perf_counter())
                opened = query.open(setting)
                return list(opened.outputs), opened.truncated

            job = self._batcher.submit(work)
            try:
                outputs, truncated = await job.future
            except asyncio.CancelledError:
                self._drop(job)
                raise
            finally:
                self._metrics.observe_spans(timeline.spans)
        return outputs, truncated, model

    def _board(
        self,
        query: Query,
        content: bytes,
        options: SearchOptions,
        timeline: Timeline,
        due_s: float | None,
    ) -> tuple[Flight, bool]:
        """The flight of a search, and whether it was under way already.

        None is joined that may be over later than one's own time is up.
        """
        with ExitStack() as held:
            served = held.enter_context(self._catalogue.lease(options.index, options.snapshot))
            key = _key(query, content, options, served.searcher, served.model)
            place = (key, options.deadline_ms)
            flight = self._flights.get(place)
            if flight is not None and (due_s is None or (flight.due_s or 0.0) <= due_s):
                self._metrics.cache_requests.labels(TIER, "shared").inc()
                return flight, True
            setting = Setting(
                served.searcher,
                served.model,
                options.modality,
                self._limits,
                timeline,
                served.pictures,
                due_s,
            )
            flight = self._flights[place] = Flight(due_s)
            # The flight owns the lease from here on: it may outlive the request that began it.
            work = self._fly(flight, key, Asked(query, options, setting), held.pop_all())
            flight.begin(work, partial(self._over, place, flight))
        return flight, False

    async def _fly(self, flight: Flight, key: str, asked: Asked, lease: ExitStack) -> Landed:
        timeline = asked.setting.timeline
        with lease:
            kept = await self._cache.get(key, timeline)
            if kept is not None:
                self._metrics.observe_spans(timeline.spans)
                return Landed(orjson.loads(kept), kept=True)
            if flight.abandoned:
                flight.close()
                self._metrics.searching.cancelled.inc()
                raise asyncio.CancelledError
            answer = await self._computed(flight, asked)
        if not (answer["degraded"] or answer["partial"]):
            await self._cache.set(key, orjson.dumps(answer, default=str))
        return Landed(answer, cut="deadline" in timeline.degraded)

    async def _computed(self, flight: Flight, asked: Asked) -> Answer:
        timeline = asked.setting.timeline
        job = self._submit(asked)
        flight.drop = partial(self._drop, job)
        try:
            answer = await job.future
        finally:
            if not timeline.has("queue"):  # its time was up, or its client left
                timeline.add("queue", job.submitted_s, time.perf_counter())
            self._metrics.observe_spans(timeline.spans)
            del job  # an error holds this frame, and the job the error
            flight.drop = None
        self._metrics.exit_level.labels(str(answer["exit_level"])).inc()
        self._metrics.searching.plans.labels(asked.options.plan, answer["plan"]).inc()
        for reason in timeline.degraded:
            self._metrics.degraded.labels(reason).inc()
        return answer

    def _submit(self, asked: Asked) -> Job[Answer]:
        query, options, setting = asked.query, asked.options, asked.setting
        queued_s = time.perf_counter()

        def alone(spare: bool) -> Answer:
            setting.timeline.add("queue", queued_s, time.perf_counter())
            # With a deadline the encoder never runs in this thread, which must answer in time.
            apart = setting.due_s is not None or (spare and self._workers.overlap)
            ahead = self._workers.ahead if query.encodes and apart else None
            if query.encodes:
                self._metrics.searching.batch_size.observe(1)
            return find(query, options, setting, ahead, busy=not spare)

        return self._batcher.submit(alone, group=_group(asked), payload=asked, due_s=setting.due_s)

    def _together(self, jobs: Sequence[Job[Any]], deliver: Deliver) -> None:
        """In a worker thread: encode several searches as one batch."""
        asked = [job.payload for job in jobs]
        queued_s = [job.submitted_s for job in jobs]

        def tell(place: int, outcome: Any) -> None:
            deliver(jobs[place], outcome)

        for encoded in find_together(asked, queued_s, tell):
            self._metrics.searching.batch_size.observe(encoded)

    def _drop(self, job: Job[Any]) -> bool:
        dropped = self._batcher.drop(job)
        if dropped:
            self._metrics.searching.cancelled.inc()
        return dropped

    def _over(self, place: tuple[str, float | None], flight: Flight) -> None:
        if self._flights.get(place) is flight:
            del self._flights[place]


def _group(asked: Asked) -> object | None:
    """What may be encoded together: searches of one version by one tower.

    What takes long is alone, so that nobody stands behind it, and what has a deadline, so that it
    stands behind nobody.
    """
    options, setting = asked.options, asked.setting
    if not asked.query.encodes or setting.due_s is not None:
        return None
    long = options.rerank or options.explain or options.plan == "exact" or options.cascade
    if long or options.k + options.offset > LONG_PAGE:
        return None
    return (id(setting.searcher), id(setting.model), asked.query.kind)


async def _content_hash(query: Query) -> bytes:
    """What the cache knows a query by; of something large, not computed on the event loop."""
    content = query.content()
    if len(content) <= HASHED_AT_ONCE_BYTES:
        return content
    return await asyncio.to_thread(lambda: hashlib.sha256(content).digest())


def _has_time(due_s: float | None) -> bool:
    return due_s is None or time.perf_counter() < due_s


def _key(
    query: Query, content: bytes, options: SearchOptions, searcher: Searcher, model: QueryModel
) -> str:
    reranker = model.reranker if options.rerank else None
    return answer_key(
        query_encoder=model.query_encoder,
        index=searcher.info.index,
        version=searcher.info.version,
        kind=query.kind,
        content=content,
        reranker=None if reranker is None else reranker.identity,
        parameters=options.model_dump(exclude=set(UNKEYED)),
    )


def _repeated(answer: Answer, timeline: Timeline) -> Answer:
    """An answer computed for someone else: no stage of it ran now."""
    return {**answer, "took_ms": timeline.elapsed_ms(), "cached": True, "stages": []}

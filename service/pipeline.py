"""One search: admission, cache, single flight, then one hop to a worker thread that does it all.

    request ─► permit ─► flight ─► cache ─► worker: open the query ─► plan ─► levels ─► items

Which way a worker goes depends on what else there is to do. While requests in flight are fewer than
cores it overlaps encoding with searching; what has queued meanwhile is encoded as one batch and
searched after (`together.py`). Overlap is a latency tool and costs throughput under load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import orjson

from hivlp.index.searcher import Searcher
from hivlp.models.errors import DeadlinePassed
from hivlp.models.levels import EarlyOutput
from hivlp.service.admission import Admission
from hivlp.service.batcher import Deliver, Job, MicroBatcher
from hivlp.service.cache.keys import answer_key
from hivlp.service.cache.memory import TIER
from hivlp.service.cache.tiers import Tiers
from hivlp.service.flights import Answer, Flight, Landed
from hivlp.service.metrics import Metrics
from hivlp.service.queries import EncodedQuery, Query, Setting
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


@dataclass(frozen=True, slots=True)
class Workers:
    """How many threads run whole requests, and those of the encoder's next stages meanwhile.

    At most `max_batch` searches are run by one of them at a time; `overlap` False: none encodes and
    searches at once.
    """

    count: int
    ahead: Executor
    max_batch: int = 8
    overlap: bool = True


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
            spare=lambda: admission.in_flight < workers.count,
            on_queue=metrics.queue_size.set,
            on_death=metrics.searching.worker_deaths.inc,
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
        while True:
            flight, joined = self._board(query, options, timeline, due_s)
            try:
                landed = await flight.wait()
            except DeadlinePassed:
                if joined and _has_time(due_s):  # who began it was in a greater hurry
                    continue
                raise
            if joined and landed.answer["degraded"] and _has_time(due_s):
                continue
            break
        if joined or landed.kept:
            return _repeated(landed.answer, timeline)
        took_ms, stages = timeline.elapsed_ms(), timeline.as_stages()
        return {**landed.answer, "took_ms": took_ms, "cached": False, "stages": stages}

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
        return outputs, truncated, model

    def _board(
        self, query: Query, options: SearchOptions, timeline: Timeline, due_s: float | None
    ) -> tuple[Flight, bool]:
        """The flight of a search, and whether it was under way already."""
        with ExitStack() as held:
            served = held.enter_context(self._catalogue.lease(options.index, options.snapshot))
            key = _key(query, options, served.searcher, served.model)
            place = (key, options.deadline_ms)
            if (flight := self._flights.get(place)) is not None:
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
            flight = self._flights[place] = Flight()
            # The flight owns the lease from here on: it may outlive the request that began it.
            work = self._fly(flight, key, query, options, setting, held.pop_all())
            flight.begin(work, partial(self._over, place, flight))
        return flight, False

    async def _fly(
        self,
        flight: Flight,
        key: str,
        query: Query,
        options: SearchOptions,
        setting: Setting,
        lease: ExitStack,
    ) -> Landed:
        with lease:
            kept = await self._cache.get(key, setting.timeline)
            if kept is not None:
                self._metrics.observe_spans(setting.timeline.spans)
                return Landed(orjson.loads(kept), kept=True)
            if flight.abandoned:
                self._metrics.searching.cancelled.inc()
                raise asyncio.CancelledError
            job = self._submit(query, options, setting)
            flight.drop = partial(self._drop, job)
            answer = await job.future
            self._count(answer, options, setting)
        if not (answer["degraded"] or answer["partial"]):
            await self._cache.set(key, orjson.dumps(answer, default=str))
        return Landed(answer, kept=False)

    def _submit(self, query: Query, options: SearchOptions, setting: Setting) -> Job[Answer]:
        queued_s = time.perf_counter()

        def alone(spare: bool) -> Answer:
            setting.timeline.add("queue", queued_s, time.perf_counter())
            # With a deadline the encoder never runs in this thread, which must answer in time.
            overlap = query.encodes and (setting.due_s is not None or spare)
            ahead = self._workers.ahead if overlap and self._workers.overlap else None
            self._metrics.searching.batch_size.observe(1)
            return find(query, options, setting, ahead, busy=not spare)

        group = _group(query, options, setting)
        payload = (query, options, setting)
        return self._batcher.submit(alone, group=group, payload=payload, due_s=setting.due_s)

    def _together(self, jobs: Sequence[Job[Any]], deliver: Deliver) -> None:
        """In a worker thread: encode several searches as one batch."""
        asked = []
        for job in jobs:
            query, options, setting = job.payload
            setting.timeline.add("queue", job.submitted_s, time.perf_counter())
            asked.append(Asked(cast(EncodedQuery, query), options, setting))
        encoded = find_together(asked, lambda place, outcome: deliver(jobs[place], outcome))
        if encoded:
            self._metrics.searching.batch_size.observe(encoded)

    def _count(self, answer: Answer, options: SearchOptions, setting: Setting) -> None:
        self._metrics.observe_spans(setting.timeline.spans)
        self._metrics.exit_level.labels(str(answer["exit_level"])).inc()
        self._metrics.searching.plans.labels(options.plan, answer["plan"]).inc()
        for reason in setting.timeline.degraded:
            self._metrics.degraded.labels(reason).inc()

    def _drop(self, job: Job[Any]) -> bool:
        dropped = self._batcher.drop(job)
        if dropped:
            self._metrics.searching.cancelled.inc()
        return dropped

    def _over(self, place: tuple[str, float | None], flight: Flight) -> None:
        if self._flights.get(place) is flight:
            del self._flights[place]


def _group(query: Query, options: SearchOptions, setting: Setting) -> object | None:
    """What may be encoded together: searches of one version by one tower.

    Re-ranking and exhaustive scans take so long that nobody should stand behind them.
    """
    if not query.encodes or options.rerank or options.plan == "exact":
        return None
    return (id(setting.searcher), id(setting.model), query.kind)


def _has_time(due_s: float | None) -> bool:
    return due_s is None or time.perf_counter() < due_s


def _key(query: Query, options: SearchOptions, searcher: Searcher, model: QueryModel) -> str:
    reranker = model.reranker if options.rerank else None
    return answer_key(
        query_encoder=model.query_encoder,
        index=searcher.info.index,
        version=searcher.info.version,
        kind=query.kind,
        content=query.content(),
        reranker=None if reranker is None else reranker.identity,
        parameters=options.model_dump(exclude=set(UNKEYED)),
    )


def _repeated(answer: Answer, timeline: Timeline) -> Answer:
    """An answer computed for someone else: no stage of it ran now."""
    return {**answer, "took_ms": timeline.elapsed_ms(), "cached": True, "stages": []}

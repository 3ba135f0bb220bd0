"""One search: admission, cache, single flight, then one hop to a worker thread that does it all.

    request ─► permit ─► flight ─► cache ─► worker: open the query ─► plan ─► levels ─► items

A worker encodes and searches by turns, or at once when requests in flight are fewer than cores:
overlap is a latency tool and costs throughput under load. A flight is shared by all who ask the
same meanwhile: it looks in the cache once and computes once. Once begun it is finished and cached
even when the client that began it has left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from hivlp.index.searcher import Searcher
from hivlp.models.levels import EarlyOutput
from hivlp.service.admission import Admission
from hivlp.service.cache.keys import answer_key
from hivlp.service.cache.memory import TIER
from hivlp.service.cache.tiers import Tiers
from hivlp.service.metrics import Metrics
from hivlp.service.queries import Query, Setting
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import Catalogue, QueryModel
from hivlp.service.settings import Limits
from hivlp.service.timeline import Timeline
from hivlp.service.work import find

Answer = dict[str, Any]
T = TypeVar("T")
# Of the request models: what the query itself holds, and so its content hash covers.
OWN_FIELDS = frozenset({"query", "id", "vector"})


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads: `searches` runs whole requests, `ahead` the encoder's next stage meanwhile."""

    searches: Executor
    ahead: Executor
    cores: int


@dataclass(frozen=True, slots=True)
class _Landed:
    """What came of a flight; `kept`: it was in the cache."""

    answer: Answer
    kept: bool


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
        self._flights: dict[str, asyncio.Task[_Landed]] = {}

    async def search(self, query: Query, options: SearchOptions, timeline: Timeline) -> Answer:
        """The body of an answer, without its request id. The caller holds a permit."""
        with ExitStack() as held:
            served = held.enter_context(self._catalogue.lease(options.index, options.snapshot))
            searcher, model = served.searcher, served.model
            key = _key(query, options, searcher, model)
            flight = self._flights.get(key)
            if flight is not None:
                self._metrics.cache_requests.labels(TIER, "shared").inc()
                return _repeated((await asyncio.shield(flight)).answer, timeline)
            limits, pictures = self._limits, served.pictures
            setting = Setting(searcher, model, options.modality, limits, timeline, pictures)
            # The flight owns the lease from here on: it may outlive the request that began it.
            work = self._fly(key, query, options, setting, held.pop_all())
        flight = self._flights[key] = asyncio.create_task(work)
        flight.add_done_callback(lambda done: self._landed(key, done))
        landed = await asyncio.shield(flight)
        if landed.kept:
            return _repeated(landed.answer, timeline)
        stages = timeline.as_stages()
        return {
            **landed.answer,
            "took_ms": timeline.elapsed_ms(),
            "cached": False,
            "stages": stages,
        }

    async def embed(
        self, query: Query, index: str, timeline: Timeline
    ) -> tuple[list[EarlyOutput], bool, QueryModel]:
        """Every early output of a query, whether it was cut short, and the model that made it."""
        with self._catalogue.lease(index) as served:
            model = served.model
            setting = Setting(served.searcher, model, "image", self._limits, timeline)

            def work() -> tuple[list[EarlyOutput], bool]:
                opened = query.open(setting)
                return list(opened.outputs), opened.truncated

            outputs, truncated = await self._in_worker(work, timeline)
        return outputs, truncated, model

    async def _fly(
        self, key: str, query: Query, options: SearchOptions, setting: Setting, lease: ExitStack
    ) -> _Landed:
        with lease:
            kept = await self._cache.get(key, setting.timeline)
            if kept is not None:
                self._metrics.observe_spans(setting.timeline.spans)
                return _Landed(orjson.loads(kept), kept=True)
            answer = await self._compute(query, options, setting)
        if not (answer["degraded"] or answer["partial"]):
            await self._cache.set(key, orjson.dumps(answer, default=str))
        return _Landed(answer, kept=False)

    async def _compute(self, query: Query, options: SearchOptions, setting: Setting) -> Answer:
        overlap = query.encodes and self._admission.in_flight < self._workers.cores
        ahead = self._workers.ahead if overlap else None
        answer = await self._in_worker(
            lambda: find(query, options, setting, ahead), setting.timeline
        )
        self._metrics.observe_spans(setting.timeline.spans)
        self._metrics.exit_level.labels(str(answer["exit_level"])).inc()
        if answer["degraded"]:
            self._metrics.degraded.labels("rerank").inc()
        return answer

    async def _in_worker(self, work: Callable[[], T], timeline: Timeline) -> T:
        queued_s = time.perf_counter()
        waiting = self._metrics.queue_size
        waiting.inc()

        def run() -> T:
            waiting.dec()
            timeline.add("queue", queued_s, time.perf_counter())
            return work()

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers.searches, run)

    def _landed(self, key: str, flight: asyncio.Task[_Landed]) -> None:
        del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # seen, even when everyone who waited has left


def _key(query: Query, options: SearchOptions, searcher: Searcher, model: QueryModel) -> str:
    reranker = model.reranker if options.rerank else None
    return answer_key(
        query_encoder=model.query_encoder,
        index=searcher.info.index,
        version=searcher.info.version,
        kind=query.kind,
        content=query.content(),
        reranker=None if reranker is None else reranker.identity,
        parameters=options.model_dump(exclude={"index", "snapshot", *OWN_FIELDS}),
    )


def _repeated(answer: Answer, timeline: Timeline) -> Answer:
    """An answer computed for someone else: no stage of it ran now."""
    return {**answer, "took_ms": timeline.elapsed_ms(), "cached": True, "stages": []}

"""Shadow mode: a sample of live searches is also answered by another version, and compared.

The other version may be of the same index (published and not active), of another index, or be
queried with another artifact. If it is served here anyway it is used as it is served; else it is
opened beside, once everything is ready. What it answers reaches nobody: it is compared with what
was answered, counted, and where the two differ, logged with the request's id.

Both versions are timed alike, one after the other in the spare thread, in an order drawn by lot:
how long the live one took under load says nothing about the other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hivlp.models.errors import HivlpError
from hivlp.service.beside import Beside
from hivlp.service.loading import Loader
from hivlp.service.logs import with_fields
from hivlp.service.queries import Query, Setting
from hivlp.service.request_log import asked
from hivlp.service.sampling import Left, Sampler, leased
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import Catalogue, ServedVersion, Source
from hivlp.service.settings import Settings
from hivlp.service.spare import Spare
from hivlp.service.timeline import Timeline
from hivlp.service.watch_metrics import ShadowMetrics
from hivlp.service.work import find

log = logging.getLogger("hivlp.shadow")
TOLD_IDS = 5
"""So many ids of each side are logged where two answers differ."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A live search, and what it was answered with."""

    request_id: str
    query: Query
    options: SearchOptions
    version: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """What the other version answered instead, and the seconds that each took."""

    version: str
    ids: tuple[str, ...]
    live_s: float
    shadow_s: float


class ShadowWatch:
    """Compares a sample of the answers of one app. `offer` and `run` belong to its event loop."""

    def __init__(self, settings: Settings, spare: Spare, metrics: ShadowMetrics) -> None:
        self._all = settings
        self._settings = settings.shadow
        self._spare = spare
        self._metrics = metrics
        share = self._settings.share if self._settings.on else 0.0
        self._sampler: Sampler[Sample] = Sampler(
            share, self._settings.max_per_s, spare, metrics.skipped, metrics.used
        )
        own, poll_s = self._settings, settings.changes.poll_s
        self._beside = Beside(own.name, own.version, poll_s, self._show)
        self._served = False
        self._chance = random.Random()

    @property
    def on(self) -> bool:
        """Whether anything is compared."""
        return self._sampler.on

    @property
    def open(self) -> bool:
        """Whether there is something to compare with."""
        return self._served or self._beside.open

    def offer(
        self, query: Query, options: SearchOptions, answer: Mapping[str, Any], request_id: str
    ) -> None:
        """An answer was given; it is compared if the lot falls on it, and there is time."""
        if not self._settings.on or options.index != self._settings.live:
            return
        if not self._sampler.draw():
            return
        reason = self._unfit(answer)
        if reason is not None:
            self._sampler.skip(reason)
            return
        ids = tuple(hit["id"] for hit in answer["hits"])
        sample = Sample(request_id, query, options, str(answer["snapshot"]), ids)
        self._sampler.take(sample)

    async def run(self, catalogue: Catalogue, loading: Executor) -> None:
        """Have the other version open, and compare, for ever."""
        async with asyncio.TaskGroup() as group:
            if self._is_served(catalogue):
                self._served = True
            else:
                source = self._source(catalogue)
                group.create_task(self._beside.follow(source, loading))
            check = partial(self._check, catalogue=catalogue)
            group.create_task(self._sampler.run(check, self._note))

    def close(self) -> None:
        """Close what was opened beside; after the spare thread has ended. Blocking."""
        self._beside.close()

    def _is_served(self, catalogue: Catalogue) -> bool:
        """Whether the version that is to be compared is the active one of an index served here."""
        own = self._settings
        return own.version is None and own.artifact is None and own.name in catalogue.indexes

    def _source(self, catalogue: Catalogue) -> Source:
        """Where the other version comes from, and what it is queried with."""
        if self._settings.artifact is None and catalogue.source is not None:
            return catalogue.source
        return Loader(self._all.model_copy(update={"artifact": self._settings.artifact}))

    def _show(self, shadow: ServedVersion) -> None:
        self._metrics.show(shadow.searcher.info.index, shadow.built, shadow.model.name)

    def _unfit(self, answer: Mapping[str, Any]) -> str | None:
        if not self.open:
            return "not_open"
        if answer["cached"]:
            return "cached"
        return "degraded" if answer["degraded"] or answer["partial"] else None

    @contextmanager
    def _shadow(self, catalogue: Catalogue) -> Iterator[ServedVersion]:
        served_here = self._is_served(catalogue)
        lease = catalogue.lease(self._settings.name) if served_here else self._beside.lease()
        with lease as served:
            yield served

    def _check(self, sample: Sample, catalogue: Catalogue) -> Compared:
        """In the spare thread. Raises Left, NoTime."""
        with (
            leased(catalogue, sample.options.index, sample.version) as live,
            self._shadow(catalogue) as shadow,
        ):
            if shadow.built == live.built and shadow.model is live.model:
                raise Left("same")
            if sample.query.kind == "vector" and (
                shadow.model.gallery_space != live.model.gallery_space
            ):
                raise Left("vector")
            sides = {"live": live, "shadow": shadow}
            took: dict[str, float] = {}
            found: dict[str, Any] = {}
            for side in self._chance.sample(sorted(sides), 2):
                self._spare.breathe()
                began_s = time.perf_counter()
                found[side] = self._answer(side, sides[side], sample)
                took[side] = time.perf_counter() - began_s
            self._show(shadow)
            ids = tuple(hit["id"] for hit in found["shadow"]["hits"])
            return Compared(shadow.built, ids, took["live"], took["shadow"])

    def _answer(self, side: str, served: ServedVersion, sample: Sample) -> dict[str, Any]:
        """What a version answers. Raises Left where the other one refuses what was answered."""
        options = sample.options.model_copy(update={"with_metadata": False, "explain": False})
        setting = Setting(
            served.searcher,
            served.model,
            options.modality,
            self._all.limits,
            Timeline(),
            served.pictures,
        )
        try:
            return find(sample.query, options, setting, None)
        except HivlpError as error:
            if side == "live":
                raise
            fields = {"request_id": sample.request_id, "error": type(error).__name__}
            log.warning("a search was refused", extra=with_fields(fields))
            raise Left("refused") from None

    def _note(self, sample: Sample, compared: Compared) -> None:
        both = len(set(sample.ids) & set(compared.ids))
        most = max(len(sample.ids), len(compared.ids))
        overlap = both / most if most else 1.0
        first = sample.ids[:1] == compared.ids[:1]
        self._metrics.note(overlap, first, compared.live_s, compared.shadow_s)
        if sample.ids == compared.ids:
            return
        fields = {
            "request_id": sample.request_id,
            "kind": sample.query.kind,
            "snapshot": sample.version,
            "shadow": compared.version,
            "overlap": round(overlap, 4),
            "same_first": first,
            "only_live": [i for i in sample.ids if i not in compared.ids][:TOLD_IDS],
            "only_shadow": [i for i in compared.ids if i not in sample.ids][:TOLD_IDS],
            "live_ms": round(1e3 * compared.live_s, 3),
            "shadow_ms": round(1e3 * compared.shadow_s, 3),
        }
        if self._all.log.queries:
            fields["query"] = asked(sample.query)
        log.info("answers differ", extra=with_fields(fields))

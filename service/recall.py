"""How much of the exact answer live queries get: a sample of them is answered again, exhaustively.

`ann_recall` is the share of the exact top k that was returned, where exact means a search of every
row at the finest level with the query encoded to its full depth. What scores as much as the k-th
counts as right, as in `hivlp evaluate`. A check runs in spare time, long after its answer was sent.

Queries whose answer was chosen to be another are left out: pages beyond the first, re-ranked,
capped by `max_level` or `min_score`, with widths of the caller's own, exact, or cached (checked
when computed, as often as any other).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from hivlp.index.build.widths import ROUNDING
from hivlp.index.cascade import PlanRequest
from hivlp.index.filters import parse_filter
from hivlp.index.searcher import FoundItem
from hivlp.models.levels import FloatArray
from hivlp.service.queries import Opened, Query, Setting
from hivlp.service.sampling import Left, Sampler, leased
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import Catalogue, ServedVersion
from hivlp.service.settings import Limits
from hivlp.service.spare import Spare
from hivlp.service.timeline import Timeline
from hivlp.service.watch_metrics import RecallMetrics
from hivlp.service.watch_settings import RecallSettings

TEN = 10
TIES = 64
"""So many rows beyond those needed are looked at for some that score as much as the last."""
VERSIONS = 4
"""So many versions of an index are remembered, so that one can be compared with the one before."""
EARLY = "early_exit"


@dataclass(frozen=True, slots=True)
class Sample:
    """A query, and what it was answered with."""

    query: Query
    options: SearchOptions
    version: str
    plan: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """Of one query: how many of the exact top k were found and wanted, at the k asked and at 10.

    At 10 it is None where fewer were asked for. `version` is the built one.
    """

    version: str
    plan: str
    asked: tuple[int, int]
    ten: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Recent:
    """Mean ANN recall of the last `checks` queries of a version: at 10, or at the k of those that
    asked for fewer. NaN without any.

    Without those that allowed early exits, which promise the right items, not the same ten.
    """

    mean: float
    checks: int


class RecallWatch:
    """Checks a sample of the answers of one app. `offer` and `run` belong to its event loop."""

    def __init__(
        self, settings: RecallSettings, spare: Spare, limits: Limits, metrics: RecallMetrics
    ) -> None:
        self._settings = settings
        self._spare = spare
        self._limits = limits
        self._metrics = metrics
        self._sampler: Sampler[Sample] = Sampler(
            settings.share, settings.max_per_s, spare, metrics.skipped, metrics.used
        )
        self._lock = threading.Lock()
        self._checked: dict[str, OrderedDict[str, dict[str, deque[Checked]]]] = {}

    @property
    def on(self) -> bool:
        """Whether any queries are checked."""
        return self._sampler.on

    def offer(self, query: Query, options: SearchOptions, answer: Mapping[str, Any]) -> None:
        """An answer was given; it is checked if the lot falls on it, and there is time."""
        if not self._sampler.draw():
            return
        reason = unfit(options, answer)
        if reason is not None:
            self._sampler.skip(reason)
            return
        plan = EARLY if options.early_exit else str(answer["plan"])
        ids = tuple(hit["id"] for hit in answer["hits"])
        self._sampler.take(Sample(query, options, str(answer["snapshot"]), plan, ids))

    async def run(self, catalogue: Catalogue) -> None:
        """Check what was drawn, for ever."""
        await self._sampler.run(lambda sample: self._check(sample, catalogue), self._note)

    def recent(self, index: str, version: str) -> Recent:
        """How a version did lately, and what changed upon it. Safe for any thread."""
        with self._lock:
            versions = self._checked.get(index)
            plans = versions.get(version, {}) if versions else {}
            kept = [one for plan, checked in plans.items() if plan != EARLY for one in checked]
        full = [one.ten or one.asked for one in kept]
        shares = [found / wanted for found, wanted in full]
        return Recent(math.fsum(shares) / len(shares) if shares else math.nan, len(shares))

    def _check(self, sample: Sample, catalogue: Catalogue) -> Checked:
        """In the spare thread. Raises Left, NoTime."""
        options = sample.options
        with leased(catalogue, options.index, sample.version) as served:
            if served.searcher.info.rows.get(options.modality, 0) > self._settings.max_rows:
                raise Left("rows")
            setting = Setting(
                served.searcher,
                served.model,
                options.modality,
                self._limits,
                Timeline(),
                served.pictures,
            )
            opened = sample.query.open(setting)
            finest = self._finest(opened)
            best = self._best(finest, opened, sample, served)
            if not best:
                raise Left("empty")
            scores = _scores(finest, best, sample, served)
        ten = share_found(scores, best, TEN) if options.k >= TEN else None
        return Checked(served.built, sample.plan, share_found(scores, best, options.k), ten)

    def _finest(self, opened: Opened) -> FloatArray:
        """The query encoded to its full depth: (dim,) float32."""
        found: FloatArray | None = None
        outputs = (output for output in opened.outputs)
        with closing(outputs):
            for output in outputs:
                found = output.vectors[0]
                self._spare.breathe()
        assert found is not None, "an encoder has at least one level"
        return found

    def _best(
        self, finest: FloatArray, opened: Opened, sample: Sample, served: ServedVersion
    ) -> list[FoundItem]:
        """The exact answer: at least k items where there are as many, and those tied with them."""
        options, searcher = sample.options, served.searcher
        mask = None
        if options.filter is not None:
            mask = searcher.mask(options.modality, parse_filter(options.filter))
        need = options.k + (opened.exclude is not None)
        request = PlanRequest(options.modality, opened.modality, need, "exact")
        plan = searcher.plan(request, allowed=None if mask is None else mask.count)
        keep = plan.keep + TIES
        found = searcher.exact(options.modality, finest, keep, self._spare.breathe, mask=mask)
        items = searcher.items(options.modality, found, len(found), 0)
        return [item for item in items if item.id != opened.exclude]

    def _note(self, sample: Sample, checked: Checked) -> None:
        index = sample.options.index
        with self._lock:
            versions = self._checked.setdefault(index, OrderedDict())
            plans = versions.setdefault(checked.version, {})
            kept = plans.setdefault(checked.plan, deque(maxlen=self._settings.window))
            kept.append(checked)
            while len(versions) > VERSIONS:
                versions.popitem(last=False)
            own = list(kept)
        self._metrics.note(index, checked.plan, "asked", checked.asked, [c.asked for c in own])
        if checked.ten is not None:
            tens = [c.ten for c in own if c.ten is not None]
            self._metrics.note(index, checked.plan, str(TEN), checked.ten, tens)
        self._metrics.checks.labels(index, checked.plan).inc()


def unfit(options: SearchOptions, answer: Mapping[str, Any]) -> str | None:
    """Why an answer says nothing about its index's recall, or None."""
    if answer["cached"]:
        return "cached"
    if answer["degraded"] or answer["partial"]:
        return "degraded"
    capped = options.max_level is not None or options.min_score is not None
    chosen = capped or options.rerank or options.cascade or options.offset
    return "unfit" if chosen or answer["plan"] == "exact" else None


def share_found(scores: Sequence[float], best: Sequence[FoundItem], k: int) -> tuple[int, int]:
    """Of the best k items, those that there are: how many were found, and how many there are.

    `scores` are the exact ones of what was answered, in its order. What scores as much as the last
    of the best is as good as it.
    """
    wanted = best[:k]
    least = wanted[-1].score - ROUNDING
    return sum(score >= least for score in scores[: len(wanted)]), len(wanted)


def _scores(
    finest: FloatArray, best: Sequence[FoundItem], sample: Sample, served: ServedVersion
) -> list[float]:
    """The exact score of each item that was answered: its best row's, as far as that was found."""
    searcher, searched = served.searcher, sample.options.modality
    known = {item.id: item.score for item in best}
    others = [item_id for item_id in sample.ids if item_id not in known]
    if others:
        rows = np.array([searcher.row_of(item_id, searched) for item_id in others], np.int64)
        level = searcher.info.levels[-1].level
        scored = searcher.explain(searched, {level: finest[None]}, rows)[level]
        known.update(zip(others, scored.tolist(), strict=True))
    return [known[item_id] for item_id in sample.ids]

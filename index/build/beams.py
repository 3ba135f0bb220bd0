"""How wide a graph's beams must be: measured on this gallery with this model's early exits.

For each plan and k: of a ladder of settings, the one that surely reaches the target on one half of
the queries (its mean less 1.645 standard errors) at the least cost. A cascade has two ladders.
Either the last exit walks the finest graph, entered at what level 1's graph found; or the exit
before it walks the finest graph's links by its own level's prefixes, hidden behind the last stage
of the encoder, and the last exit only scores again what that walk found. The cost is the time after
the last exit, as far as the encoder's measured stages hide the walks before it, and a tenth of all
walking, which other queries wait for. Recall is not taken to grow with the beam: with many entry
rows it sometimes doesn't.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from hivlp.index.build.confidence import recall_lower, sure_recall
from hivlp.index.build.directions import Direction
from hivlp.index.build.observe import overlapped_ms
from hivlp.index.build.widths import itself, share_found
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import PlanName
from hivlp.index.level_index import LevelIndex, SearchParams
from hivlp.index.snapshot.manifest import WidthRecord
from hivlp.models.levels import FloatArray

EARLY = ((32, 10), (64, 20), (128, 40), (160, 80), (256, 160))
"""(beam, entry rows) of level 1's search."""
MIDDLE_EARLY = ((64, 20), (128, 40), (160, 80))
"""The same before a walk at the level before the finest."""
BEAMS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096)
MIDDLE_BEAMS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048)
KEPT = (10, 15, 20, 30, 40, 64, 96, 128, 192, 256, 384, 512, 1_024)
"""Rows that the walk before the last exit hands on to be scored again."""
SLOWER = 1.5
"""A ladder stops where a rung costs this much more than the best that reached the target."""
BUSY = 0.1
"""What a millisecond that hides behind the encoder costs: a core that others could use."""
HIDDEN = 0.25
"""The same where it isn't known how long the encoder's stages take."""
Spent = tuple[tuple[int, float], ...]
"""(level, milliseconds) of the walks before the last exit."""
Variant = Literal["walked", "rescored"]


@dataclass(frozen=True, slots=True)
class _Setting:
    """Beams of a plan's walks and the rows they keep, and what they were measured to give."""

    efs: tuple[int, ...]
    keeps: tuple[int, ...]
    recall: float
    sure: float
    cost: float

    @property
    def variant(self) -> Variant:
        """Which of a cascade's two ladders it stands on."""
        return "rescored" if 0 < len(self.efs) == len(self.keeps) else "walked"


def measure_beams(
    direction: Direction,
    graphs: Mapping[int, LevelIndex],
    best: Sequence[Candidates],
    ks: Sequence[int],
    target: float,
) -> list[WidthRecord]:
    """Beams of both plans and every k, for a side whose graphs are `graphs`.

    `best[i]` is what query i finds by exhaustive search of the finest level, at least max(ks) + 1
    rows or all there are.
    """
    trials = {k: _Trial(direction, graphs, best, k) for k in ks}
    records = [_record(direction, "funnel", trials[k], target) for k in ks]
    if len(graphs) > 1:
        # One shape for every k, so that what lies between can be interpolated: that of the middle.
        middle = sorted(ks)[len(ks) // 2]
        shape = trials[middle].best("cascade", target).variant
        cascades = [_record(direction, "cascade", trials[k], target, shape) for k in ks]
        records = [*cascades, *records]
    return records


def _record(
    direction: Direction,
    name: PlanName,
    trial: _Trial,
    target: float,
    shape: Variant | None = None,
) -> WidthRecord:
    taken = trial.best(name, target, shape)
    shares = trial.shares(taken, direction.held_out)
    return WidthRecord(
        searched=direction.searched,
        query=direction.query,
        plan=name,
        k=trial.k,
        keeps=taken.keeps,
        efs=taken.efs,
        family="graph",
        target=target,
        recall_chosen_on=round(taken.recall, 5),
        recall_held_out=round(float(shares.mean()), 5),
        recall_lower=round(recall_lower(shares), 5),
        queries=direction.count,
    )


Answers = list[Candidates]


class _Trial:
    """Runs settings for one k on either half of a direction's queries."""

    def __init__(
        self,
        direction: Direction,
        graphs: Mapping[int, LevelIndex],
        best: Sequence[Candidates],
        k: int,
    ) -> None:
        self._direction = direction
        self._coarse, self._finest = graphs[min(graphs)], graphs[max(graphs)]
        self._before = graphs.get(self._finest.level - 1)
        rows, queries = direction.rows[max(direction.rows)], direction.queries
        pairs = zip(best, queries[max(direction.rows)], strict=True)
        self._best = [(found, itself(found, rows, query)) for found, query in pairs]
        self.k = k
        self._size = direction.size

    def best(self, name: PlanName, target: float, shape: Variant | None = None) -> _Setting:
        """The cheapest setting that reaches the target, or the one that comes nearest to it."""
        half = np.flatnonzero(~self._direction.held_out)
        tried: list[_Setting] = []
        if name == "funnel":
            tried += self._ladder(half, (0, 0), target, tried)
        elif shape != "rescored":
            for early in EARLY:
                tried += self._ladder(half, early, target, tried)
        if name == "cascade" and shape != "walked":
            tried += self._rescored(half, target, tried)
        assert tried, "no setting for this shape"
        good = [s for s in tried if s.sure >= target]
        if good:
            return min(good, key=lambda s: s.cost)
        return max(tried, key=lambda s: (s.sure, -s.cost))

    def shares(self, setting: _Setting, chosen: np.ndarray) -> FloatArray:
        """Recall of each query of a half: (m,) float32."""
        half = np.flatnonzero(chosen)
        if setting.variant == "rescored":
            # As when it was chosen: a query that is in the gallery needs a row more.
            handed = (*setting.keeps[:-1], max(setting.efs[-1], setting.keeps[-1]))
            found, _ = self._walks(half, setting.efs, handed)
            return self._again(half, found, setting.keeps[-1])[0]
        entries = None
        if setting.keeps:
            early = (setting.efs[0], setting.keeps[0])
            entries = [found.rows for found in self._early(half, early)[0]]
        return self._run(half, entries, setting.efs[-1])[0]

    def _ladder(
        self, half: RowArray, early: tuple[int, int], target: float, before: Sequence[_Setting]
    ) -> list[_Setting]:
        """The last exit walks: beam after beam, from level 1's rows or from a cold start."""
        cold = not early[0]
        found, hidden = ([], ()) if cold else self._early(half, early)
        entries = None if cold else [some.rows for some in found]
        tried: list[_Setting] = []
        for ef in self._beams():
            shares, times = self._run(half, entries, ef)
            cost = self._cost(hidden, 1e3 * median(times))
            efs = (ef,) if cold else (early[0], ef)
            keeps = () if cold else (min(early[1], self._size),)
            tried.append(_Setting(efs, keeps, float(shares.mean()), sure_recall(shares), cost))
            if _too_dear(cost, [*before, *tried], target):
                break
        return tried

    def _rescored(
        self, half: RowArray, target: float, before: Sequence[_Setting]
    ) -> list[_Setting]:
        """The exit before the last walks, and what it keeps is scored again."""
        tried: list[_Setting] = []
        if self._before is None:
            return tried
        narrow = self._before is self._coarse
        for early in ((0, 0),) if narrow else MIDDLE_EARLY:
            for ef in (ef for ef in MIDDLE_BEAMS if self.k <= ef <= self._most()):
                efs = (ef,) if narrow else (early[0], ef)
                kept = (ef,) if narrow else (min(early[1], self._size), ef)
                found, hidden = self._walks(half, efs, kept)
                for keep in (keep for keep in KEPT if self.k <= keep <= ef):
                    shares, times = self._again(half, found, keep)
                    cost = self._cost(hidden, 1e3 * median(times))
                    keeps = (*kept[:-1], min(keep, self._size))
                    mean = float(shares.mean())
                    tried.append(_Setting(efs, keeps, mean, sure_recall(shares), cost))
                    if tried[-1].sure >= target:
                        break
                if _too_dear(tried[-1].cost, [*before, *tried], target):
                    break
        return tried

    def _cost(self, hidden: Spent, last_ms: float) -> float:
        """Milliseconds after the last exit, and what the walks before it cost."""
        walked = sum(milliseconds for _, milliseconds in hidden)
        encode = self._direction.encode_ms
        if not encode:
            return last_ms + HIDDEN * walked
        took = overlapped_ms(encode, [*hidden, (self._finest.level, last_ms)])
        return took - sum(encode) + BUSY * walked

    def _most(self) -> int:
        """The widest beam worth a try: more would be an exhaustive search."""
        return max(self._size, 2 * self.k, MIDDLE_BEAMS[0])

    def _beams(self) -> list[int]:
        """Beams from k on, up to the one that is an exhaustive search."""
        beams = [ef for ef in BEAMS if self.k <= ef < self._size]
        return beams if beams and self._size > BEAMS[-1] else [*beams, self._size]

    def _early(self, half: RowArray, early: tuple[int, int]) -> tuple[Answers, Spent]:
        """Level 1's rows for each query of a half, and median milliseconds."""
        queries = self._direction.queries[self._coarse.level][half]
        found, took = self._each(self._coarse, queries, early, None)
        return found, ((self._coarse.level, took),)

    def _walks(
        self, half: RowArray, efs: Sequence[int], keeps: Sequence[int]
    ) -> tuple[Answers, Spent]:
        """What the walks before the last exit find, and the milliseconds of each."""
        assert self._before is not None
        if len(efs) == 1:
            return self._early(half, (efs[0], keeps[0]))
        entries, first = self._early(half, (efs[0], keeps[0]))
        queries = self._direction.queries[self._before.level][half]
        rows = [some.rows for some in entries]
        found, took = self._each(self._before, queries, (efs[1], keeps[1]), rows)
        return found, (*first, (self._before.level, took))

    def _each(
        self,
        level: LevelIndex,
        queries: FloatArray,
        asked: tuple[int, int],
        entries: Sequence[RowArray] | None,
    ) -> tuple[Answers, float]:
        """A walk of `asked` (beam, rows kept) for each query, and median milliseconds."""
        params, keep = SearchParams(ef=max(asked)), min(asked[1], self._size)
        found: Answers = []
        times = []
        for i in range(len(queries)):
            began = time.perf_counter()
            entry = None if entries is None else [entries[i]]
            found += level.search(queries[i : i + 1], keep, params, entry, None)
            times.append(1e3 * (time.perf_counter() - began))
        return found, median(times)

    def _again(self, half: RowArray, found: Answers, keep: int) -> tuple[FloatArray, list[float]]:
        """Recall and seconds of each query of a half whose rows are scored again."""
        queries = self._direction.queries[self._finest.level][half]
        shares, times = np.empty(len(half), np.float32), []
        for i, number in enumerate(half):
            best, own = self._best[number]
            began = time.perf_counter()
            rows = found[i].rows[: keep + len(own)]
            scored = self._finest.score(queries[i : i + 1], [rows])[0]
            times.append(time.perf_counter() - began)
            shares[i] = share_found(scored, best, own, self.k)
        return shares, times

    def _run(
        self, half: RowArray, entries: list[RowArray] | None, ef: int
    ) -> tuple[FloatArray, list[float]]:
        """Recall and seconds of each query of a half, searched one by one."""
        queries = self._direction.queries[self._finest.level][half]
        shares, times = np.empty(len(half), np.float32), []
        for i, number in enumerate(half):
            entry = None if entries is None else [entries[i]]
            began = time.perf_counter()
            params = SearchParams(ef=ef)
            # A query that is in the gallery finds itself besides, and its doubles.
            best, own = self._best[number]
            fetch = self.k + len(own)
            found = self._finest.search(queries[i : i + 1], fetch, params, entry, None)[0]
            times.append(time.perf_counter() - began)
            shares[i] = share_found(found, best, own, self.k)
        return shares, times


def _too_dear(cost: float, tried: Sequence[_Setting], target: float) -> bool:
    reached = [s.cost for s in tried if s.sure >= target]
    return bool(reached) and cost > SLOWER * min(reached)

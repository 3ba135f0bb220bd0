"""How wide a graph's beams must be: measured on this gallery with this model's early exits.

For each plan and k: of a ladder of early searches (beam, entry rows) and finest beams, the pair
that surely reaches the target on one half of the queries (its mean less 1.645 standard errors) in
the least time after the last exit. Recall is
not taken to grow with the beam: with many entry rows it sometimes doesn't.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hivlp.index.build.confidence import recall_lower, sure_recall
from hivlp.index.build.directions import Direction
from hivlp.index.build.widths import itself, share_found
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import PlanName
from hivlp.index.level_index import LevelIndex, SearchParams
from hivlp.index.snapshot.manifest import WidthRecord
from hivlp.models.levels import FloatArray

EARLY = ((32, 10), (64, 20), (128, 40), (160, 80), (256, 160))
"""(beam, entry rows) of level 1's search."""
BEAMS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 4_096)
SLOWER = 1.5
"""A ladder stops where a rung takes this much longer than the best that reached the target."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """Beams of a plan's stages and its entry rows, and what they were measured to give."""

    efs: tuple[int, ...]
    keeps: tuple[int, ...]
    recall: float
    sure: float
    milliseconds: float


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
    records = []
    plans: tuple[PlanName, ...] = ("cascade", "funnel") if len(graphs) > 1 else ("funnel",)
    for name in plans:
        for k in ks:
            trial = _Trial(direction, graphs, best, k)
            taken = trial.best(name, target)
            shares = trial.shares(taken, direction.held_out)
            records.append(
                WidthRecord(
                    searched=direction.searched,
                    query=direction.query,
                    plan=name,
                    k=k,
                    keeps=taken.keeps,
                    efs=taken.efs,
                    family="graph",
                    target=target,
                    recall_chosen_on=round(taken.recall, 5),
                    recall_held_out=round(float(shares.mean()), 5),
                    recall_lower=round(recall_lower(shares), 5),
                    queries=direction.count,
                )
            )
    return records


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
        rows, queries = direction.rows[max(direction.rows)], direction.queries
        pairs = zip(best, queries[max(direction.rows)], strict=True)
        self._best = [(found, itself(found, rows, query)) for found, query in pairs]
        self._k = k
        self._size = direction.size

    def best(self, name: PlanName, target: float) -> _Setting:
        """The quickest setting that reaches the target, or the one that comes nearest to it."""
        half = np.flatnonzero(~self._direction.held_out)
        tried: list[_Setting] = []
        for early in EARLY if name == "cascade" else ((0, 0),):
            entries = self._entries(half, early) if name == "cascade" else None
            for ef in self._beams():
                setting = self._try(half, early, entries, ef)
                tried.append(setting)
                reached = [s.milliseconds for s in tried if s.sure >= target]
                if reached and setting.milliseconds > SLOWER * min(reached):
                    break
        good = [s for s in tried if s.sure >= target]
        if good:
            return min(good, key=lambda s: s.milliseconds)
        return max(tried, key=lambda s: (s.sure, -s.milliseconds))

    def shares(self, setting: _Setting, chosen: np.ndarray) -> FloatArray:
        """Recall of each query of a half: (m,) float32."""
        half = np.flatnonzero(chosen)
        entries = None
        if setting.keeps:
            entries = self._entries(half, (setting.efs[0], setting.keeps[0]))
        return self._run(half, entries, setting.efs[-1])[0]

    def _beams(self) -> list[int]:
        """Beams from k on, up to the one that is an exhaustive search."""
        beams = [ef for ef in BEAMS if self._k <= ef < self._size]
        return beams if beams and self._size > BEAMS[-1] else [*beams, self._size]

    def _try(
        self, half: RowArray, early: tuple[int, int], entries: list[RowArray] | None, ef: int
    ) -> _Setting:
        shares, times = self._run(half, entries, ef)
        efs = (ef,) if entries is None else (early[0], ef)
        keeps = () if entries is None else (min(early[1], self._size),)
        mean = float(shares.mean())
        return _Setting(efs, keeps, mean, sure_recall(shares), median(times) * 1e3)

    def _entries(self, half: RowArray, early: tuple[int, int]) -> list[RowArray]:
        queries = self._direction.queries[self._coarse.level][half]
        params = SearchParams(ef=max(early))
        keep = min(early[1], self._size)
        return [found.rows for found in self._coarse.search(queries, keep, params, None, None)]

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
            fetch = self._k + len(own)
            found = self._finest.search(queries[i : i + 1], fetch, params, entry, None)[0]
            times.append(time.perf_counter() - began)
            shares[i] = share_found(found, best, own, self._k)
        return shares, times

"""Ranks of many queries at once, counted over the rows part by part.

Nothing here holds more than BLOCK scores: with 1,024 queries, 4,096 rows at a time, whether the
gallery has five thousand rows or a hundred million. Each level's rows are read once a block of
queries. The obvious version, a query at a time, is in `plain.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.widths import ROUNDING, ranks
from hivlp.index.candidates import RowArray
from hivlp.models.levels import FloatArray

BLOCK = 4_194_304
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Asked:
    """n queries of one level: `vectors` (n, dim) float32, the groups they belong to (n,) int64, and
    the rows that are the queries themselves (n,) int64, -1 where none is: those never count.
    """

    vectors: FloatArray
    groups: RowArray
    own: RowArray

    def __len__(self) -> int:
        return len(self.vectors)


class Tops:
    """The best k rows of n queries, ties to the lower row: `scores` and `rows`, (n, k)."""

    def __init__(self, count: int, k: int) -> None:
        self.scores: FloatArray = np.full((count, k), -np.inf, dtype=np.float32)
        self.rows: RowArray = np.full((count, k), -1, dtype=np.int64)

    def add(self, scores: FloatArray, rows: RowArray) -> None:
        """Scores (n, m) of m more rows, numbered higher than all before."""
        count, k = self.scores.shape
        if not scores.shape[1]:
            return
        better = scores > self.scores[:, -1:]
        if scores.shape[1] > k and np.isneginf(self.scores[:, -1]).any():
            # Every row of a first part is better than none: only its own best are of use.
            kth = scores.shape[1] - k
            better &= scores >= np.partition(scores, kth, axis=1)[:, kth : kth + 1]
        query, column = np.nonzero(better)
        queries = np.concatenate([np.repeat(np.arange(count), k), query])
        found = np.concatenate([self.scores.ravel(), scores[query, column]])
        numbers = np.concatenate([self.rows.ravel(), rows[column]])
        order = np.lexsort((numbers, -found, queries))
        starts = np.searchsorted(queries[order], np.arange(count))
        best = order[starts[:, None] + np.arange(k)]
        self.scores, self.rows = found[best], numbers[best]


def scored(rows: LevelRows, asked: Asked) -> Iterator[tuple[slice, FloatArray]]:
    """Every part of the rows with its scores, (n, m) float32; a query's own row has -inf."""
    step = max(1, BLOCK // max(len(asked), 1))
    for start in range(0, rows.size, step):
        part = slice(start, min(start + step, rows.size))
        scores = rows.part(part).scan_many(asked.vectors)
        inside = np.flatnonzero((asked.own >= part.start) & (asked.own < part.stop))
        scores[inside, asked.own[inside] - part.start] = -np.inf
        yield part, scores


class Counter:
    """Counts wrong rows at one level, part by part.

    `least` (n,) and each of the m `ties` (n,) are scores; NaN counts nothing. `above` (n,) comes to
    the wrong rows that score at least `least`, `tied` (m, n) to those that score the same as a tie.
    """

    def __init__(self, asked: Asked, least: FloatArray, ties: Sequence[FloatArray]) -> None:
        self._asked = asked
        self._least = (least - np.float32(ROUNDING))[:, None]
        self._ties = [tie[:, None] for tie in ties]
        self.above: Counts = np.zeros(len(asked), dtype=np.int64)
        self.tied: Counts = np.zeros((len(ties), len(asked)), dtype=np.int64)

    def add(self, scores: FloatArray, groups: RowArray) -> None:
        """Scores (n, m) of m more rows, and their groups (m,)."""
        wrong = groups[None, :] != self._asked.groups[:, None]
        self.above += np.count_nonzero((scores >= self._least) & wrong, axis=1)
        for i, tie in enumerate(self._ties):
            same = np.abs(scores - tie) <= ROUNDING
            self.tied[i] += np.count_nonzero(same & wrong, axis=1)


class Ranker:
    """1-based ranks of wanted scores (n, k) among all rows, part by part; ties count against."""

    def __init__(self, wanted: FloatArray) -> None:
        self._wanted = wanted
        self.ranks: Counts = np.zeros(wanted.shape, dtype=np.int64)

    def add(self, scores: FloatArray) -> None:
        """Scores (n, m) of m more rows."""
        for query, (own, wanted) in enumerate(zip(scores, self._wanted, strict=True)):
            self.ranks[query] += ranks(own, wanted)

"""What a plan, or one stage of it, answered n queries with, reduced to a few numbers a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.build.widths import ROUNDING
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.evaluation.counting import Asked, Counts
from hivlp.index.evaluation.gallery import Gallery
from hivlp.models.levels import FloatArray

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Block:
    """n queries, fully encoded (`outputs` by level), each with at least one row in `right`.

    `groups` (n,) are theirs, `own` (n,) the rows that are the queries themselves, -1 for none.
    """

    gallery: Gallery
    outputs: Mapping[int, FloatArray]
    groups: RowArray
    own: RowArray
    right: Sequence[RowArray]

    def __len__(self) -> int:
        return len(self.groups)

    def asked(self, level: int) -> Asked:
        """The queries of one level."""
        return Asked(self.outputs[level], self.groups, self.own)

    def seen(self, number: int, found: Candidates) -> Candidates:
        """Candidates without the query itself."""
        kept = found.rows != self.own[number]
        return found if kept.all() else Candidates(found.rows[kept], found.scores[kept])

    def score(self, level: int, number: int, rows: RowArray) -> FloatArray:
        """Exact scores of some rows for one query at a level."""
        return self.gallery.rows[level].score(self.outputs[level][number], rows)

    def best_right(self, level: int) -> FloatArray:
        """Each query's best score of a right row at a level: (n,) float32."""
        each = (self.score(level, i, rows).max() for i, rows in enumerate(self.right))
        return np.fromiter(each, np.float32, len(self))


class Answers:
    """Answers of n queries, ordered by the exact scores of `level`.

    `best` (n,) float32 is the score of the best right row found, NaN without one; `before` (n,)
    counts the wrong ones found that score as much; `first` (n, k) float32 are the finest scores of
    the first k rows found, -inf where there are fewer; `head` (n, depth) are the first rows in the
    pessimistic order, a right one behind its equals, -1 where there are fewer.
    """

    def __init__(self, block: Block, level: int, k: int, depth: int = 0) -> None:
        count = len(block)
        self.level = level
        self.best: FloatArray = np.full(count, np.nan, dtype=np.float32)
        self.before: Counts = np.zeros(count, dtype=np.int64)
        self.first: FloatArray = np.full((count, k), -np.inf, dtype=np.float32)
        self.head: RowArray = np.full((count, depth), -1, dtype=np.int64)
        self._block = block
        self._tied: Counts = np.zeros(count, dtype=np.int64)

    def put(self, number: int, found: Candidates) -> None:
        """What query `number` was answered with, best first, the query itself left out."""
        block = self._block
        if not len(found):
            return
        k, finest = self.first.shape[1], block.gallery.finest
        first = block.score(finest, number, found.rows[:k])
        self.first[number, : len(first)] = first
        scores = block.score(self.level, number, found.rows)
        right = block.gallery.groups[found.rows] == block.groups[number]
        if self.head.shape[1]:
            order = np.lexsort((found.rows, right, -scores))[: self.head.shape[1]]
            self.head[number, : len(order)] = found.rows[order]
        if right.any():
            best, wrong = scores[right].max(), scores[~right]
            self.best[number] = best
            self.before[number] = np.count_nonzero(wrong >= best - np.float32(ROUNDING))
            self._tied[number] = np.count_nonzero(np.abs(wrong - best) <= ROUNDING)

    def ranks(self, tied: Counts) -> Numbers:
        """(n,) 1-based, inf where nothing right was found.

        `tied` (n,) are all wrong rows that score as the best right one does: they count though the
        answer leaves them out, since only the number of rows did that.
        """
        left_out = np.maximum(tied - self._tied, 0)
        return np.where(np.isnan(self.best), np.inf, 1.0 + self.before + left_out)

    def ann(self, kth: FloatArray) -> Numbers:
        """ANN recall@k (n,): the share of the first k that is as good as the exact k-th, (n,)."""
        found = self.first >= (kth - np.float32(ROUNDING))[:, None]
        shares: Numbers = np.count_nonzero(found, axis=1) / self.first.shape[1]
        return shares

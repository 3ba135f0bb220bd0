"""What a search stage hands to the next: rows and scores, best first.

Order everywhere in the project: score from high to low, and among equal scores row from low to
high, so a result never depends on the backend that found it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.models.levels import FloatArray

RowArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """`rows` (m,) int64, unique, and `scores` (m,) float32, inner products, best first."""

    rows: RowArray
    scores: FloatArray

    def __post_init__(self) -> None:
        assert self.rows.shape == self.scores.shape, (self.rows.shape, self.scores.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def top(self, k: int) -> Candidates:
        """The best `k`, or all where there are fewer."""
        return self if k >= len(self) else Candidates(self.rows[:k], self.scores[:k])

    @staticmethod
    def ranked(rows: RowArray, scores: FloatArray, k: int) -> Candidates:
        """The best `k` of unordered rows and scores, ties to the lower row."""
        if 4 * k < len(rows):  # a partial sort first; keep every row tied with the k-th score
            threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
            kept = np.flatnonzero(scores >= threshold)
            rows, scores = rows[kept], scores[kept]
        order = np.lexsort((rows, -scores))[:k]
        return Candidates(
            np.ascontiguousarray(rows[order], dtype=np.int64),
            np.ascontiguousarray(scores[order], dtype=np.float32),
        )

    @staticmethod
    def none() -> Candidates:
        """No candidates at all."""
        return Candidates(np.empty(0, np.int64), np.empty(0, np.float32))


def merged(found: Sequence[Candidates], keep: int) -> Candidates:
    """Candidates of several places as one, the best `keep`."""
    full = [some for some in found if len(some)]
    if len(full) < 2:
        return full[0].top(keep) if full else Candidates.none()
    rows = np.concatenate([some.rows for some in full])
    scores = np.concatenate([some.scores for some in full])
    return Candidates.ranked(rows, scores, keep)

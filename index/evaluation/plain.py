"""Ranks and ANN recall of one query from every row's score: the obvious versions.

What `measure.py` counts block by block must come to the same; the tests hold the two together.
Notable: ties never favour the model. A right row counts behind every wrong row of its score, so a
model that gives every row the same score finds nothing. Ranks are 1-based, inf where nothing right
was found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hivlp.index.build.widths import ROUNDING
from hivlp.index.candidates import RowArray
from hivlp.models.levels import FloatArray

ANN_K = 10
BoolArray = npt.NDArray[np.bool_]


def pessimistic_rank(scores: FloatArray, right: BoolArray) -> float:
    """1 + how many wrong rows score at least as much as the best right one; inf without one."""
    if not right.any():
        return float("inf")
    best = scores[right].max() - ROUNDING
    return 1.0 + float(np.count_nonzero(scores[~right] >= best))


def plan_rank(exact: FloatArray, found: RowArray, right: BoolArray) -> float:
    """Pessimistic rank of the best right row among `found`; `exact` are every row's finest scores.

    Wrong rows that tie with it count although they were not found: only the row's number left them
    out.
    """
    rank = pessimistic_rank(exact[found], right[found])
    if np.isinf(rank):
        return rank
    tied = np.abs(exact - exact[found][right[found]].max()) <= ROUNDING
    tied[found] = False
    return rank + float(np.count_nonzero(tied & ~right))


def ann_recall(exact: FloatArray, found: RowArray, k: int = ANN_K) -> float:
    """Share of the exact top k among the first k `found`; `exact` are every row's finest scores.

    A row as good as the k-th counts as one of them.
    """
    k = min(k, len(exact))
    threshold = np.partition(exact, len(exact) - k)[len(exact) - k] - ROUNDING
    return float(np.count_nonzero(exact[found[:k]] >= threshold)) / k

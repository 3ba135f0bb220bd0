"""Two kinds of recall of fitted levels, by exhaustive numpy search.

*R@K*: is a right item among the first K. *ANN recall*: how many of the finest level's exact top 10
does an early level hold among its best K1. Never one for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.models.levels import FloatArray

Rows = npt.NDArray[np.int64]
RECALL_AT = (1, 5, 10)
TOP = 10
WIDTHS = (10, 20, 50, 100, 200, 500, 1000)
WANTED = 0.99
AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Side:
    """What is searched, or what searches: one (n, dim) float32 per level, and each row's thing.

    `itself` (n,): a row's number in the other side, where it is there too and must not find itself.
    """

    levels: Sequence[FloatArray]
    group: Rows
    itself: Rows | None = None

    def rows(self, chosen: npt.NDArray[np.generic]) -> Side:
        """Only some rows (a mask or row numbers)."""
        itself = None if self.itself is None else self.itself[chosen]
        return Side([level[chosen] for level in self.levels], self.group[chosen], itself)


@dataclass(frozen=True, slots=True)
class Widths:
    """How many candidates a plan keeps after each level but the last."""

    cascade: tuple[int, ...]
    funnel: tuple[int, ...]


def first_right(order_scores: FloatArray, right: npt.NDArray[np.bool_]) -> Rows:
    """Rank, from 0, of the best right item of each row; the row's length where there is none.

    Ties count against the right item.
    """
    best = np.where(right, order_scores, -np.inf).max(1, keepdims=True)
    ahead = ((order_scores >= best) & ~right).sum(1)
    ahead[~np.isfinite(best[:, 0])] = order_scores.shape[1]
    return np.asarray(ahead, dtype=np.int64)


def recall_at(ranks: Rows) -> dict[str, float]:
    """Share of ranks under K, for each K."""
    return {f"R@{k}": round(float((ranks < k).mean()), 4) for k in RECALL_AT}


def _scores(
    queries: Side, gallery: Side, level: int, gallery_level: int | None = None
) -> FloatArray:
    there = gallery.levels[level if gallery_level is None else gallery_level]
    found: FloatArray = queries.levels[level] @ there.T
    _hide_itself(found, queries)
    return found


def _hide_itself(scores: FloatArray, queries: Side) -> None:
    if queries.itself is not None:
        scores[np.arange(len(scores)), queries.itself] = -np.inf


def _in_parts(side: Side) -> list[Side]:
    count = len(side.group)
    return [side.rows(np.arange(i, min(i + AT_ONCE, count))) for i in range(0, count, AT_ONCE)]


def level_recalls(queries: Side, gallery: Side) -> list[dict[str, float]]:
    """R@K of every level alone, coarse first."""
    measured = []
    for level in range(len(gallery.levels)):
        ranks = [
            first_right(_scores(part, gallery, level), _right(part, gallery))
            for part in _in_parts(queries)
        ]
        measured.append(recall_at(np.concatenate(ranks)))
    return measured


def _right(queries: Side, gallery: Side) -> npt.NDArray[np.bool_]:
    return np.asarray(queries.group[:, None] == gallery.group[None, :])


def plan_recalls(queries: Side, gallery: Side, widths: Widths) -> dict[str, dict[str, float]]:
    """R@K of both plans: early queries level by level, or the finest query's own prefixes."""
    dims = [level.shape[1] for level in gallery.levels]
    finest = Side([unit(queries.levels[-1][:, :d]) for d in dims], queries.group, queries.itself)
    return {
        "cascade": recall_at(_plan_ranks(queries, gallery, widths.cascade)),
        "funnel": recall_at(_plan_ranks(finest, gallery, widths.funnel)),
    }


def unit(vectors: FloatArray) -> FloatArray:
    """Rows scaled to length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _plan_ranks(queries: Side, gallery: Side, widths: Sequence[int]) -> Rows:
    ranks = []
    for part in _in_parts(queries):
        alive = np.ones((len(part.group), len(gallery.group)), bool)
        for level, width in enumerate((*widths, 0)):
            scores = np.where(alive, _scores(part, gallery, level), -np.inf)
            if width and width < scores.shape[1]:
                kept = np.argpartition(-scores, width - 1, axis=1)[:, :width]
                alive = np.zeros_like(alive)
                np.put_along_axis(alive, kept, True, axis=1)
        ranks.append(first_right(scores, _right(part, gallery) & alive))
    return np.concatenate(ranks)


def early_ranks(queries: Side, gallery: Side) -> Rows:
    """Where level 1 ranks each of the finest level's exact top 10: (q, 10) ranks from 0."""
    found = []
    top = min(TOP, len(gallery.group))
    for part in _in_parts(queries):
        early, finest = _scores(part, gallery, 0), _scores(part, gallery, len(gallery.levels) - 1)
        wanted = np.argpartition(-finest, top - 1, axis=1)[:, :top]
        order = np.argsort(np.argsort(-early, axis=1), axis=1)
        found.append(np.take_along_axis(order, wanted, axis=1))
    return np.concatenate(found)


def ann_recall(ranks: Rows) -> dict[str, float]:
    """ANN recall@10 of level 1 by K1."""
    return {str(k): round(float((ranks < k).mean()), 4) for k in WIDTHS}


def width_for(ranks: Rows, wanted: float = WANTED) -> int:
    """The smallest K1 whose ANN recall is at least `wanted`."""
    flat = np.sort(ranks, axis=None)
    return int(flat[min(len(flat), int(np.ceil(wanted * len(flat)))) - 1]) + 1

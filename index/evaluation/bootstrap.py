"""Intervals by the bootstrap: how far figures would move with other items of the same kind.

    spread = resampled(columns)              # (resamples, columns)
    low, high = interval(spread[:, 0])

Items are drawn with replacement, each with all its queries: the five captions of a picture say much
the same, and five independent draws they are not. Every column is computed from the same draws, so
that figures of several systems can be subtracted draw by draw: the difference of two systems that
answer the same queries is far surer than either of them (a paired bootstrap; Efron and Tibshirani,
An Introduction to the Bootstrap, 1993). Where there are folds, items are drawn within each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.candidates import RowArray

RESAMPLES = 1_000
CONFIDENCE = 0.95
BLOCK = 4_000_000
"""Numbers of draws in memory together."""
SEED = 17
FOLD_BITS = 40
"""Where an item's fold stands in its key."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: `values` (n,) of n queries, the items they belong to, and their folds, (n,).

    The figure is the mean over folds of each fold's mean value.
    """

    values: Numbers
    items: RowArray
    folds: RowArray

    def figure(self) -> float:
        """The figure itself."""
        sums = np.bincount(self.folds, self.values)
        counts = np.bincount(self.folds)
        return float((sums[counts > 0] / counts[counts > 0]).mean())


def resampled(columns: Sequence[Column], resamples: int = RESAMPLES, seed: int = SEED) -> Numbers:
    """(resamples, columns): every figure computed anew from items drawn with replacement.

    NaN where a draw leaves a figure without queries, as it may with very few items.
    """
    rng = np.random.default_rng(seed)
    total = np.zeros((resamples, len(columns)))
    folds = np.zeros((resamples, len(columns)))
    for fold, items in _items_of_folds(columns):
        step = max(1, BLOCK // len(items))
        for start in range(0, resamples, step):
            block = slice(start, min(start + step, resamples))
            drawn = draws(rng, block.stop - block.start, len(items))
            for place, column in enumerate(columns):
                means = _means(column, fold, items, drawn)
                known = ~np.isnan(means)
                total[block, place] += np.where(known, means, 0.0)
                folds[block, place] += known
    return np.divide(total, folds, out=np.full_like(total, np.nan), where=folds > 0)


def draws(rng: np.random.Generator, count: int, items: int) -> Numbers:
    """(count, items): how often each item is drawn in each of `count` draws of `items` items."""
    picked = rng.integers(0, items, (count, items)) + items * np.arange(count)[:, None]
    times = np.bincount(picked.ravel(), minlength=count * items)
    return times.reshape(count, items).astype(np.float64)


def interval(spread: Numbers, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The middle `confidence` of a figure's values over the resamples, NaN left out."""
    known = spread[~np.isnan(spread)]
    if not len(known):
        return float("nan"), float("nan")
    beside = (1 - confidence) / 2
    low, high = np.quantile(known, [beside, 1 - beside])
    return float(low), float(high)


def _items_of_folds(columns: Sequence[Column]) -> Iterator[tuple[int, RowArray]]:
    """The items of each fold, ascending; an item is in one fold."""
    distinct = {(id(column.folds), id(column.items)): column for column in columns}
    keys = [np.unique((own.folds << FOLD_BITS) | own.items) for own in distinct.values()]
    found = np.unique(np.concatenate(keys)) if keys else np.empty(0, np.int64)
    for fold in np.unique(found >> FOLD_BITS):
        yield int(fold), found[found >> FOLD_BITS == fold] & ((1 << FOLD_BITS) - 1)


def _means(column: Column, fold: int, items: RowArray, drawn: Numbers) -> Numbers:
    """The column's mean over one fold in every draw: (draws,), NaN without queries."""
    inside = column.folds == fold
    place = np.searchsorted(items, column.items[inside])
    above = drawn @ np.bincount(place, column.values[inside], minlength=len(items))
    below = drawn @ np.bincount(place, minlength=len(items))
    means: Numbers = np.divide(above, below, out=np.full(len(drawn), np.nan), where=below > 0)
    return means

"""What needs no gradient: main directions, ridge regression, score maps; in float64 inside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hivlp.models.levels import FloatArray

_TINY = 1e-6
WIDE = 1024
"""Features from which a few main directions are found without computing all."""
SPARE = 32
"""Directions beyond those wanted, which sharpen them."""
Doubles = npt.NDArray[np.float64]


def main_directions(rows: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Mean (d,) and the `most` directions of largest variance, (d, k) with orthonormal columns.

    k is `most`, or less where the rows span less. Few directions of many features are found by
    subspace iteration, which takes a tenth of the time of all of them.
    """
    mean = rows.mean(0, dtype=np.float64)
    centred = rows - mean
    most = min(most, centred.shape[1], max(1, len(rows) - 1))
    if centred.shape[1] >= WIDE and 4 * most <= centred.shape[1]:
        return mean.astype(np.float32), _signed(_leading(centred, most)).astype(np.float32)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    order = np.argsort(values)[::-1][:most]
    return mean.astype(np.float32), _signed(vectors[:, order]).astype(np.float32)


def _leading(centred: Doubles, most: int) -> Doubles:
    """The first `most` right singular vectors of (n, d), nearly: (d, most). Always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        matrix = torch.from_numpy(centred.astype(np.float32))
        found = torch.svd_lowrank(matrix, q=min(most + SPARE, *matrix.shape), niter=4)[2]
    return np.asarray(found[:, :most].numpy(), dtype=np.float64)


def best_views(galleries: Sequence[FloatArray]) -> FloatArray:
    """The turn (D, D), orthogonal, whose first numbers tell the most of (n, D) vectors, any count.

    The first d rows are the d directions that keep the most of the vectors' squared length, and so
    lose the least of their inner products' squares (Eckart and Young, 1936); galleries weigh the
    same, however many rows they have. Not centred: a vector's cut is normalised again, and without
    what all have in common its length would change what is nearest.
    """
    second: Doubles = np.zeros((galleries[0].shape[1],) * 2)
    for rows in galleries:
        wide = rows.astype(np.float64)
        second += wide.T @ wide / max(1, len(rows))
    _, vectors = np.linalg.eigh(second)
    return np.ascontiguousarray(_signed(vectors[:, ::-1]).T, dtype=np.float32)


def standard_directions(rows: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Mean (d,) and a (d, k) basis: each feature scaled to variance 1 / d, then turned.

    Rows so reduced have length 1 on average, whatever the features' units. A feature that never
    changed is left out: scaled up, it would drown all others in the first row where it does.
    """
    mean = rows.mean(0, dtype=np.float64)
    spread = rows.std(0, dtype=np.float64)
    scale = 1.0 / ((spread + _TINY) * np.sqrt(rows.shape[1]))
    scale[spread <= _TINY * np.maximum(1.0, np.abs(mean))] = 0.0
    if most >= rows.shape[1]:
        return mean.astype(np.float32), np.diag(scale).astype(np.float32)
    _, directions = main_directions(((rows - mean) * scale).astype(np.float32), most)
    return mean.astype(np.float32), (scale[:, None] * directions).astype(np.float32)


def ridge(rows: FloatArray, targets: FloatArray, penalty: float) -> tuple[FloatArray, FloatArray]:
    """Linear map and bias from (n, d) rows to (n, t) targets: weight (t, d), bias (t,).

    Minimises the summed squared error plus `penalty` times the squared weights, bias included.
    """
    wide: Doubles = np.concatenate([rows, np.ones((len(rows), 1))], 1, dtype=np.float64)
    square = wide.T @ wide + penalty * np.eye(wide.shape[1])
    solved: Doubles = np.asarray(np.linalg.solve(square, wide.T @ targets.astype(np.float64)))
    return solved[:-1].T.astype(np.float32), solved[-1].astype(np.float32)


def score_map(galleries: Sequence[FloatArray], dim: int, penalty: float) -> FloatArray:
    """Linear map (dim, D) from full queries to those that score a level as the full ones score all.

    A level is the first `dim` numbers of each (g, D) gallery vector, normalised again: what the
    numbers left out would have said of a gallery is in part told by those kept. Least squares over
    all rows of one gallery, whatever the query, since a query's order doesn't hang on what is added
    to all of its scores; each gallery weighs the same. Few rows tell little: the map is drawn to
    the plain prefix by `penalty` and numbers / rows, as shares of the kept numbers' mean variance.
    """
    among: Doubles = np.zeros((dim, dim))
    across: Doubles = np.zeros((dim, galleries[0].shape[1]))
    plain: Doubles = np.zeros_like(across)
    for rows in galleries:
        lengths = np.maximum(np.linalg.norm(rows[:, :dim], axis=1), _TINY)
        cut = rows[:, :dim] / lengths[:, None]
        kept = cut - cut.mean(0, dtype=np.float64)
        variance = max(float((kept * kept).sum()), _TINY)
        among += kept.T @ kept / variance
        across += kept.T @ (rows - rows.mean(0, dtype=np.float64)) / variance
        plain[:, :dim] += np.eye(dim) * float(lengths.mean()) / len(galleries)
    fewest = min(len(rows) for rows in galleries)
    drawn = (penalty + dim / fewest) * len(galleries) / dim
    solved = np.linalg.solve(among + drawn * np.eye(dim), across + drawn * plain)
    return np.asarray(solved, dtype=np.float32)


def _signed(vectors: Doubles) -> Doubles:
    """Directions with a sign that doesn't depend on the solver: the largest entry is positive."""
    largest = np.abs(vectors).argmax(0)
    signs = np.sign(vectors[largest, np.arange(vectors.shape[1])])
    signs[signs == 0] = 1.0
    return np.asarray(vectors * signs, dtype=np.float64)

"""What needs no gradient: main directions and ridge regression, in float64 inside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hivlp.models.levels import FloatArray

_TINY = 1e-6
Doubles = npt.NDArray[np.float64]


def main_directions(rows: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Mean (d,) and the `most` directions of largest variance, (d, k) with orthonormal columns.

    k is `most`, or less where the rows span less.
    """
    mean = rows.mean(0, dtype=np.float64)
    centred = rows - mean
    values, vectors = np.linalg.eigh(centred.T @ centred)
    order = np.argsort(values)[::-1][: min(most, len(values), max(1, len(rows) - 1))]
    return mean.astype(np.float32), _signed(vectors[:, order]).astype(np.float32)


def standard_directions(rows: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Mean (d,) and a (d, k) basis: each feature scaled to variance 1 / d, then turned.

    Rows so reduced have length 1 on average, whatever the features' units.
    """
    mean = rows.mean(0, dtype=np.float64)
    scale = 1.0 / ((rows.std(0, dtype=np.float64) + _TINY) * np.sqrt(rows.shape[1]))
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


def _signed(vectors: Doubles) -> Doubles:
    """Directions with a sign that doesn't depend on the solver: the largest entry is positive."""
    largest = np.abs(vectors).argmax(0)
    signs = np.sign(vectors[largest, np.arange(vectors.shape[1])])
    signs[signs == 0] = 1.0
    return np.asarray(vectors * signs, dtype=np.float64)

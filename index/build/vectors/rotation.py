"""A rotation after which vectors nest: their first numbers say the most about them.

    rotation = fit_rotation(source.sample(200_000), source.dim)
    rows = unit @ rotation.matrix          # inner products are what they were

The eigenvectors of the second-moment matrix, those of the largest eigenvalues first: of all
orthogonal matrices the one whose prefixes lose the least of the vectors, in squared length, and so
of their scores. Not centred: an inner product is of vectors as they are, and a rotation that keeps
all of them can't take a mean away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hivlp.index.build.vectors.units import unit_rows
from hivlp.index.errors import BuildError
from hivlp.models.levels import FloatArray

SAMPLED = 200_000
"""Rows that a rotation is fitted on, at most."""
GATHERED = 4_096
ORTHOGONAL = 1e-5
"""No entry of R'R may be further than this from the identity's."""
DEFAULT_DIMS = (128, 300)
HALVED_FROM = 16
"""Vectors of at most the first default's numbers, but this many, get one coarse level of half."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """`matrix` (D, D) float32, orthogonal, or None for vectors that nest already.

    `moments` (D,) float64 are the mean squares of the numbers after it, and add up to 1; `rows` is
    how many vectors they were taken from.
    """

    matrix: FloatArray | None
    moments: np.ndarray
    rows: int

    def __call__(self, unit: FloatArray) -> FloatArray:
        """(n, D) float32 in, (n, D) float32 out."""
        return unit if self.matrix is None else unit @ self.matrix

    def shares(self, dims: Sequence[int]) -> tuple[float, ...]:
        """The share of the vectors' squared length that lies in the first `dims` numbers."""
        summed = np.cumsum(self.moments) / max(float(self.moments.sum()), 1e-300)
        return tuple(round(float(summed[dim - 1]), 6) for dim in dims)


def fit_rotation(sample: Iterable[npt.NDArray[Any]], dim: int, *, rotate: bool = True) -> Rotation:
    """Fit on (m, dim) vectors of any length at a time; those that can't be used are left out.

    `rotate` False only measures. Raises BuildError where not one can be used.
    """
    moment = np.zeros((dim, dim))
    rows = 0
    for some in _gathered(sample):
        units = unit_rows(some)
        good = units.vectors[units.good]
        moment += good.T @ good
        rows += len(good)
    if not rows:
        raise BuildError("none of the vectors sampled can be used: all are zero, NaN or Inf")
    moment /= rows
    if not rotate:
        return Rotation(None, np.diag(moment).copy(), rows)
    values, directions = np.linalg.eigh(moment)
    directions = directions[:, ::-1]
    # A sign is free: the largest number of each direction is made positive, so that the same rows
    # give the same rotation.
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=0)[None], axis=0)
    matrix = np.ascontiguousarray(directions * np.sign(largest), dtype=np.float32)
    check_orthogonal(matrix)
    return Rotation(matrix, np.maximum(values[::-1], 0.0), rows)


def _gathered(sample: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Small parts joined, so that products of matrices are worth their while."""
    waiting: list[npt.NDArray[Any]] = []
    for part in sample:
        waiting.append(part)
        if sum(map(len, waiting)) >= GATHERED:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def check_orthogonal(matrix: FloatArray) -> None:
    """Raises BuildError unless a (D, D) matrix keeps inner products."""
    exact = matrix.astype(np.float64)
    off = float(np.abs(exact.T @ exact - np.eye(len(matrix))).max())
    if not off <= ORTHOGONAL:
        raise BuildError(f"the rotation is not orthogonal: off by {off:.2g}")


def level_dims(asked: Sequence[int] | None, dim: int) -> tuple[int, ...]:
    """The dimensions of the levels of vectors of `dim` numbers, growing, the last `dim` itself.

    Unless asked for: those of 128 and 300 that are fewer; half of the numbers where none is.
    Raises BuildError for dimensions that can't be.
    """
    if asked is not None:
        wanted = sorted({*asked, dim})
        if wanted[0] < 1 or wanted[-1] > dim:
            raise BuildError(f"--dims {list(asked)}: from 1 to {dim}, the numbers of a vector")
        return tuple(wanted)
    coarse = [one for one in DEFAULT_DIMS if one < dim]
    if not coarse and dim >= HALVED_FROM:
        coarse = [dim // 2]
    return (*coarse, dim)

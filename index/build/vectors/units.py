"""Vectors of any length made unit vectors, and those that can't be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hivlp.models.levels import FloatArray

SAFE = (1e-15, 1e15)
"""Lengths within which squares of float32 neither vanish nor overflow."""
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Units:
    """`vectors` (n, D) float32 of length 1, anything where `good` (n,) is False; `lengths` (n,)
    float64 are what they were: 0 for a zero vector, NaN for one that holds NaN or Inf.
    """

    vectors: FloatArray
    lengths: npt.NDArray[np.float64]

    @property
    def good(self) -> BoolArray:
        """Which vectors have a direction."""
        return self.lengths > 0  # False for NaN

    def reason(self, row: int) -> str:
        """Why a vector isn't good."""
        return "a vector of zeros" if self.lengths[row] == 0 else "a vector with NaN or Inf"


def unit_rows(vectors: npt.NDArray[Any]) -> Units:
    """Normalise (n, D) float16, float32 or float64 rows."""
    with np.errstate(over="ignore", invalid="ignore"):
        rows = vectors.astype(np.float32)
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows)).astype(np.float64)
    odd = np.flatnonzero(~((lengths > SAFE[0]) & (lengths < SAFE[1])))
    divisors = lengths.astype(np.float32)
    divisors[odd] = 1.0
    if len(odd):
        rows[odd], lengths[odd] = _slowly(vectors[odd])
    rows /= divisors[:, None]
    return Units(rows, lengths)


def _slowly(vectors: npt.NDArray[Any]) -> tuple[FloatArray, npt.NDArray[np.float64]]:
    """Unit rows and lengths of vectors so short or long that their squares can't be told.

    Rows that hold NaN or Inf come out as zeros, with the length NaN.
    """
    rows = vectors.astype(np.float64)
    largest = np.abs(rows).max(axis=1)
    finite = np.isfinite(largest)
    scale = np.where(finite & (largest > 0), largest, 1.0)
    rows = np.where(finite[:, None], rows, 0.0) / scale[:, None]
    own = np.linalg.norm(rows, axis=1)
    with np.errstate(over="ignore"):
        lengths = np.where(finite, np.minimum(own * scale, np.finfo(np.float64).max), np.nan)
    return (rows / np.where(own > 0, own, 1.0)[:, None]).astype(np.float32), lengths

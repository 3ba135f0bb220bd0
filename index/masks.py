"""Which rows a search may return: the bitmap of a filter, or of what was not deleted.

mask = RowMask.of(allowed)          # (N,) bool
level.search(queries, k, params, None, mask)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hivlp.index.candidates import RowArray

BoolArray = npt.NDArray[np.bool_]
BitArray = npt.NDArray[np.uint8]


class Mask(Protocol):
    """Which rows of a side may be found, as the searcher that made it keeps that."""

    @property
    def size(self) -> int:
        """Number of rows, allowed or not."""

    @property
    def count(self) -> int:
        """Number of rows allowed."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """`allowed` (N,) bool, `bits` the same packed ((N + 7) // 8,) uint8, lowest row first.

    `count` is the number of rows allowed. Made once a filter, shared by every level of a side.
    """

    allowed: BoolArray
    bits: BitArray
    count: int

    @staticmethod
    def of(allowed: BoolArray) -> RowMask:
        """The mask of (N,) booleans; 0.1 ms for a million."""
        assert allowed.ndim == 1, allowed.shape
        given = np.ascontiguousarray(allowed, dtype=np.bool_)
        return RowMask(given, np.packbits(given, bitorder="little"), int(np.count_nonzero(given)))

    @property
    def size(self) -> int:
        """Number of rows, allowed or not."""
        return len(self.allowed)

    @property
    def rows(self) -> RowArray:
        """Allowed rows, ascending: (count,) int64."""
        return np.flatnonzero(self.allowed).astype(np.int64)

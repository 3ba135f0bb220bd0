"""One gallery side of an opened version: its levels, rows, and what each row belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hivlp.index.backends.rows import LevelRows
from hivlp.index.candidates import RowArray
from hivlp.index.level_index import LevelIndex
from hivlp.models.levels import Modality


@dataclass(frozen=True, slots=True)
class Side:
    """One gallery side: rows 0..N-1, the same in every level.

    The best `rows_for_items[n - 1]` rows are sure to hold n different items. `graphs` are the
    levels that a graph stage can walk, none in the scan family or without FAISS. `maskable` is
    level 1 in codes that take a mask, where its own don't. `states` (N, m x d) float16 are token
    states of pictures, zeros where a row has none; None where the version keeps none.
    """

    modality: Modality
    levels: Mapping[int, LevelIndex]
    rows: Mapping[int, LevelRows]
    row_items: RowArray
    rows_for_items: RowArray
    texts: Any = None
    graphs: Mapping[int, LevelIndex] = field(default_factory=dict)
    maskable: LevelIndex | None = None
    states: npt.NDArray[np.float16] | None = None

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.row_items)

    def rows_needed(self, items: int) -> int:
        """How many of the best rows are sure to hold `items` items, where there are as many."""
        known = len(self.rows_for_items)
        return self.size if items > known else int(self.rows_for_items[items - 1])


def rows_for_items(row_items: RowArray) -> RowArray:
    """(items,) int64: n different items are sure among the best `out[n - 1]` rows.

    The worst case is that the n - 1 items with the most rows take all the first places.
    """
    counts = np.unique(row_items, return_counts=True)[1]
    largest = np.sort(counts)[::-1].astype(np.int64)
    return np.concatenate(([0], np.cumsum(largest[:-1]))).astype(np.int64) + 1

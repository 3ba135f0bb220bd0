"""Queries of one modality against one side of a gallery: what widths and beams are measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.backends.rows import LevelRows
from hivlp.index.level_index import LevelIndex
from hivlp.models.levels import FloatArray, Modality

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Direction:
    """Queries of one modality, by level ((n, dim) float32 each), against one gallery side.

    `held_out` (n,) tells the halves apart: widths are chosen on the one and reported on the other;
    queries of one item belong to the same half. `levels` are the side's opened levels, by which
    lossy codes are measured as they are (None: every level is exact).
    """

    searched: Modality
    query: Modality
    queries: Mapping[int, FloatArray]
    rows: Mapping[int, LevelRows]
    held_out: BoolArray
    levels: Mapping[int, LevelIndex] | None = None

    @property
    def count(self) -> int:
        """Number of queries."""
        return len(next(iter(self.queries.values())))

    @property
    def size(self) -> int:
        """Rows of the side."""
        return next(iter(self.rows.values())).size

    @property
    def halved(self) -> bool:
        """Whether there are queries to choose on and others to report on."""
        return 0 < int(self.held_out.sum()) < self.count

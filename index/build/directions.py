"""Queries of one modality against one side of a gallery: what widths and beams are measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.answers import Answers
from hivlp.index.candidates import RowArray
from hivlp.index.level_index import LevelIndex
from hivlp.models.levels import FloatArray, Modality

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Direction:
    """Queries of one modality, by level ((n, dim) float32 each), against one gallery side.

    `held_out` (n,) tells the halves apart: widths are chosen on the one and reported on the other;
    queries of one item belong to the same half. `levels` are the side's opened levels, by which
    lossy codes are measured as they are (None: every level is exact). `items` (n,) say whose the
    queries are, `answers` which rows answer them rightly (None: not known), and `encode_ms` how
    long each stage of their encoder takes (none: not known). `own_rows` (n,) are the queries' own
    rows, where they are rows of this very side.
    """

    searched: Modality
    query: Modality
    queries: Mapping[int, FloatArray]
    rows: Mapping[int, LevelRows]
    held_out: BoolArray
    levels: Mapping[int, LevelIndex] | None = None
    items: RowArray | None = None
    answers: Answers | None = None
    encode_ms: Sequence[float] = ()
    own_rows: RowArray | None = None

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

    @property
    def finest(self) -> LevelRows:
        """Rows of the finest level."""
        return self.rows[max(self.rows)]

    @property
    def finest_queries(self) -> FloatArray:
        """Queries of the finest level, (n, dim) float32."""
        return self.queries[max(self.rows)]

    def folds(self, count: int) -> RowArray:
        """(n,) int64 from 0 to count - 1: queries of one item are in the same fold."""
        if self.items is None:
            return np.arange(self.count, dtype=np.int64) % count
        place: RowArray = np.unique(self.items, return_inverse=True)[1].astype(np.int64)
        return place % count

"""What was measured of one direction, block by block, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hivlp.index.candidates import RowArray
from hivlp.index.evaluation.counting import Counts
from hivlp.index.evaluation.measure import Measured, Scored, Stages
from hivlp.models.levels import Modality

EARLY = "early exit"


@dataclass(slots=True)
class Tally:
    """Every query of one direction; `left_out` had no right row to find.

    `keeps` are the widths of the plans, `threshold` that of the early exit (None: there is none).
    """

    query: Modality
    searched: Modality
    rows: int
    keeps: dict[str, tuple[int, ...]]
    threshold: float | None = None
    left_out: int = 0
    _parts: list[tuple[int, Measured]] = field(default_factory=list)

    @property
    def direction(self) -> tuple[Modality, Modality]:
        """(query, searched)"""
        return self.query, self.searched

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    def add(self, measured: Measured, fold: int) -> None:
        """One more block, of one fold."""
        # What a plan found was written or re-ranked by now, and would only be kept.
        self._parts.append((fold, measured.without_rows()))

    @property
    def rows_asked(self) -> RowArray:
        """The rows that the queries are, in the side of their own modality: (n,)."""
        return np.concatenate([part.rows for _, part in self._parts])

    @property
    def items(self) -> RowArray:
        """The items that the queries belong to: (n,)."""
        return np.concatenate([part.items for _, part in self._parts])

    @property
    def folds(self) -> RowArray:
        """The fold that each query was measured in: (n,)."""
        each = [np.full(len(part), fold, dtype=np.int64) for fold, part in self._parts]
        return np.concatenate(each)

    @property
    def stages(self) -> Stages | None:
        """The cascade that may stop early, over all queries."""
        parts = [part.stages for _, part in self._parts if part.stages is not None]
        if not parts:
            return None
        return Stages(
            parts[0].levels,
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.ann for part in parts]),
            np.concatenate([part.confidence for part in parts]),
        )

    @property
    def systems(self) -> dict[str, Scored]:
        """Every system over all queries: levels, plans, what was re-ranked, the early exit."""
        parts = [self.systems_of(part) for _, part in self._parts]
        return {
            name: Scored(
                np.concatenate([part[name].ranks for part in parts]),
                np.concatenate([part[name].ann for part in parts]),
            )
            for name in (parts[0] if parts else ())
        }

    def systems_of(self, measured: Measured) -> dict[str, Scored]:
        """Every system over one block of queries."""
        found = dict(measured.systems)
        stages = measured.stages
        if stages is not None and self.threshold is not None:
            found[EARLY] = stages.at(stages.stopped(self.threshold))
        return found

    @property
    def tops(self) -> Mapping[int, Mapping[int, Counts]]:
        """Ranks at a level of the exact top 10, by level and gallery size: (n, k); not of folds."""
        if not self._parts or any(fold for fold, _ in self._parts):
            return {}
        first = self._parts[0][1].tops
        return {
            level: {
                size: np.concatenate([part.tops[level][size] for _, part in self._parts])
                for size in sizes
            }
            for level, sizes in first.items()
        }

"""What queries are measured against: one side of a version, or one fold of it.

A fold is so many items in a row, in the corpus's order, with all their captions. It has no index of
its own, so its rows are scanned exactly, at the widths of the whole version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hivlp.index.backends.choose import open_level
from hivlp.index.backends.rows import LevelRows
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest, Stage, run_stage
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import make_plan, stage_query
from hivlp.models.levels import FloatArray, Modality

WHOLE = slice(0, None)


class Gallery:
    """A side's rows, numbered from 0, and plans over them.

    `rows` are those of each level, `groups` (N,) int64 what they belong to, and `first` is the
    number that row 0 has in the side.
    """

    def __init__(
        self,
        searcher: LocalSearcher,
        searched: Modality,
        groups: RowArray,
        part: slice = WHOLE,
    ) -> None:
        """`groups` (items,): items of one number are right for each other; `part` of the rows."""
        side = searcher.snapshot.sides[searched]
        self.searched: Modality = searched
        self.searcher = searcher
        self.first: int = part.start
        self.rows: Mapping[int, LevelRows] = {n: rows.part(part) for n, rows in side.rows.items()}
        self.groups: RowArray = groups[side.row_items[part]]
        self._order = np.argsort(self.groups, kind="stable").astype(np.int64)
        self._sorted = self.groups[self._order]

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.groups)

    @property
    def finest(self) -> int:
        """The finest level."""
        return max(self.rows)

    @property
    def indexed(self) -> bool:
        """Whether it has an index, with plans that may stop early."""
        return True

    def right_rows(self, group: int, own: int) -> RowArray:
        """Rows of a group, ascending, but for the query's own (-1: it has none here)."""
        begin, end = np.searchsorted(self._sorted, [group, group + 1])
        found: RowArray = self._order[begin:end]
        others: RowArray = found[found != own]
        return others

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for a request. Raises PlanError."""
        return self.searcher.plan(request)

    def step(
        self, stage: Stage, queries: FloatArray, previous: Sequence[Candidates] | None
    ) -> list[Candidates]:
        """What one stage of a plan finds for n queries, (n, dim of stage.level) float32."""
        return self.searcher.step(self.searched, stage, queries, previous)

    def trace(self, plan: Plan, outputs: Mapping[int, FloatArray]) -> list[list[Candidates]]:
        """What every stage of a plan finds for n fully encoded queries: stages, then queries."""
        found: list[list[Candidates]] = []
        previous: list[Candidates] | None = None
        for stage in plan.stages:
            query = stage_query(stage, outputs, self.rows[stage.level].dim)
            previous = self.step(stage, query, previous)
            found.append(previous)
        return found


class FoldGallery(Gallery):
    """The rows of some items in a row: `items` says which, by their place in the catalogue."""

    def __init__(
        self, searcher: LocalSearcher, searched: Modality, groups: RowArray, items: slice
    ) -> None:
        row_items = searcher.snapshot.sides[searched].row_items
        begin, end = np.searchsorted(row_items, [items.start, items.stop]).tolist()
        super().__init__(searcher, searched, groups, slice(begin, end))
        self._levels = {n: open_level(n, rows, None, "numpy") for n, rows in self.rows.items()}

    @property
    def indexed(self) -> bool:
        """No: when to stop early was not measured on a fold."""
        return False

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for a request over the fold's rows. Raises PlanError."""
        snapshot = self.searcher.snapshot
        needed = snapshot.sides[self.searched].rows_needed(request.need)
        return make_plan(
            request,
            snapshot.manifest.specs,
            snapshot.manifest.width_table("scan"),
            self.size,
            gallery=snapshot.manifest.gallery,
            rows_needed=min(needed, self.size),
        )

    def step(
        self, stage: Stage, queries: FloatArray, previous: Sequence[Candidates] | None
    ) -> list[Candidates]:
        """What one stage of a plan finds for n queries, (n, dim of stage.level) float32."""
        return run_stage(self._levels, stage, queries, previous)

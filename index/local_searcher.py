"""The `Searcher` of one process: an opened snapshot, searched in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hivlp.index.backends.choose import open_level
from hivlp.index.backends.exact import best_rows_in_turns
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest, Stage, run_stage
from hivlp.index.errors import NoSuchItem
from hivlp.index.filters import Expression
from hivlp.index.level_index import LevelIndex
from hivlp.index.masks import BoolArray, Mask, RowMask
from hivlp.index.plans import make_plan
from hivlp.index.searcher import FoundItem, SnapshotInfo, StoredStates
from hivlp.index.snapshot.side import Side
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.levels import FloatArray, Modality

FEW = 5_000
"""Up to so many allowed rows are scored at the finest level, without a cascade."""


class LocalSearcher:
    """Searches one open snapshot; closing it closes the snapshot. Safe for several threads."""

    def __init__(self, snapshot: Snapshot, query_encoder: str | None = None) -> None:
        """`query_encoder` is that of the model that will query (None: that it was measured with).

        Another one's early outputs mean something else: then no cascade stops early.
        """
        self.snapshot = snapshot
        measured = query_encoder in (None, snapshot.manifest.query_encoder)
        self._widths = snapshot.manifest.width_table("scan")
        self._beams = snapshot.manifest.width_table("graph")
        self._exits = snapshot.manifest.exit_rules() if measured else {}
        self._auto = snapshot.manifest.served_plans()
        self._info = _info(snapshot)

    @property
    def info(self) -> SnapshotInfo:
        """The snapshot this searcher belongs to."""
        return self._info

    def close(self) -> None:
        """Close the snapshot."""
        self.snapshot.close()

    def plan(self, request: PlanRequest, *, allowed: int | None = None) -> Plan:
        """Widths and methods for a request; `need` counts items. Raises PlanError.

        `allowed`: the plan will run under a mask of so many rows, so its first stage is a scan; a
        few rows are scored at the finest level at once.
        """
        side = self._side(request.searched)
        needed = side.rows_needed(request.need) if side and request.need > 0 else None
        return self.plan_over(request, side.size if side else 0, needed, allowed=allowed)

    def plan_over(
        self, request: PlanRequest, rows: int, needed: int | None, *, allowed: int | None = None
    ) -> Plan:
        """As `plan`, for a search of `rows` rows in all, of which the side's own are a part.

        `needed` of the best are sure to hold `request.need` items. Raises PlanError.
        """
        side = self._side(request.searched)
        direction = (request.searched, request.query)
        masked = allowed is not None
        return make_plan(
            request,
            self._info.levels,
            self._widths,
            rows,
            gallery=self._info.gallery,
            rows_needed=needed,
            graphs=self._beams if side and side.graphs and not masked else None,
            auto=self._auto.get(direction, "cascade"),
            # Under a mask the scores mean something else: what was measured doesn't hold there.
            exits=None if masked else self._exits.get(direction),
            few=allowed is not None and allowed <= FEW,
            share=1.0 if allowed is None else allowed / max(rows, 1),
        )

    def mask(self, searched: Modality, expression: Expression) -> RowMask:
        """The rows of a side whose items a filter allows. Raises FilterError."""
        side = self._side(searched)
        row_items = np.empty(0, np.int64) if side is None else side.row_items
        return self.snapshot.filters.rows(expression, searched, row_items)

    def step(
        self,
        searched: Modality,
        stage: Stage,
        queries: FloatArray,
        previous: Sequence[Candidates] | None,
        *,
        mask: Mask | None = None,
    ) -> list[Candidates]:
        """Run one stage for n queries, (n, dim of stage.level) float32.

        `mask` says which rows the first stage may find, and every walk of a graph (None: all). A
        mask that hides much needs a plan that was made for it.
        Where level 1's codes take no mask, its second codes are searched, or, in an index that has
        none, the rows they stand for: exactly, and slower.
        A side without rows finds nothing. Raises InputError for NaN, Inf or a wrong shape.
        """
        side = self._side(searched)
        if side is None:
            return [Candidates.none() for _ in queries]
        assert mask is None or isinstance(mask, RowMask), type(mask)
        levels = side.levels
        scans = stage.method == "scan"
        if mask is not None and scans and not levels[stage.level].capabilities.mask:
            levels = {**levels, stage.level: _maskable(side, stage.level)}
        return run_stage(levels, stage, queries, previous, graphs=side.graphs, mask=mask)

    def exact(
        self,
        searched: Modality,
        query: FloatArray,
        keep: int,
        between: Callable[[], None],
        *,
        mask: Mask | None = None,
    ) -> Candidates:
        """Exhaustive search of the finest rows by a query (dim,) float32, in turns."""
        side = self._side(searched)
        if side is None:
            return Candidates.none()
        assert mask is None or isinstance(mask, RowMask), type(mask)
        rows = side.rows[self._info.levels[-1].level]
        return best_rows_in_turns(rows, query, keep, between, mask)

    def items(self, searched: Modality, found: Candidates, k: int, offset: int) -> list[FoundItem]:
        """The best row of each item, skipping `offset` items, at most `k`."""
        side = self._side(searched)
        if side is None or not len(found):
            return []
        ordinals = self.ordinals(searched, found.rows)
        first = np.sort(np.unique(ordinals, return_index=True)[1])[offset : offset + k]
        ids = self.snapshot.catalogue.ids(ordinals[first])
        rows = found.rows[first].tolist()
        scores = found.scores[first].tolist()
        return [
            FoundItem(item_id, row, score, self.text(searched, row))
            for item_id, row, score in zip(ids, rows, scores, strict=True)
        ]

    def ordinals(self, searched: Modality, rows: RowArray) -> RowArray:
        """The items of given rows, by their place in the catalogue."""
        side = self._side(searched)
        return rows[:0] if side is None else side.row_items.take(rows)

    def text(self, searched: Modality, row: int) -> str | None:
        """The text of a row; None on the image side."""
        side = self._side(searched)
        return None if side is None or side.texts is None else str(side.texts[row].as_py())

    def takes_mask(self, searched: Modality, stage: Stage) -> bool:
        """Whether what a stage searches takes a mask itself, without another index beside it."""
        side = self._side(searched)
        if side is None:
            return True
        levels = side.graphs if stage.method == "graph" else side.levels
        return levels[stage.level].capabilities.mask

    def most_rows(self, searched: Modality, items: int) -> RowArray:
        """Rows of the `items` items that have the most, most first."""
        side = self._side(searched)
        if side is None or items < 1:
            return np.empty(0, np.int64)
        head = side.rows_for_items[: items + 1]
        return np.diff(head if len(head) > items else np.append(head, side.size + 1))

    def row_of(self, item_id: str, modality: Modality) -> int:
        """First row of an item. Raises NoSuchItem where it has none of this modality."""
        ordinal = self.snapshot.catalogue.ordinal(item_id)
        side = self._side(modality)
        if side is not None:
            row = int(np.searchsorted(side.row_items, ordinal))
            if row < side.size and int(side.row_items[row]) == ordinal:
                return row
        raise NoSuchItem(item_id)

    def vector(self, modality: Modality, row: int, level: int) -> FloatArray:
        """(1, dim) float32: the unit gallery vector of a row at a level."""
        return self.snapshot.sides[modality].rows[level].vectors(np.array([row]))

    def explain(
        self, searched: Modality, queries: Mapping[int, FloatArray], rows: RowArray
    ) -> dict[int, FloatArray]:
        """Scores of `rows` at every level of `queries` (level -> (1, dim)): level -> (m,)."""
        side = self._side(searched)
        if side is None:
            return {level: np.empty(0, np.float32) for level in queries}
        return {level: side.rows[level].score(query[0], rows) for level, query in queries.items()}

    def metadata(
        self, item_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Metadata of items, all columns or the named ones. Raises NoSuchItem, PlanError."""
        return self.snapshot.catalogue.metadata(item_ids, names)

    def stored_states(self, rows: RowArray) -> StoredStates | None:
        """States of rows of the image side; None where the version keeps none at all.

        A row whose first token is all zeros has none: nothing was encoded, or it was erased.
        """
        side, record = self._side("image"), self.snapshot.manifest.states
        if side is None or side.states is None or record is None:
            return None
        states = side.states.take(rows, axis=0).reshape(len(rows), record.tokens, record.width)
        known: BoolArray = np.any(states[:, 0], axis=1)
        return StoredStates(record.space, known, states[known])

    def image_ref(self, item_id: str) -> str | None:
        """The picture's reference as the corpus gave it, or None. Raises NoSuchItem."""
        return self.snapshot.catalogue.image_ref(item_id)

    def _side(self, modality: Modality) -> Side | None:
        return self.snapshot.sides.get(modality)


def _maskable(side: Side, level: int) -> LevelIndex:
    """What is searched in place of codes that take no mask."""
    if level == 1 and side.maskable is not None:
        return side.maskable
    return open_level(level, side.rows[level], None, "numpy")


def _info(snapshot: Snapshot) -> SnapshotInfo:
    manifest = snapshot.manifest
    return SnapshotInfo(
        index=manifest.index,
        version=manifest.version,
        gallery_space=manifest.gallery_space,
        gallery=manifest.gallery,
        model=manifest.model,
        levels=manifest.specs,
        items=manifest.items,
        rows={side: record.rows for side, record in manifest.sides.items()},
        created_at=manifest.created_at,
        rotation=snapshot.rotation,
    )

"""The `Searcher` of a version with changes: its built levels, and the delta beside them.

Every stage runs over both. The built rows are searched as ever, without those that are hidden; the
rows of the delta exhaustively; what both found goes on together, and neither pushes the other out
before the end: entry rows of a graph are built rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cachetools import LRUCache

from hivlp.index.candidates import Candidates, RowArray, merged
from hivlp.index.cascade import Plan, PlanRequest, Stage
from hivlp.index.delta_filters import DeltaFilters
from hivlp.index.errors import NoSuchItem, PlanError
from hivlp.index.filters import Expression
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.masks import BoolArray, Mask, RowMask
from hivlp.index.searcher import FoundItem, SnapshotInfo, StoredStates
from hivlp.index.snapshot.delta import Delta
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.levels import FloatArray, Modality

KEPT_MASKS = 16
SLACK = 64
"""Up to so many hidden rows are fetched besides, where a level's codes take no mask."""


@dataclass(frozen=True, slots=True)
class AmendedMask:
    """Rows that a filter allows: of the built ones, and of each part of the delta."""

    built: RowMask
    parts: tuple[BoolArray, ...]
    size: int
    count: int


class AmendedSearcher:
    """Searches one open snapshot that has changes. Safe for several threads."""

    def __init__(self, snapshot: Snapshot, delta: Delta, query_encoder: str | None = None) -> None:
        """`query_encoder` as for `LocalSearcher`."""
        self.snapshot = snapshot
        self._delta = delta
        self._built = LocalSearcher(snapshot, query_encoder)
        self._filters = DeltaFilters(snapshot, delta)
        self._lock = threading.Lock()
        self._masks: LRUCache[tuple[Modality, bytes], AmendedMask] = LRUCache(KEPT_MASKS)
        info = self._built.info
        sides = {side: delta.live_rows(side) for side in delta.parts}
        rows = {side: count for side, count in sides.items() if count}
        self._info = replace(info, items=delta.live_items, rows=rows)

    @property
    def info(self) -> SnapshotInfo:
        """The snapshot this searcher belongs to; counts are of what can be found."""
        return self._info

    def close(self) -> None:
        """Close the snapshot."""
        self.snapshot.close()

    def plan(self, request: PlanRequest, *, allowed: int | None = None) -> Plan:
        """As `LocalSearcher.plan`, over built and changed rows together. Raises PlanError."""
        rows = self._delta.rows(request.searched)
        return self._built.plan_over(
            request, rows, self._rows_needed(request.searched, request.need), allowed=allowed
        )

    def mask(self, searched: Modality, expression: Expression) -> Mask:
        """The rows of a side whose items a filter allows. Raises FilterError."""
        key = (searched, expression.key)
        with self._lock:
            kept = self._masks.get(key)
        if kept is None:
            kept = self._mask(searched, expression)
            with self._lock:
                self._masks[key] = kept
        return kept

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

        Up to `stage.keep` built rows and as many of the delta come back, best first. `mask` must
        come from `mask` of this searcher. Raises InputError for NaN, Inf or a wrong shape.
        """
        assert mask is None or isinstance(mask, AmendedMask), type(mask)
        split = None if previous is None else [self._split(searched, some) for some in previous]
        before = None if split is None else [built for built, _ in split]
        built = self._built_step(searched, stage, queries, before, mask)
        found = []
        for i, query in enumerate(queries):
            own = None if split is None else split[i][1]
            found.append(merged([built[i], self._delta_step(searched, stage, query, own, mask)],
                                2 * stage.keep))  # fmt: skip
        return found

    def exact(
        self,
        searched: Modality,
        query: FloatArray,
        keep: int,
        between: Callable[[], None],
        *,
        mask: Mask | None = None,
    ) -> Candidates:
        """Exhaustive search of the finest level by a query (dim,) float32, in turns."""
        assert mask is None or isinstance(mask, AmendedMask), type(mask)
        alive = self._delta.alive(searched) if mask is None else mask.built
        built = self._built.exact(searched, query, keep, between, mask=alive)
        finest = self._info.levels[-1].level
        allowed = None if mask is None else mask.parts
        delta = self._delta.search(searched, finest, query, keep, allowed)
        return merged((built, delta), keep)

    def items(self, searched: Modality, found: Candidates, k: int, offset: int) -> list[FoundItem]:
        """The best row of each item, skipping `offset` items, at most `k`."""
        if not len(found):
            return []
        ordinals = self._ordinals(searched, found.rows)
        first = np.sort(np.unique(ordinals, return_index=True)[1])[offset : offset + k]
        return [
            FoundItem(
                self._id(int(ordinals[i])),
                int(found.rows[i]),
                float(found.scores[i]),
                self._text(searched, int(found.rows[i])),
            )
            for i in first
        ]

    def row_of(self, item_id: str, modality: Modality) -> int:
        """First row of an item. Raises NoSuchItem where it has none of this modality."""
        place = self._delta.place(item_id)
        if place is None:
            return self._built.row_of(item_id, modality)
        row = None if self._delta.gone(place) else self._delta.row_of(modality, place)
        if row is None:
            raise NoSuchItem(item_id)
        return row

    def vector(self, modality: Modality, row: int, level: int) -> FloatArray:
        """(1, dim) float32: the unit gallery vector of a row at a level."""
        if row < self._delta.built_rows(modality):
            return self._built.vector(modality, row, level)
        return self._delta.vectors(modality, level, row)

    def explain(
        self, searched: Modality, queries: Mapping[int, FloatArray], rows: RowArray
    ) -> dict[int, FloatArray]:
        """Scores of `rows` at every level of `queries` (level -> (1, dim)): level -> (m,)."""
        past = rows >= self._delta.built_rows(searched)
        built = self._built.explain(searched, queries, rows[~past])
        found = {}
        for level, query in queries.items():
            scores = np.empty(len(rows), np.float32)
            scores[~past] = built[level]
            scores[past] = self._delta.scores(searched, level, query[0], rows[past])
            found[level] = scores
        return found

    def metadata(
        self, item_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Metadata of items, all columns or the named ones. Raises NoSuchItem, PlanError."""
        own, known = self.snapshot.catalogue.metadata_names, self._filters.names
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise PlanError(
                f"no metadata column {unknown[0]!r}; there are {sorted(known)}",
                param="with_metadata",
            )
        built = None if names is None else [name for name in names if name in own]
        return [self._metadata(item_id, names, built) for item_id in item_ids]

    def stored_states(self, rows: RowArray) -> StoredStates | None:
        """States of built rows; changed items have none. None where the version keeps none."""
        built = rows < self._delta.built_rows("image")
        found = self._built.stored_states(rows[built])
        if found is None:
            return None
        known = np.zeros(len(rows), np.bool_)
        known[built] = found.known
        return replace(found, known=known)

    def image_ref(self, item_id: str) -> str | None:
        """The picture's reference, or None. Raises NoSuchItem."""
        place = self._delta.place(item_id)
        if place is None:
            return self._built.image_ref(item_id)
        if self._delta.gone(place):
            raise NoSuchItem(item_id)
        return self._delta.segments[place.segment].image(place.item)

    def _metadata(
        self, item_id: str, names: Sequence[str] | None, built: Sequence[str] | None
    ) -> dict[str, Any]:
        place = self._delta.place(item_id)
        if place is None:
            return self._built.metadata([item_id], built)[0]
        if self._delta.gone(place):
            raise NoSuchItem(item_id)
        values = self._filters.values(place)
        return values if names is None else {n: values[n] for n in names if n in values}

    def _built_step(
        self,
        searched: Modality,
        stage: Stage,
        queries: FloatArray,
        before: Sequence[Candidates] | None,
        mask: AmendedMask | None,
    ) -> list[Candidates]:
        """The stage over built rows; nothing hidden is found."""
        if mask is not None:
            return self._built.step(searched, stage, queries, before, mask=mask.built)
        alive = self._delta.alive(searched)
        if alive is None or stage.method == "rescore":
            return self._built.step(searched, stage, queries, before)
        hidden = alive.size - alive.count
        if hidden <= SLACK and not self._built.takes_mask(searched, stage):
            wider = replace(stage, keep=stage.keep + hidden)
            found = self._built.step(searched, wider, queries, before)
            return [_only(some, alive.allowed, stage.keep) for some in found]
        return self._built.step(searched, stage, queries, before, mask=alive)

    def _delta_step(
        self,
        searched: Modality,
        stage: Stage,
        query: FloatArray,
        previous: RowArray | None,
        mask: AmendedMask | None,
    ) -> Candidates:
        """The stage over the delta's rows: a graph's later walks only score what was found."""
        if previous is None:
            allowed = None if mask is None else mask.parts
            return self._delta.search(searched, stage.level, query, stage.keep, allowed)
        return self._delta.score(searched, stage.level, query, previous).top(stage.keep)

    def _split(self, searched: Modality, found: Candidates) -> tuple[Candidates, RowArray]:
        """The built rows of candidates, and the others."""
        past = found.rows >= self._delta.built_rows(searched)
        if not past.any():
            return found, found.rows[:0]
        return Candidates(found.rows[~past], found.scores[~past]), found.rows[past]

    def _mask(self, searched: Modality, expression: Expression) -> AmendedMask:
        built, parts = self._filters.rows(searched, expression)
        alive = self._delta.alive(searched)
        if alive is not None:
            built = RowMask.of(built.allowed & alive.allowed)
        live = [part.live for part in self._delta.parts[searched]]
        count = built.count + sum(int((p & a).sum()) for p, a in zip(parts, live, strict=True))
        return AmendedMask(built, parts, self._delta.rows(searched), count)

    def _rows_needed(self, searched: Modality, items: int) -> int:
        """How many of the best rows are sure to hold `items` items, where there are as many.

        The worst case takes the items with the most rows, built or changed, first.
        """
        if items < 1:
            return 0
        most = np.concatenate(
            [self._built.most_rows(searched, items - 1), self._delta.counts(searched)]
        )
        return int(np.sort(most)[::-1][: items - 1].sum()) + 1

    def _ordinals(self, searched: Modality, rows: RowArray) -> RowArray:
        past = rows >= self._delta.built_rows(searched)
        found = np.empty(len(rows), np.int64)
        found[~past] = self._built.ordinals(searched, rows[~past])
        found[past] = self._delta.ordinals(searched, rows[past])
        return found

    def _id(self, ordinal: int) -> str:
        if ordinal < len(self.snapshot.catalogue):
            return self.snapshot.catalogue.ids(np.array([ordinal]))[0]
        segment, place = self._delta.located(ordinal)
        return segment.ids[place]

    def _text(self, searched: Modality, row: int) -> str | None:
        if searched != "text":
            return None
        if row < self._delta.built_rows("text"):
            return self._built.text(searched, row)
        return self._delta.text(row)


def _only(found: Candidates, allowed: BoolArray, keep: int) -> Candidates:
    able = allowed[found.rows]
    return Candidates(found.rows[able], found.scores[able]).top(keep)

"""What the changes of a version come to: items beside the built ones, and which of those to hide.

Items of the delta are numbered on from the built ones, and so are its rows on each side, segment
after segment. It is searched exhaustively: it is small, and the next build folds it in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.candidates import Candidates, RowArray, merged
from hivlp.index.masks import BoolArray, RowMask
from hivlp.index.snapshot.catalogue import Catalogue
from hivlp.index.snapshot.changes import Segment, SegmentSide
from hivlp.models.levels import FloatArray, Modality

SIDES: tuple[Modality, ...] = ("image", "text")
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the last change of an id stands."""

    segment: int
    item: int


@dataclass(frozen=True, slots=True)
class Part:
    """One segment's rows of one side: `first` is the number of its first row, `live` (n,) bool."""

    segment: int
    first: int
    rows: SegmentSide
    live: BoolArray

    @property
    def end(self) -> int:
        """One more than the number of its last row."""
        return self.first + self.rows.size


class Delta:
    """The changes of one version over its built items. Read-only, safe for several threads."""

    def __init__(
        self,
        segments: Sequence[Segment],
        catalogue: Catalogue,
        row_items: Mapping[Modality, RowArray],
        erased: RowArray = _NOTHING,
    ) -> None:
        """`row_items` are the items of the built rows of each side, ascending; `erased` built items
        of which nothing is left but their place.
        """
        self.segments = tuple(segments)
        self._built_items = len(catalogue)
        self._row_items = row_items
        self._live = _live(segments)
        self._starts = np.cumsum([0, *(segment.size for segment in segments)])
        replaced = [_replaced(segment, catalogue) for segment in segments]
        self.hidden_items = np.unique(np.concatenate([erased, *replaced]))
        self.parts = {side: self._parts(side) for side in SIDES}

    @property
    def items(self) -> int:
        """How many items it holds."""
        return sum(int(np.count_nonzero(live)) for live in self._live)

    @property
    def live_items(self) -> int:
        """How many items there are, built ones included."""
        return self._built_items - len(self.hidden_items) + self.items

    def place(self, item_id: str) -> Place | None:
        """The last change of an id, or None where it was never changed."""
        for number in range(len(self.segments) - 1, -1, -1):
            item = self.segments[number].places.get(item_id)
            if item is not None:
                return Place(number, item)
        return None

    def gone(self, place: Place) -> bool:
        """Whether a change says that its item is there no longer."""
        return bool(self.segments[place.segment].deleted[place.item])

    def built_rows(self, side: Modality) -> int:
        """Rows of the levels of a side, hidden ones included."""
        return len(self._row_items.get(side, ()))

    def rows(self, side: Modality) -> int:
        """Rows of a side in all, whatever is hidden: the number after the last row's."""
        parts = self.parts[side]
        return parts[-1].end if parts else self.built_rows(side)

    def live_rows(self, side: Modality) -> int:
        """Rows of a side that can be found."""
        alive = self.alive(side)
        built = self.built_rows(side) if alive is None else alive.count
        return built + sum(int(part.live.sum()) for part in self.parts[side])

    def alive(self, side: Modality) -> RowMask | None:
        """The built rows that are not hidden; None where none is."""
        return self._alive.get(side)

    @cached_property
    def _alive(self) -> dict[Modality, RowMask]:
        found: dict[Modality, RowMask] = {}
        for side, row_items in self._row_items.items():
            rows = rows_of(self.hidden_items, row_items)
            if len(rows):
                allowed = np.ones(len(row_items), np.bool_)
                allowed[rows] = False
                found[side] = RowMask.of(allowed)
        return found

    def search(
        self,
        side: Modality,
        level: int,
        query: FloatArray,
        keep: int,
        allowed: Sequence[BoolArray] | None = None,
    ) -> Candidates:
        """The best `keep` rows for one query (dim,) float32; `allowed` (None: all), one a part."""
        found = []
        for place, part in enumerate(self.parts[side]):
            able = part.live if allowed is None else part.live & allowed[place]
            rows = np.flatnonzero(able)
            if len(rows):
                scores = part.rows.rows[level].scan(query)[rows]
                found.append(Candidates.ranked(rows + part.first, scores, keep))
        return merged(found, keep)

    def score(self, side: Modality, level: int, query: FloatArray, rows: RowArray) -> Candidates:
        """Score given rows of the delta for one query (dim,) float32: all of them, best first."""
        return Candidates.ranked(rows, self.scores(side, level, query, rows), len(rows))

    def scores(self, side: Modality, level: int, query: FloatArray, rows: RowArray) -> FloatArray:
        """Scores of given rows, in their order: (m,) float32."""
        scores = np.empty(len(rows), np.float32)
        for part in self.parts[side]:
            own = (rows >= part.first) & (rows < part.end)
            if own.any():
                scores[own] = part.rows.rows[level].score(query, rows[own] - part.first)
        return scores

    def vectors(self, side: Modality, level: int, row: int) -> FloatArray:
        """(1, dim) float32: the unit vector of one row."""
        part = self.part(side, row)
        return part.rows.rows[level].vectors(np.array([row - part.first]))

    def part(self, side: Modality, row: int) -> Part:
        """The part that a row lies in."""
        return next(part for part in self.parts[side] if part.first <= row < part.end)

    def ordinals(self, side: Modality, rows: RowArray) -> RowArray:
        """Numbers of the items of given rows of the delta, beyond the built ones."""
        found = np.empty(len(rows), np.int64)
        for part in self.parts[side]:
            own = (rows >= part.first) & (rows < part.end)
            owners = part.rows.owners[rows[own] - part.first]
            found[own] = owners + self._built_items + int(self._starts[part.segment])
        return found

    def located(self, ordinal: int) -> tuple[Segment, int]:
        """The segment of an item of the delta, and its place in it."""
        past = ordinal - self._built_items
        segment = int(np.searchsorted(self._starts, past, side="right")) - 1
        return self.segments[segment], past - int(self._starts[segment])

    def text(self, row: int) -> str:
        """The text of a row of the text side."""
        part = self.part("text", row)
        return part.rows.texts[row - part.first]

    def row_of(self, side: Modality, place: Place) -> int | None:
        """First row of an item on a side; None where it has none."""
        for part in self.parts[side]:
            if part.segment == place.segment:
                at = int(np.searchsorted(part.rows.owners, place.item))
                if at < part.rows.size and int(part.rows.owners[at]) == place.item:
                    return part.first + at
        return None

    def counts(self, side: Modality) -> RowArray:
        """Rows of each item of the delta that has any on this side."""
        found = [np.bincount(part.rows.owners[part.live], minlength=1) for part in self.parts[side]]
        counts = np.concatenate(found) if found else np.empty(0, np.int64)
        return counts[counts > 0].astype(np.int64)

    def _parts(self, side: Modality) -> tuple[Part, ...]:
        parts = []
        first = self.built_rows(side)
        for number, segment in enumerate(self.segments):
            own = segment.sides.get(side)
            if own is not None:
                parts.append(Part(number, first, own, self._live[number][own.owners]))
                first += own.size
        return tuple(parts)


def _live(segments: Sequence[Segment]) -> list[BoolArray]:
    """For each segment, which of its changes are the last of their id, and no deletion."""
    found: list[BoolArray] = []
    later: list[Any] = []
    for segment in reversed(segments):
        live = ~segment.deleted
        if later:
            again = pc.is_in(segment.id_column, value_set=pa.concat_arrays(later))
            live &= ~again.to_numpy(zero_copy_only=False)
        found.insert(0, live)
        later.append(segment.id_column)
    return found


def _replaced(segment: Segment, catalogue: Catalogue) -> RowArray:
    """Built items that a segment replaces or deletes; looked up once, it is over one catalogue."""
    known: RowArray | None = segment.lazy.get("replaced")
    if known is None:
        known = segment.lazy["replaced"] = catalogue.known(segment.ids, segment.hashes)
    return known


def rows_of(items: RowArray, row_items: RowArray) -> RowArray:
    """The rows of given items; both are ascending."""
    begins = np.searchsorted(row_items, items, side="left")
    ends = np.searchsorted(row_items, items, side="right")
    if not len(items):
        return np.empty(0, np.int64)
    lengths = ends - begins
    offsets = np.repeat(begins - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets

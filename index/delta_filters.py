"""Filters over a version with changes: the built items' coded columns, and one set a segment.

A column may be in some of the places only: a changed item may bring a new one. Where it isn't, no
item has a value of it. A segment's columns are made when a filter first asks, once a segment.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from typing import Any, cast

import numpy as np
import pyarrow as pa

from hivlp.index.candidates import RowArray
from hivlp.index.filter_masks import FilterMasks
from hivlp.index.filters import Expression
from hivlp.index.masks import BoolArray, RowMask
from hivlp.index.snapshot.changes import Segment
from hivlp.index.snapshot.coded import CodedColumn, code_column
from hivlp.index.snapshot.coded_files import Kind, kind_of
from hivlp.index.snapshot.delta import Delta, Place
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.levels import Modality

NO_ROWS: RowArray = np.empty(0, np.int64)
_MAKING = threading.Lock()


class DeltaFilters:
    """Answers filters of one version. Safe for several threads."""

    def __init__(self, snapshot: Snapshot, delta: Delta) -> None:
        changes = snapshot.manifest.changes
        own = changes.columns if changes is not None else {}
        self._snapshot = snapshot
        self._delta = delta
        self._types = column_types(snapshot)
        self._row_items = {side: one.row_items for side, one in snapshot.sides.items()}
        self._kinds = {name: cast(Kind, kind) for name, kind in own.items()}
        self._kinds |= {name: kind_of(kind) for name, kind in self._types.items()}

    @property
    def names(self) -> Collection[str]:
        """The columns of the index, built ones and those that changes brought."""
        return self._kinds.keys()

    def values(self, place: Place) -> dict[str, Any]:
        """Metadata of an item of the delta."""
        return self._delta.segments[place.segment].metadata(place.item)

    def rows(
        self, searched: Modality, expression: Expression
    ) -> tuple[RowMask, tuple[BoolArray, ...]]:
        """Rows that a filter allows: of the built ones, and (n,) bool for each part of the delta.

        Raises FilterError for a column that neither has, or one asked for what it isn't.
        """
        row_items = self._row_items.get(searched, NO_ROWS)
        absent = _absent(self._kinds, len(self._snapshot.catalogue))
        built = self._snapshot.filters.rows(expression, searched, row_items, absent)
        parts = []
        for part in self._delta.parts[searched]:
            segment = self._delta.segments[part.segment]
            masks = _masks(segment, self._types)
            own = masks.rows(
                expression, searched, part.rows.owners, _absent(self._kinds, segment.size)
            )
            parts.append(own.allowed)
        return built, tuple(parts)


def column_types(snapshot: Snapshot) -> dict[str, Any]:
    """The Arrow type of each metadata column of the built items."""
    schema = snapshot.catalogue.table.schema
    return {name: schema.field(name).type for name in snapshot.catalogue.metadata_names}


def columns_of(segment: Segment, types: Mapping[str, Any]) -> Mapping[str, CodedColumn]:
    """The coded columns of a segment's items, made once; `types` are those of the built items."""
    with _MAKING:
        known: Mapping[str, CodedColumn] | None = segment.lazy.get("columns")
        if known is None:
            places: dict[str, list[int]] = {}
            values: dict[str, list[Any]] = {}
            for place in range(segment.size):
                for name, value in segment.metadata(place).items():
                    places.setdefault(name, []).append(place)
                    values.setdefault(name, []).append(value)
            known = {
                name: _coded(segment, name, places[name], values[name], types)
                for name in sorted(places)
            }
            segment.lazy["columns"] = known
    return known


def _coded(
    segment: Segment,
    name: str,
    places: Sequence[int],
    values: list[Any],
    types: Mapping[str, Any],
) -> CodedColumn:
    """One column of all items of a segment, from the values of those that have one."""
    taken = np.full(segment.size, -1, np.int64)
    taken[places] = np.arange(len(places))
    array = _array(values, name, types).take(pa.array(taken, mask=taken < 0))
    return code_column(name, pa.chunked_array([array]))


def _masks(segment: Segment, types: Mapping[str, Any]) -> FilterMasks:
    columns = columns_of(segment, types)
    masks: FilterMasks = segment.lazy.setdefault("masks", FilterMasks(columns, segment.size))
    return masks


def _array(values: list[Any], name: str, types: Mapping[str, Any]) -> Any:
    """One column, of the built column's type where there is one."""
    kind = types.get(name)
    if kind is None:
        return _json_array(values)
    if pa.types.is_date(kind):
        values = [date.fromisoformat(value) for value in values]
    elif pa.types.is_timestamp(kind):
        return pa.array(values, type=pa.string()).cast(kind)
    return pa.array(values, type=kind)


def _json_array(values: list[Any]) -> Any:
    """JSON values of one kind as an Arrow array; numbers are fractions where one is."""
    first = values[0] if values else ""
    if isinstance(first, bool):
        return pa.array(values, pa.bool_())
    if isinstance(first, (int, float)):
        if any(isinstance(value, float) for value in values):
            return pa.array([float(value) for value in values], pa.float64())
        return pa.array(values, pa.int64())
    kind = pa.list_(pa.string()) if isinstance(first, list) else pa.string()
    return pa.array(values, kind)


def _absent(kinds: Mapping[str, Kind], items: int) -> dict[str, CodedColumn]:
    """Columns that no item has a value of."""
    nothing = np.zeros(1, np.int64)
    return {
        name: CodedColumn(
            name,
            kind,
            [],
            None if kind == "list" else np.zeros(items, np.uint8),
            nothing,
            NO_ROWS,
            items,
        )
        for name, kind in kinds.items()
    }

"""Filters over a version with changes: the built items' coded columns, and one set a segment.

A column may be in some of the places only: a changed item may bring a new one. Where it isn't, no
item has a value of it. A segment's columns are made when a filter first asks, once a segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

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


class DeltaFilters:
    """Answers filters of one version. Safe for several threads."""

    def __init__(self, snapshot: Snapshot, delta: Delta) -> None:
        self._snapshot = snapshot
        self._delta = delta
        self._types = column_types(snapshot)
        self._row_items = {side: own.row_items for side, own in snapshot.sides.items()}
        self._names: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Columns that some item of the delta has."""
        if self._names is None:
            found = (columns_of(segment, self._types) for segment in self._delta.segments)
            self._names = frozenset(name for columns in found for name in columns)
        return self._names

    def values(self, place: Place) -> dict[str, Any]:
        """Metadata of an item of the delta."""
        return self._delta.segments[place.segment].metadata(place.item)

    def rows(
        self, searched: Modality, expression: Expression
    ) -> tuple[RowMask, tuple[BoolArray, ...]]:
        """Rows that a filter allows: of the built ones, and (n,) bool for each part of the delta.

        Raises FilterError for a column that neither has, or one asked for what it isn't.
        """
        kinds = self._kinds()
        row_items = self._row_items.get(searched, NO_ROWS)
        absent = _absent(kinds, len(self._snapshot.catalogue))
        built = self._snapshot.filters.rows(expression, searched, row_items, absent)
        parts = []
        for part in self._delta.parts[searched]:
            segment = self._delta.segments[part.segment]
            masks = _masks(segment, self._types)
            own = masks.rows(expression, searched, part.rows.owners, _absent(kinds, segment.size))
            parts.append(own.allowed)
        return built, tuple(parts)

    def _kinds(self) -> dict[str, Kind]:
        """Every column there is, and its kind: that of the built items first."""
        kinds: dict[str, Kind] = {}
        for segment in reversed(self._delta.segments):
            kinds |= {n: c.kind for n, c in columns_of(segment, self._types).items()}
        return kinds | {name: kind_of(kind) for name, kind in self._types.items()}


def column_types(snapshot: Snapshot) -> dict[str, Any]:
    """The Arrow type of each metadata column of the built items."""
    schema = snapshot.catalogue.table.schema
    return {name: schema.field(name).type for name in snapshot.catalogue.metadata_names}


def columns_of(segment: Segment, types: Mapping[str, Any]) -> Mapping[str, CodedColumn]:
    """The coded columns of a segment's items, made once; `types` are those of the built items."""
    known: Mapping[str, CodedColumn] | None = segment.lazy.get("columns")
    if known is None:
        rows = [segment.metadata(place) for place in range(segment.size)]
        names = sorted({name for row in rows for name in row})
        arrays = {name: _array([row.get(name) for row in rows], name, types) for name in names}
        known = {name: code_column(name, pa.chunked_array([a])) for name, a in arrays.items()}
        segment.lazy["columns"] = known
    return known


def _masks(segment: Segment, types: Mapping[str, Any]) -> FilterMasks:
    masks: FilterMasks | None = segment.lazy.get("masks")
    if masks is None:
        masks = segment.lazy["masks"] = FilterMasks(columns_of(segment, types), segment.size)
    return masks


def _array(values: list[Any], name: str, types: Mapping[str, Any]) -> Any:
    """One column, of the built column's type where there is one."""
    kind = types.get(name)
    if kind is None:
        return pa.array(values, type=_json_type(values))
    if pa.types.is_date(kind):
        values = [None if value is None else date.fromisoformat(value) for value in values]
    elif pa.types.is_timestamp(kind):
        return pa.array(values, type=pa.string()).cast(kind)
    return pa.array(values, type=kind)


def _json_type(values: list[Any]) -> Any:
    """The Arrow type of JSON values of one kind; numbers are fractions where one is."""
    first = next((value for value in values if value is not None), "")
    if isinstance(first, bool):
        return pa.bool_()
    if isinstance(first, (int, float)):
        return pa.float64() if any(isinstance(v, float) for v in values) else pa.int64()
    return pa.list_(pa.string()) if isinstance(first, list) else pa.string()


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

"""From a filter to the rows it allows, in a millisecond where it was asked before.

    masks = FilterMasks(columns, items)
    mask = masks.rows(expression, "image", row_items)     # a RowMask

Each condition's bitmap is kept, so that a new combination of known conditions costs bit operations;
so is the whole filter's row mask. Both are bounded in bytes, the least recently used goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from cachetools import LRUCache

from hivlp.index.candidates import RowArray
from hivlp.index.filters import Combined, Condition, Expression, FilterError
from hivlp.index.masks import BitArray, RowMask
from hivlp.index.snapshot.coded import CodedColumn

KEPT_BYTES = 64 << 20
"""Of bitmaps, and as much again of row masks."""
ENTRY_BYTES = 512
"""What an entry costs beside its arrays, roughly."""
MOST_NAMED = 20


class FilterMasks:
    """Answers filters over the items of one snapshot. Safe for several threads."""

    def __init__(
        self, columns: Mapping[str, CodedColumn], items: int, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._columns = columns
        self._items = items
        self._lock = threading.Lock()
        self._plain: dict[str, bool] = {}
        self._bits: LRUCache[Hashable, BitArray] = LRUCache(
            kept_bytes, lambda bits: bits.nbytes + ENTRY_BYTES
        )
        self._masks: LRUCache[Hashable, RowMask] = LRUCache(
            kept_bytes, lambda mask: mask.bits.nbytes + mask.allowed.nbytes + ENTRY_BYTES
        )

    def rows(
        self,
        expression: Expression,
        side: str,
        row_items: RowArray,
        absent: Mapping[str, CodedColumn] = MappingProxyType({}),
    ) -> RowMask:
        """Which rows of a side belong to items that the expression allows.

        `row_items` (N,) are the items of the side's rows, ascending. `absent` are columns that
        none of these items has a value of, though others may. Raises FilterError.
        """
        key = (side, expression.key)
        with self._lock:
            kept = self._masks.get(key)
        if kept is not None:
            return kept
        bits = self._evaluated(expression, absent)
        allowed = np.unpackbits(bits, count=self._items, bitorder="little").view(np.bool_)
        mask = RowMask.of(allowed if self._one_each(side, row_items) else allowed.take(row_items))
        self._keep(self._masks, key, mask)
        return mask

    def _one_each(self, side: str, row_items: RowArray) -> bool:
        """Whether row i is item i, for all of both: looked at once a side."""
        known = self._plain.get(side)
        if known is None:
            same = len(row_items) == self._items
            known = self._plain[side] = same and bool((np.diff(row_items) == 1).all())
        return known

    def _evaluated(self, expression: Expression, absent: Mapping[str, CodedColumn]) -> BitArray:
        """Items as packed bits; those beyond the last item are meaningless."""
        if isinstance(expression, Condition):
            return self._condition(expression, absent)
        return self._combined(expression, absent)

    def _combined(self, expression: Combined, absent: Mapping[str, CodedColumn]) -> BitArray:
        first, *others = (self._evaluated(part, absent) for part in expression.parts)
        if expression.how == "not":
            return ~first
        together = np.bitwise_and if expression.how == "and" else np.bitwise_or
        for bits in others:
            first = together(first, bits)
        return first

    def _condition(self, condition: Condition, absent: Mapping[str, CodedColumn]) -> BitArray:
        with self._lock:
            kept = self._bits.get(condition.key)
        if kept is not None:
            return kept
        column = self._columns.get(condition.field) or absent.get(condition.field)
        if column is None:
            raise FilterError(condition.place, self._unknown(condition.field, absent))
        bits = np.packbits(column.mask(condition), bitorder="little")
        self._keep(self._bits, condition.key, bits)
        return bits

    def _unknown(self, field: str, absent: Mapping[str, CodedColumn]) -> str:
        names = sorted({*self._columns, *absent})
        known = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        return f"no metadata column {field!r}; there are: {known or 'none'}"

    def _keep(self, cache: LRUCache[Hashable, Any], key: Hashable, value: Any) -> None:
        with self._lock:
            try:
                cache[key] = value
            except ValueError:  # larger than the whole cache
                return

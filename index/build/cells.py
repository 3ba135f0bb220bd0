"""Cells of Arrow columns as Python's values, whatever a file holds.

Arrow has values that Python has none for: years outside of 1 to 9999, nanoseconds, durations of
millions of years, and bytes that a file calls UTF-8 and that aren't. One such cell is no reason to
lose the others of its column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.snapshot.catalogue import NO_VALUE

FIRST_SECOND, END_SECOND = -62_135_596_800, 253_402_300_800
"""Years 1 to 9999 in seconds since 1970, UTC; the end is not included."""
DAY_S = 86_400
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def rows_of(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a record batch by column, or what is wrong with one that can't be read."""
    names = batch.schema.names
    columns: list[list[Any]] = []
    trouble: dict[int, str] = {}
    for name, column in zip(names, batch.columns, strict=True):
        values, bad = values_of(column)
        columns.append(values)
        for row, reason in bad.items():
            trouble.setdefault(row, f"column {name!r}: {reason}")
    for row in range(batch.num_rows):
        found = {name: values[row] for name, values in zip(names, columns, strict=True)}
        yield trouble.get(row, found)


def values_of(column: Any) -> tuple[list[Any], dict[int, str]]:
    """A column's values, None where one can't be read, and by place why it can't.

    Times are cut to microseconds, dictionaries are what they stand for.
    """
    column = plain(column)
    try:
        return column.to_pylist(), {}
    except NO_VALUE:
        values: list[Any] = []
        bad: dict[int, str] = {}
        for place, cell in enumerate(column):
            try:
                values.append(cell.as_py())
            except NO_VALUE as error:
                values.append(None)
                bad[place] = reason_of(error)
        return values, bad


def reason_of(error: BaseException) -> str:
    """Why a cell has no value, in few words."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, (OverflowError, ValueError)) and not isinstance(error, pa.ArrowException):
        return "a time outside of the years 1 to 9999, or too long"
    return f"can't be read: {error}"


def plain(column: Any) -> Any:
    """A column without dictionaries and nanoseconds, where Arrow can cast it."""
    wanted = plain_type(column.type)
    if wanted == column.type:
        return column
    try:
        return column.cast(wanted, safe=False)  # nanoseconds are cut, and nothing else is lost
    except pa.ArrowException:
        return column


def plain_type(kind: Any) -> Any:
    """A type without dictionaries and nanoseconds, at any depth."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind))
    return pa.list_(_plain_field(kind)) if pa.types.is_list(kind) else kind


def _plain_field(kind: Any) -> Any:
    return kind.value_field.with_type(plain_type(kind.value_type))


def far_times(column: Any) -> np.ndarray:
    """(n,) bool: which cells of a column of dates or timestamps lie outside of years 1 to 9999."""
    kind = column.type
    number = column.cast(pa.int32()).cast(pa.int64()) if pa.types.is_date32(kind) else None
    number = column.cast(pa.int64()) if number is None else number
    first, end = _bounds(kind)
    far = pc.or_(pc.less(number, first), pc.greater_equal(number, end))
    return np.asarray(pc.fill_null(far, False).to_numpy(zero_copy_only=False), np.bool_)


def _bounds(kind: Any) -> tuple[int, int]:
    """Of a type's whole numbers: the first that can be, and the first beyond."""
    if pa.types.is_date32(kind):
        return FIRST_SECOND // DAY_S, END_SECOND // DAY_S
    each = PER_SECOND["ms" if pa.types.is_date64(kind) else kind.unit]
    # A signed 64-bit number can't reach the ends in nanoseconds.
    return max(FIRST_SECOND * each, -(2**63)), min(END_SECOND * each, 2**63 - 1)

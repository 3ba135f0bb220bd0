"""Metadata of items to typed Arrow columns.

A column is boolean, integer, float, date, time, text or a list of texts when every value it has
fits; whatever mixes becomes text (JSON for nested values). Times without a zone are taken for UTC.
Text that is a number in every row, as in CSV, becomes numbers, unless that would lose something
("007" and "1e5" stay text).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa

from hivlp.index.snapshot.catalogue import OWN_COLUMNS

INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?")
BOOLEANS = {"true": True, "false": False, "True": True, "False": False}
INT64 = 2**63


def metadata_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name -> pyarrow Array of len(rows), null where a row has no such value; names sorted.

    A name that the catalogue uses itself gets underscores in front.
    """
    names = sorted({name for row in rows for name in row})
    columns: dict[str, Any] = {}
    for name in names:
        free = _encodable(name)
        while free in OWN_COLUMNS or free in columns or (free != name and free in names):
            free = f"_{free}"
        columns[free] = typed_column([row.get(name) for row in rows])
    return columns


def typed_column(values: Sequence[Any]) -> Any:
    """One column of the narrowest type that loses nothing."""
    filled = [value for value in values if value is not None]
    kind = _kind(filled)
    if kind == "text" and filled and all(isinstance(value, str) for value in filled):
        kind, values = _parsed(filled, values)
    types = {
        "bool": pa.bool_(),
        "int": pa.int64(),
        "float": pa.float64(),
        "list": pa.list_(pa.string()),
        "date": pa.date32(),
        "time": pa.timestamp("us", "UTC"),
        "text": pa.string(),
    }
    if kind == "text":
        values = [None if value is None else _as_text(value) for value in values]
    elif kind == "list":
        values = [None if value is None else [_encodable(p) for p in value] for value in values]
    elif kind == "time":
        values = [None if value is None else _in_utc(value) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, type=types[kind])


def _kind(filled: Sequence[Any]) -> str:
    kinds = {_kind_of(value) for value in filled}
    if kinds == {"int", "float"}:
        whole = (value for value in filled if isinstance(value, int))
        return "float" if all(int(float(value)) == value for value in whole) else "text"
    if kinds == {"date", "time"}:
        return "time"
    return kinds.pop() if len(kinds) == 1 else "text"


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int) and -INT64 <= value < INT64:
        return "int"
    if isinstance(value, float):
        return "float"
    if isinstance(value, date):
        return "time" if isinstance(value, datetime) else "date"
    is_list = isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
    return "list" if is_list else "text"


def _parsed(filled: Sequence[str], values: Sequence[str | None]) -> tuple[str, Sequence[Any]]:
    """Numbers or booleans, where every text is one."""
    if all(value in BOOLEANS for value in filled):
        return "bool", [None if value is None else BOOLEANS[value] for value in values]
    if all(INTEGER.fullmatch(value) and value != "-0" for value in filled):
        return "int", [None if value is None else int(value) for value in values]
    if all(DECIMAL.fullmatch(value) for value in filled) and _keeps_apart(filled):
        return "float", [None if value is None else float(value) for value in values]
    return "text", values


def _in_utc(value: date) -> datetime:
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    try:
        return value.astimezone(UTC)
    except OverflowError:  # the first or the last day there is, in another zone
        return value.replace(tzinfo=UTC)


def _keeps_apart(texts: Sequence[str]) -> bool:
    """Whether different texts are different numbers: 1.1 and 1.10 may be two versions."""
    different = set(texts)
    return len({float(text) for text in different}) == len(different)


def _as_text(value: Any) -> str:
    """Nested values, numbers and booleans as JSON, the rest (dates, decimals) as they print."""
    if isinstance(value, (Mapping, list, tuple, bool, int, float)):
        return _encodable(json.dumps(value, ensure_ascii=False, default=str))
    return _encodable(str(value))


def _encodable(text: str) -> str:
    """Half characters become question marks: Arrow's texts are UTF-8."""
    return text.encode("utf-8", "replace").decode()

"""Metadata of a changed item, checked against the columns that there are.

A column keeps its type: whatever comes later must fit it. A new column takes the kind of the first
value that it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa

from hivlp.index.filters import parse_date
from hivlp.index.snapshot.catalogue import OWN_COLUMNS
from hivlp.index.snapshot.coded_files import Kind, kind_of
from hivlp.models.errors import InputError

MAX_COLUMNS = 256
MAX_INDEX_COLUMNS = 1_024
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 65_536
MAX_PARTS = 1_000
WORDS: Mapping[Kind, str] = {
    "text": "a text",
    "number": "a number",
    "boolean": "true or false",
    "date": "an ISO 8601 date",
    "list": "a list of texts",
}


class MetadataError(InputError):
    """A value that its column can't hold."""

    def __init__(self, name: str, message: str, *, limit: int | None = None) -> None:
        param = f"metadata.{name}" if name else "metadata"
        super().__init__("invalid_metadata", f"{param}: {message}", param=param, limit=limit)


def fitted(
    metadata: Mapping[str, Any], types: Mapping[str, Any], kinds: dict[str, Kind]
) -> dict[str, Any]:
    """The metadata as it is kept: JSON values, dates as ISO texts in their column's form.

    `types` are the Arrow types of built columns, `kinds` the kinds of columns that changes brought;
    new ones are added there once all of the item fits. Null values are left out. Raises
    MetadataError.
    """
    if len(metadata) > MAX_COLUMNS:
        raise MetadataError("", f"{len(metadata)} values, at most {MAX_COLUMNS}", limit=MAX_COLUMNS)
    found: dict[str, Any] = {}
    new: dict[str, Kind] = {}
    for name, value in metadata.items():
        if value is None:
            continue
        if not _is_name(name):
            message = f"no name for a column: 1 to {MAX_NAME_CHARS} characters, not id or image"
            shown = name[:MAX_NAME_CHARS].encode(errors="backslashreplace").decode()
            raise MetadataError(shown, message, limit=MAX_NAME_CHARS)
        if name in types:
            found[name] = _of_type(name, value, types[name])
        else:
            kind = kinds.get(name) or _kind(name, value)
            found[name] = _of_kind(name, value, kind)
            if name not in kinds:
                new[name] = kind
    there = len(types) + len(kinds)
    if new and there + len(new) > MAX_INDEX_COLUMNS:
        message = f"the index has {there} columns, at most {MAX_INDEX_COLUMNS}"
        raise MetadataError(next(iter(new)), message, limit=MAX_INDEX_COLUMNS)
    kinds |= new
    return found


def _is_name(name: str) -> bool:
    if name in OWN_COLUMNS or not 0 < len(name) <= MAX_NAME_CHARS or "\0" in name:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in name)  # halves of a character


def loosened(metadata: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a table's row, in their columns' types if they can be: a CSV has texts alone.

    What can't stays as it is, for `fitted` to refuse.
    """
    return {name: _loosened(value, types.get(name)) for name, value in metadata.items()}


def _loosened(value: Any, arrow: Any) -> Any:
    if arrow is None or not isinstance(value, str):
        if arrow is not None and kind_of(arrow) == "text" and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False, default=str)
        return value.isoformat() if isinstance(value, date) else value
    kind = kind_of(arrow)
    if kind == "boolean":
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    if kind == "number":
        for number in (int, float):
            try:
                return number(value)
            except ValueError:
                continue
    return value


def _kind(name: str, value: Any) -> Kind:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, (list, tuple)):
        return "list"
    wanted = "a text, a number, true or false, or a list of texts"
    raise MetadataError(name, f"must be {wanted}, got {type(value).__name__}")


def _of_type(name: str, value: Any, arrow: Any) -> Any:
    """A value for a built column, which may be narrower than its kind."""
    fit = _of_kind(name, value, kind_of(arrow))
    if pa.types.is_integer(arrow):
        if fit != int(fit):
            raise MetadataError(name, f"is a column of whole numbers, {value!r} does not fit")
        return _number(name, int(fit))
    if pa.types.is_floating(arrow):
        return float(fit)
    if pa.types.is_date(arrow):
        return _day(name, value).isoformat()
    return fit


def _of_kind(name: str, value: Any, kind: Kind) -> Any:
    fits = {
        "text": isinstance(value, str),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "date": isinstance(value, (str, date)),
        "list": isinstance(value, (list, tuple)),
    }[kind]
    if not fits:
        raise MetadataError(name, f"must be {WORDS[kind]}, got {type(value).__name__}")
    if kind == "text":
        return _text(name, value)
    if kind == "number":
        return _number(name, value)
    if kind == "date":
        return _moment(name, value).isoformat()
    if kind == "list":
        if len(value) > MAX_PARTS:
            raise MetadataError(name, f"{len(value)} texts, at most {MAX_PARTS}", limit=MAX_PARTS)
        return [_text(name, part) for part in value]
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise MetadataError(name, f"must be {WORDS['list']}, got {type(value).__name__} in it")
    if len(value) > MAX_TEXT_CHARS:
        message = f"{len(value)} characters, at most {MAX_TEXT_CHARS}"
        raise MetadataError(name, message, limit=MAX_TEXT_CHARS)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MetadataError(name, "holds half a character") from None
    return value


def _number(name: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise MetadataError(name, "must be finite")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise MetadataError(name, "a whole number must fit 64 bits", limit=2**63 - 1)
    return value


def _moment(name: str, value: Any) -> datetime:
    try:
        if isinstance(value, datetime):
            return parse_date(value.isoformat())
        return parse_date(value if isinstance(value, str) else value.isoformat())
    except (ValueError, OverflowError):
        raise MetadataError(name, f"{str(value)[:64]!r} is no ISO 8601 date") from None


def _day(name: str, value: Any) -> date:
    moment = _moment(name, value)
    if moment.astimezone(UTC).time() != datetime.min.time():
        raise MetadataError(name, f"is a column of days, {str(value)[:64]!r} names a time")
    return moment.date()

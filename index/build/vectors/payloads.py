"""JSON payloads to typed columns: a column's type fits every value that was seen of its key."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

INT64 = 2**63
TYPES = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "list": pa.list_(pa.string()),
    "text": pa.string(),
}


class Kinds:
    """Which kinds of values each key has had."""

    def __init__(self, seen: Mapping[str, Iterable[str]] | None = None) -> None:
        self._seen = {key: set(kinds) for key, kinds in (seen or {}).items()}

    def add(self, payload: Mapping[str, Any]) -> None:
        """Look at one payload."""
        for key, value in payload.items():
            kinds = self._seen.setdefault(str(key), set())
            if value is not None:
                kinds.add(_kind_of(value))

    def columns(self, taken: Collection[str]) -> list[tuple[str, str, Any]]:
        """(key, column's name, Arrow type), by key; a name that is `taken` gets underscores."""
        found: list[tuple[str, str, Any]] = []
        for key in sorted(self._seen):
            name = key
            while name in taken or (name != key and name in self._seen):
                name = f"_{name}"
            found.append((key, name, TYPES[_joined(self._seen[key])]))
        return found

    def to_json(self) -> dict[str, list[str]]:
        """For a file."""
        return {key: sorted(kinds) for key, kinds in self._seen.items()}

    @staticmethod
    def of_json(found: Mapping[str, Sequence[str]]) -> Kinds:
        """What `to_json` said."""
        return Kinds(found)


def as_column(values: Sequence[Any], kind: Any) -> Any:
    """Values of one key as an Arrow array of its type."""
    if pa.types.is_floating(kind):
        values = [None if value is None else float(value) for value in values]
    elif pa.types.is_string(kind):
        values = [None if value is None else _text(value) for value in values]
    return pa.array(values, kind)


def _joined(kinds: Collection[str]) -> str:
    if set(kinds) == {"int", "float"}:
        return "float"
    if set(kinds) in ({"long"}, {"int", "long"}):
        return "int"
    return next(iter(kinds)) if len(kinds) == 1 else "text"


def _kind_of(value: Any) -> str:
    """A key of TYPES, or `long`: a whole number with more digits than a float keeps."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if not -INT64 <= value < INT64:
            return "text"
        return "int" if int(float(value)) == value else "long"
    if isinstance(value, float):
        return "float"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "list"
    return "text"


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json.dumps(value, ensure_ascii=False)

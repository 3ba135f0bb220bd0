"""Metadata of items to typed Arrow columns.

A column is boolean, integer, float, date, time, text or a list of texts when every value it has
fits; whatever mixes becomes text (JSON for nested values). Times without a zone are taken for UTC.
Text that is a number in every row, as in CSV, becomes numbers, unless that would lose something
("007" and "1e5" stay text).

`MetadataTypes` is told items one by one and then makes columns of any part of them;
`metadata_columns` does the same for items that are in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hivlp.index.errors import BuildError
from hivlp.index.snapshot.catalogue import OWN_COLUMNS
from hivlp.index.snapshot.scratch import Scratch, Span

Kind = Literal["bool", "int", "float", "list", "date", "time", "text"]
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?")
BOOLEANS = {"true": True, "false": False, "True": True, "False": False}
INT64 = 2**63
MAX_COLUMNS = 4_096
FEW = 1_024
SPILL = 8_192
_EXACT: dict[type, Kind] = {
    str: "text", bool: "bool", float: "float", datetime: "time", date: "date"
}  # fmt: skip
"""Kinds that the class alone tells, looked up first: metadata are millions of values."""
_TYPES = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "list": pa.list_(pa.string()),
    "date": pa.date32(),
    "time": pa.timestamp("us", "UTC"),
    "text": pa.string(),
}


@dataclass(frozen=True, slots=True)
class Printed:
    """A value of no kind of its own (nested, a decimal, bytes), as the text it becomes."""

    text: str


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What a column holds; `parsed`: every value is a text, and read as that kind."""

    kind: Kind
    parsed: bool = False

    @property
    def arrow(self) -> Any:
        """The Arrow type."""
        return _TYPES[self.kind]

    def array(self, values: Sequence[Any]) -> Any:
        """Values of such a column as a pyarrow Array, null where they are None."""
        convert = _PARSERS[self.kind] if self.parsed else _CONVERTERS.get(self.kind)
        if convert is not None:
            values = [None if value is None else convert(value) for value in values]
        return pa.array(values, type=self.arrow)


class MetadataTypes:
    """The columns that the metadata of many items makes, found in bounded memory."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._typers: dict[str, ColumnTyper] = {}

    def see(self, metadata: Mapping[str, Any]) -> None:
        """Take one item's metadata into account. Raises BuildError over MAX_COLUMNS names."""
        for name, value in metadata.items():
            typer = self._typers.get(name)
            if typer is None:
                typer = self._new(name)
            typer.see(value)

    def columns(self) -> dict[str, tuple[str, ColumnType]]:
        """The name in the catalogue -> the name in the metadata, and the type; in their order."""
        names = column_names(self._typers)
        return {free: (name, self._typers[name].type()) for free, name in names.items()}

    def _new(self, name: str) -> ColumnTyper:
        if len(self._typers) >= MAX_COLUMNS:
            raise BuildError(f"metadata {name!r}: more than {MAX_COLUMNS} different names")
        self._typers[name] = ColumnTyper(self._scratch)
        return self._typers[name]


def metadata_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name -> pyarrow Array of len(rows), null where a row has no such value; names sorted.

    A name that the catalogue uses itself gets underscores in front.
    """
    names = column_names({name for row in rows for name in row})
    return {free: typed_column([row.get(name) for row in rows]) for free, name in names.items()}


def column_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the catalogue -> name in the metadata, sorted by the latter."""
    given = set(names)
    found: dict[str, str] = {}
    for name in sorted(given):
        free = _encodable(name)
        while free in OWN_COLUMNS or free in found or (free != name and free in given):
            free = f"_{free}"
        found[free] = name
    return found


def typed_column(values: Sequence[Any]) -> Any:
    """One column of the narrowest type that loses nothing."""
    return column_type([value for value in values if value is not None]).array(values)


def column_type(filled: Sequence[Any]) -> ColumnType:
    """The type of a whole column that is in memory; ColumnTyper finds the same bit by bit."""
    kind = _common({kind_of_value(value) for value in filled})
    if kind == "number":
        whole = (value for value in filled if isinstance(value, int))
        return ColumnType("float" if all(int(float(v)) == v for v in whole) else "text")
    if kind == "text" and filled and all(isinstance(value, str) for value in filled):
        return _type_of_texts(filled)
    return ColumnType(kind)


def _common(kinds: set[Kind]) -> Kind | Literal["number"]:
    """The kind that fits values of all these kinds; `number` is a float that must hold integers."""
    if kinds == {"int", "float"}:
        return "number"
    if kinds == {"date", "time"}:
        return "time"
    return next(iter(kinds)) if len(kinds) == 1 else "text"


def _type_of_texts(filled: Sequence[str]) -> ColumnType:
    """Numbers or booleans, where every text is one."""
    if all(value in BOOLEANS for value in filled):
        return ColumnType("bool", parsed=True)
    if all(_is_integer(value) for value in filled):
        return ColumnType("int", parsed=True)
    if all(DECIMAL.fullmatch(value) for value in filled) and _keeps_apart(filled):
        return ColumnType("float", parsed=True)
    return ColumnType("text")


class ColumnTyper:
    """Told the values of a column one by one, it knows the narrowest type that loses nothing."""

    def __init__(self, scratch: Scratch) -> None:
        self._kinds: set[Kind] = set()
        self._exact = True
        self._strings = self._booleans = self._integers = True
        self._decimals: _Decimals | None = _Decimals(scratch)

    def see(self, value: Any) -> None:
        """Take one value into account."""
        if value is None:
            return
        kind = kind_of_value(value)
        self._kinds.add(kind)
        if kind == "int":
            self._exact = self._exact and int(float(value)) == value
        elif kind == "text" and self._strings:
            parses = self._booleans or self._integers or self._decimals is not None
            if parses or not isinstance(value, str):
                self._see_text(value)

    def type(self) -> ColumnType:
        """The type that fits all values so far."""
        kind = _common(self._kinds)
        if kind == "number":
            return ColumnType("float" if self._exact else "text")
        if self._kinds == {"text"} and self._strings:
            if self._booleans:
                return ColumnType("bool", parsed=True)
            if self._integers:
                return ColumnType("int", parsed=True)
            if self._decimals is not None and self._decimals.keep_apart():
                return ColumnType("float", parsed=True)
        return ColumnType(kind)

    def _see_text(self, value: Any) -> None:
        if not isinstance(value, str):
            self._strings, self._decimals = False, None
            return
        self._booleans = self._booleans and value in BOOLEANS
        self._integers = self._integers and _is_integer(value)
        if self._decimals is not None:
            if DECIMAL.fullmatch(value):
                self._decimals.add(value)
            else:
                self._decimals = None


class _Decimals:
    """Whether different texts are different numbers (1.1 and 1.10 may be two versions).

    The first FEW different texts are remembered. Of later ones, number and hash go to the scratch
    file, and are sorted in the end: 32 bytes a text, for one column at a time.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._few: set[str] = set()
        self._more: list[str] = []
        self._spans: list[Span] = []

    def add(self, text: str) -> None:
        if text in self._few:
            return
        if len(self._few) < FEW:
            self._few.add(text)
            return
        self._more.append(text)
        if len(self._more) >= SPILL:
            self._spill()

    def keep_apart(self) -> bool:
        if not self._spans and not self._more:
            return _keeps_apart(self._few)
        self._spill()
        parts = [self._scratch.read_array(span, _PAIR) for span in self._spans]
        pairs = np.concatenate([_pairs(self._few), *parts])
        pairs = pairs[np.lexsort((pairs["hash"], pairs["number"]))]
        same = pairs["number"][1:] == pairs["number"][:-1]
        return bool((pairs["hash"][1:] == pairs["hash"][:-1])[same].all())

    def _spill(self) -> None:
        if self._more:
            pairs = _pairs(set(self._more))
            self._spans.append(self._scratch.append(pairs.tobytes()))
            self._more.clear()


_PAIR = np.dtype([("number", "<f8"), ("hash", "<i8")])


def _pairs(texts: Iterable[str]) -> Any:
    """Number and hash of each text; the hash is the process's own."""
    return np.array([(float(text) + 0.0, hash(text)) for text in texts], dtype=_PAIR)


def kind_of_value(value: Any) -> Kind:
    """The kind of one value that is not None."""
    known = _EXACT.get(type(value))
    if known is not None:
        return known
    if isinstance(value, str):
        return "text"
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


def printed(value: Any) -> str:
    """Nested values, numbers and booleans as JSON, the rest (dates, decimals) as they print."""
    if isinstance(value, Printed):
        return value.text
    if isinstance(value, (Mapping, list, tuple, bool, int, float)):
        return _encodable(json.dumps(value, ensure_ascii=False, default=str))
    return _encodable(str(value))


def _in_utc(value: date) -> datetime:
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    try:
        return value.astimezone(UTC)
    except OverflowError:  # the first or the last day there is, in another zone
        return value.replace(tzinfo=UTC)


def _is_integer(text: str) -> bool:
    return INTEGER.fullmatch(text) is not None and text != "-0"


def _keeps_apart(texts: Iterable[str]) -> bool:
    """Whether different texts are different numbers."""
    different = set(texts)
    return len({float(text) for text in different}) == len(different)


def _encodable(text: str) -> str:
    """Half characters become question marks: Arrow's texts are UTF-8."""
    return text.encode("utf-8", "replace").decode()


_CONVERTERS: dict[str, Any] = {
    "text": printed,
    "list": lambda value: [_encodable(part) for part in value],
    "time": _in_utc,
    "float": float,
}
_PARSERS: dict[str, Any] = {"bool": BOOLEANS.__getitem__, "int": int, "float": float}

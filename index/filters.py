"""What a request may ask of items' metadata: a typed expression, read from JSON.

    {"and": [{"field": "colour", "in": ["red", "blue"]},
             {"not": {"field": "price", "range": {"gte": 10, "lt": 20}}},
             {"field": "licence", "exists": true}]}

Every object is one condition (`field` and one of `eq`, `in`, `range`, `exists`) or one of `and`,
`or`, `not`. A field without a value fulfils no condition but `exists: false`; `not` is everything
else, such items included. Of a list, one element that fits is enough. Notable: errors name the
place in the expression (`filter.and.1.not.range.gte`), and nothing is coerced: a number is no text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from hivlp.models.errors import InputError

Value = str | int | float | bool
MAX_CONDITIONS = 64
MAX_DEPTH = 8
MAX_VALUES = 1_000
MAX_TEXT_CHARS = 1_024
MAX_FIELD_CHARS = 256
SHOWN, SHOWN_CHARS = 5, 64
"""Of what is wrong, so much is repeated in an error."""
OPERATORS = ("eq", "in", "range", "exists")
BOUNDS = ("gt", "gte", "lt", "lte")


class FilterError(InputError):
    """A filter that can't be read, or asks of a column what it can't be asked."""

    def __init__(self, place: str, message: str, *, limit: int | None = None) -> None:
        super().__init__("invalid_filter", f"{place}: {message}", param=place, limit=limit)


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range."""

    value: Value
    included: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """One column is one of `values`, lies between two bounds, or has a value at all.

    `place` is where in the request it stands, for errors. `key` is equal for conditions that mean
    the same; True and 1 are told apart.
    """

    field: str
    values: tuple[Value, ...] = ()
    low: Bound | None = None
    high: Bound | None = None
    exists: bool | None = None
    place: str = "filter"
    key: bytes = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        named = sorted((type(v).__name__, repr(v)) for v in self.values)
        ends = [
            None if end is None else (type(end.value).__name__, end.value, end.included)
            for end in (self.low, self.high)
        ]
        object.__setattr__(self, "key", _digest("if", self.field, named, ends, self.exists))


@dataclass(frozen=True, slots=True)
class Combined:
    """All (`and`) or any (`or`) of some expressions, or none of the only one (`not`).

    `key` is equal for combinations of the same parts in any order.
    """

    how: Literal["and", "or", "not"]
    parts: tuple[Expression, ...]
    key: bytes = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _digest(self.how, *sorted(p.key for p in self.parts)))


Expression = Condition | Combined


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def parse_filter(given: Any, place: str = "filter") -> Expression:
    """An expression from its JSON form. Raises FilterError naming the place and the limit."""
    return _Parser().expression(given, place, 1)


class _Parser:
    """Counts conditions and values while it reads."""

    def __init__(self) -> None:
        self._conditions = 0
        self._values = 0

    def expression(self, given: Any, place: str, depth: int) -> Expression:
        if not isinstance(given, Mapping) or not given:
            raise FilterError(place, "must be an object with a field, or with and, or, not")
        if depth > MAX_DEPTH:
            raise FilterError(place, f"nested deeper than {MAX_DEPTH}", limit=MAX_DEPTH)
        if "field" in given:
            return self._condition(given, place)
        if len(given) > 1 or next(iter(given)) not in ("and", "or", "not"):
            known = "field with one of eq, in, range, exists; or one of and, or, not alone"
            some = [str(key)[:SHOWN_CHARS] for key in itertools.islice(given, SHOWN)]
            raise FilterError(place, f"unknown keys {some}: there is {known}")
        how, inner = next(iter(given.items()))
        if how == "not":
            return Combined("not", (self.expression(inner, f"{place}.not", depth + 1),))
        if not isinstance(inner, list) or not inner:
            raise FilterError(f"{place}.{how}", "must be a list of at least one expression")
        parts = [
            self.expression(part, f"{place}.{how}.{i}", depth + 1) for i, part in enumerate(inner)
        ]
        return Combined(how, tuple(parts))

    def _condition(self, given: Mapping[Any, Any], place: str) -> Condition:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            message = f"more than {MAX_CONDITIONS} conditions"
            raise FilterError(place, message, limit=MAX_CONDITIONS)
        field = given["field"]
        if not isinstance(field, str) or not 0 < len(field) <= MAX_FIELD_CHARS:
            message = f"must be the name of a column, of at most {MAX_FIELD_CHARS} characters"
            raise FilterError(f"{place}.field", message, limit=MAX_FIELD_CHARS)
        asked = [name for name in given if name != "field"]
        if len(asked) != 1 or asked[0] not in OPERATORS:
            raise FilterError(place, f"needs one of {', '.join(OPERATORS)} beside field")
        operator, value = asked[0], given[asked[0]]
        place = f"{place}.{operator}"
        if operator == "eq":
            return Condition(field, values=(_value(value, place),), place=place)
        if operator == "in":
            return Condition(field, values=self._listed(value, place), place=place)
        if operator == "exists":
            if not isinstance(value, bool):
                raise FilterError(place, "must be true or false")
            return Condition(field, exists=value, place=place)
        return _range(field, value, place)

    def _listed(self, given: Any, place: str) -> tuple[Value, ...]:
        if not isinstance(given, list) or not given:
            raise FilterError(place, "must be a list of at least one value")
        self._values += len(given)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values in the whole filter"
            raise FilterError(place, message, limit=MAX_VALUES)
        return tuple(_value(value, f"{place}.{i}") for i, value in enumerate(given))


def _range(field: str, given: Any, place: str) -> Condition:
    if not isinstance(given, Mapping) or not given or any(key not in BOUNDS for key in given):
        raise FilterError(place, f"must be an object with some of {', '.join(BOUNDS)}")
    if {"gt", "gte"} <= set(given) or {"lt", "lte"} <= set(given):
        raise FilterError(place, "gives one end twice")
    ends: dict[str, Bound] = {}
    for key, value in given.items():
        found = _value(value, f"{place}.{key}")
        if isinstance(found, bool):
            raise FilterError(f"{place}.{key}", "must be a number, a date or a text")
        ends[key[0]] = Bound(found, included=key.endswith("e"))
    return Condition(field, low=ends.get("g"), high=ends.get("l"), place=place)


def _value(given: Any, place: str) -> Value:
    if isinstance(given, str):
        if len(given) > MAX_TEXT_CHARS:
            message = f"{len(given)} characters, at most {MAX_TEXT_CHARS}"
            raise FilterError(place, message, limit=MAX_TEXT_CHARS)
        try:
            given.encode()
        except UnicodeEncodeError:
            raise FilterError(place, "holds half a character") from None
        return given
    if isinstance(given, (bool, int)) or (isinstance(given, float) and math.isfinite(given)):
        return given
    raise FilterError(place, "must be a text, a finite number, true or false")


def parse_date(text: str) -> datetime:
    """An ISO 8601 date or time, in UTC unless it names a zone. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

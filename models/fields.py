"""Settings from plain values, strictly: an unknown field, a wrong kind or a value out of range is
an error that names the field and its limits.

Settings are trees of frozen dataclasses. A field's limits and unit stand in its metadata, put there
by `number`; `every_field` lists them all, for documents and their tests. A field whose name Python
keeps for itself ends in an underscore here, `from_`, and not for users: `from`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hivlp.models.errors import TrainingError

Part = TypeVar("Part")
MOST = 10**9
NONE = "none"
"""What stands for an optional part that is left out; TOML has no null."""
_LIMIT = "limit"


class FieldError(TrainingError):
    """A setting that can't be used; `name` is its whole path."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Limit:
    """Least and most of a number, both allowed, and its unit."""

    def __init__(self, least: float, most: float, unit: str = "") -> None:
        self.least, self.most, self.unit = least, most, unit

    def __str__(self) -> str:
        return f"{self.least:g}..{self.most:g}"


PLAIN = Limit(-MOST, MOST)


def number(default: Any, least: float, most: float = MOST, unit: str = "") -> Any:
    """A dataclass field for a number, or for several with the same limits."""
    return field(default=default, metadata={_LIMIT: Limit(least, most, unit)})


def limit_of(found: Field[Any]) -> Limit:
    """The limits of a field; wide ones where it has none of its own."""
    limit: Limit = found.metadata.get(_LIMIT, PLAIN)
    return limit


def told_name(found: Field[Any]) -> str:
    """A field's name as users write it."""
    return found.name.rstrip("_")


def with_values(base: Part, given: Mapping[str, Any], place: str = "") -> Part:
    """A copy of settings with some values changed, nested parts included. Raises FieldError."""
    assert is_dataclass(base)
    assert not isinstance(base, type)
    known = {told_name(found): found for found in fields(base)}
    hints = get_type_hints(type(base))
    changes = {}
    for name, value in given.items():
        path = f"{place}.{name}" if place else name
        if name not in known:
            listed = ", ".join(sorted(known))
            raise FieldError(path, f"no such field; known {'here ' if place else ''}are {listed}")
        own = known[name].name
        limit = limit_of(known[name])
        changes[own] = _value(hints[own], value, getattr(base, own), path, limit)
    try:
        changed: Part = replace(base, **changes)
        return changed
    except FieldError:
        raise
    except TrainingError as error:  # what the settings check of themselves names the field alone
        raise TrainingError(f"{place}.{error}" if place else str(error)) from error


def _value(hint: Any, value: Any, before: Any, path: str, limit: Limit) -> Any:
    """One value as its hint wants it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _optional(hint, value, before, path, limit)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise FieldError(path, f"{value!r} is no table of fields")
        start: Any = hint
        return with_values(start() if before is None else before, value, path)
    if origin is Literal:
        if value not in get_args(hint):
            raise FieldError(path, f"{value!r} is none of {', '.join(map(str, get_args(hint)))}")
        return value
    if origin is tuple:
        return _several(hint, value, path, limit)
    return _one(hint, value, path, limit)


def _optional(hint: Any, value: Any, before: Any, path: str, limit: Limit) -> Any:
    if value is None or value == NONE:
        return None
    (inner,) = (each for each in get_args(hint) if each is not type(None))
    return _value(inner, value, before, path, limit)


def _several(hint: Any, value: Any, path: str, limit: Limit) -> tuple[Any, ...]:
    kinds = get_args(hint)
    if not isinstance(value, (list, tuple)):
        raise FieldError(path, f"{value!r} is no list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise FieldError(path, f"{len(kinds)} values are wanted, not {len(value)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_value(kind, each, None, f"{path}[{i}]", limit) for i, (kind, each) in pairs)


def _one(kind: Any, value: Any, path: str, limit: Limit) -> Any:
    if kind in (bool, str):
        if not isinstance(value, kind):
            what = "true or false" if kind is bool else "a text"
            raise FieldError(path, f"{value!r} is not {what}")
        return value
    assert kind in (int, float), f"{path}: settings hold no {kind}"
    wanted = int if kind is int else (int, float)
    fits = isinstance(value, wanted) and not isinstance(value, bool)
    if not fits or math.isnan(value) or not limit.least <= value <= limit.most:
        what = "a whole number" if kind is int else "a number"
        unit = f" {limit.unit}" if limit.unit else ""
        raise FieldError(path, f"{value!r} is not {what} within {limit}{unit}")
    return kind(value)


def every_field(settings: Any, place: str = "") -> Iterator[tuple[str, Any, Limit]]:
    """Path, value and limits of every field that holds a value, nested parts included."""
    for found in fields(settings):
        value, path = getattr(settings, found.name), f"{place}{told_name(found)}"
        if is_dataclass(value):
            yield from every_field(value, f"{path}.")
        else:
            yield path, value, limit_of(found)


def plain_values(settings: Any) -> dict[str, Any]:
    """A tree of settings as TOML and JSON can hold it; `with_values` takes it back."""
    found: dict[str, Any] = {}
    for name, value in ((told_name(f), getattr(settings, f.name)) for f in fields(settings)):
        if is_dataclass(value):
            found[name] = plain_values(value)
        elif value is None:
            found[name] = NONE
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found

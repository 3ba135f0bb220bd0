"""Typed reading of a checkpoint's JSON: what is wrong is told by field and file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hivlp.models.network.checkpoint import read_anything, read_json
from hivlp.models.network.tower import TowerError

Word = TypeVar("Word", bound=str)
MOST = 10**9


class Fields:
    """One JSON object of a file, and where in it it stands.

    Every method gives the field's value, or the default where the field is absent or null, and
    raises TowerError naming field and file for a value of another kind, or for an absent field
    without a default.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, place: str = "") -> None:
        self.values, self.path, self._place = values, path, place

    @staticmethod
    def read(path: Path) -> Fields:
        """The object that is a whole file."""
        return Fields(read_json(path), path)

    @staticmethod
    def read_if_there(path: Path) -> Fields:
        """The same; an absent file is an empty object."""
        return Fields.read(path) if path.is_file() else Fields({}, path)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, reason: str) -> TowerError:
        """What to raise about a field."""
        return TowerError(self.path, f"field {self._place + name!r} {reason}")

    def part(self, name: str) -> Fields:
        """An object within this one; an absent one is empty."""
        found = self.values.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.error(name, f"is not an object: {found!r}")
        return Fields(found or {}, self.path, f"{self._place}{name}.")

    def _found(self, name: str, default: Any) -> Any:
        found = self.values.get(name)
        if found is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        return found

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        found = self._found(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= MOST:
            raise self.error(name, f"must be a whole number within {least}..{MOST}, not {found!r}")
        return found

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A number greater than `above`."""
        found = self._found(name, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > above:
            raise self.error(name, f"must be a number above {above:g}, not {found!r}")
        return float(found)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        found = self._found(name, default)
        if not isinstance(found, bool):
            raise self.error(name, f"must be true or false, not {found!r}")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        found = self._found(name, default)
        if not isinstance(found, str):
            raise self.error(name, f"must be a string, not {found!r}")
        return found

    def word(self, name: str, known: Iterable[Word], default: str | None = None) -> Word:
        """One of the known words."""
        found, listed = self._found(name, default), list(known)
        if found not in listed:
            raise self.error(name, f"is {found!r}: one of {', '.join(listed)} is implemented")
        return listed[listed.index(found)]

    def sides(self, name: str, default: int | None = None) -> tuple[int, int]:
        """Height and width in pixels, from one number or two."""
        found = self._found(name, default)
        pair = [found, found] if isinstance(found, int) else found
        if not isinstance(pair, list) or len(pair) != 2:
            raise self.error(name, f"must be one or two whole numbers, not {found!r}")
        both = Fields({"height": pair[0], "width": pair[1]}, self.path, f"{self._place}{name}.")
        return both.whole("height"), both.whole("width")

    def triple(
        self, name: str, default: Iterable[float] | None = None
    ) -> tuple[float, float, float]:
        """Three numbers, one a colour."""
        found = self._found(name, None if default is None else list(default))
        numbers = isinstance(found, list) and all(
            isinstance(each, (int, float)) and not isinstance(each, bool) for each in found
        )
        if not numbers or len(found) != 3:
            raise self.error(name, f"must be three numbers, not {found!r}")
        return float(found[0]), float(found[1]), float(found[2])

    def refuse(self, name: str, implemented: Any) -> None:
        """Raise unless the field is absent, null or what is implemented."""
        if self.values.get(name) not in (None, implemented):
            raise self.error(name, f"is {self.values[name]!r}: only {implemented!r} is implemented")


def read_list(path: Path) -> list[Fields]:
    """A file that is a list of objects. Raises TowerError."""
    found = read_anything(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise TowerError(path, "not a JSON list of objects")
    return [Fields(each, path, f"{i}.") for i, each in enumerate(found)]

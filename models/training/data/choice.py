"""Which items of a corpus a run learns from: all, or those that files of ids name.

For cross-validation and held-out items. The run's record keeps each file's hash, so that a run goes
on with the choice that it was begun with or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.errors import TrainingError

SHOWN = 5


@dataclass(frozen=True, slots=True)
class IdFile:
    """A text file with one id a line, and the hash of what it held."""

    path: str
    sha256: str

    def ids(self, name: str) -> frozenset[str]:
        """What it holds. Raises TrainingError, naming the field `name`, where that has changed."""
        text, found = _read(name, self.path)
        if found.sha256 != self.sha256:
            raise TrainingError(f"{name}: {self.path} isn't what it was when the run was begun")
        return _ids(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """`only` these ids, all where it is None, without those of `leave_out`."""

    only: IdFile | None = None
    leave_out: IdFile | None = None

    @staticmethod
    def read(only: str, leave_out: str) -> Choice:
        """From the fields `data.only` and `data.leave_out`, "" for none. Raises TrainingError."""
        return Choice(_id_file("data.only", only), _id_file("data.leave_out", leave_out))

    def open(self) -> ChosenIds:
        """Read the files. Raises TrainingError."""
        return ChosenIds(
            None if self.only is None else self.only.ids("data.only"),
            frozenset() if self.leave_out is None else self.leave_out.ids("data.leave_out"),
        )


class ChosenIds:
    """Says of each id whether it is chosen, and remembers which of its own it never met."""

    def __init__(self, only: frozenset[str] | None, leave_out: frozenset[str]) -> None:
        self._only, self._leave_out = only, leave_out
        self._unmet = set(leave_out | (only or frozenset()))

    def __contains__(self, item_id: str) -> bool:
        self._unmet.discard(item_id)
        wanted = self._only is None or item_id in self._only
        return wanted and item_id not in self._leave_out

    def check_met(self) -> None:
        """Raises TrainingError where the files name ids that no corpus has."""
        if self._unmet:
            first = ", ".join(map(repr, sorted(self._unmet)[:SHOWN]))
            raise TrainingError(
                f"data.only, data.leave_out: {len(self._unmet)} ids are of no item of the corpus, "
                f"such as {first}"
            )


def _id_file(name: str, path: str) -> IdFile | None:
    if not path:
        return None
    text, found = _read(name, path)
    if not _ids(text):
        raise TrainingError(f"{name}: {path} holds no id; one a line is wanted")
    return found


def _read(name: str, path: str) -> tuple[str, IdFile]:
    try:
        data = Path(path).read_bytes()
        return data.decode(), IdFile(path, hashlib.sha256(data).hexdigest())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{name}: {path} can't be read as a UTF-8 text: {error}") from error


def _ids(text: str) -> frozenset[str]:
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)

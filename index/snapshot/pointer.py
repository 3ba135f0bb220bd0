"""The pointer of an index, `CURRENT`: its last entry is active, those before it were.

One writer at a time holds the lock beside it; readers need none, for it is replaced in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hivlp.index.errors import SnapshotError, SnapshotMissing
from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.names import LOCK, POINTER, VERSION_PATTERN

HISTORY = 32
"""Activations remembered for rolling back."""


def read_history(folder: Path) -> list[str]:
    """Activations of the index in `folder`, oldest first; empty where there is no pointer.

    Raises SnapshotError for a pointer that can't be read.
    """
    try:
        text = (folder / POINTER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(folder.name, POINTER, f"unreadable pointer: {error}") from error
    try:
        return parse_history(text)
    except ValueError as error:
        raise SnapshotError(folder.name, POINTER, f"unreadable pointer: {error}") from error


def parse_history(text: str) -> list[str]:
    """The activations in a pointer's text. Raises ValueError."""
    try:
        history = json.loads(text)["history"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no history in it: {error}") from error
    if not isinstance(history, list) or not all(
        isinstance(v, str) and VERSION_PATTERN.fullmatch(v) for v in history
    ):
        raise ValueError("not a list of versions")
    return list(history)


def history_text(history: Sequence[str]) -> str:
    """The pointer's text for some activations, of which the newest are kept."""
    return json.dumps({"history": list(history[-HISTORY:])}) + "\n"


def write_history(folder: Path, history: Sequence[str]) -> None:
    """Replace the pointer in one step, durably; by whoever holds the lock."""
    replace_text(folder / POINTER, history_text(history))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer of what lies beside the versions at a time, among processes and threads.

    Raises SnapshotMissing where there is no such index, OSError for a store that is read-only.
    """
    if not folder.is_dir():
        raise SnapshotMissing(folder.name, POINTER, "no such index")
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

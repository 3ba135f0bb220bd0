"""Who takes part in activations: told by locks, which end with their process.

HOME/indexes/NAME/.activation/MEMBER.lock, .json   of one index: a `Member`
HOME/indexes/.activation/MEMBER.lock               of all indexes: an `Everywhere`

Notable: who serves every index of a home is a member of each, whether it has found it yet or not.
So an index that is new is ready in all of them before any serves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from hivlp.index.snapshot.activation_files import (
    FOLDER,
    LOCKED,
    SAID,
    Report,
    State,
    Tally,
    write_file,
)
from hivlp.index.snapshot.pointer import locked


def member_name() -> str:
    """A name for one that takes part, in activations of any index."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:12]}"


class Member:
    """One that takes part, from `Activations.join` to `leave` or the end of its process."""

    def __init__(self, folder: Path, serves: bool, name: str, new: bool) -> None:
        self.name = name
        self._folder = folder
        self._left = False
        self._changing = threading.Lock()
        state: State = "staging" if new else "serving"
        self._said = Report(request="", state=state, pid=os.getpid(), serves=serves, new=new)
        self._write()
        self._lock = os.open(self._path(LOCKED), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.leave()
            raise

    def report(self, request: str, state: State, reason: str = "") -> None:
        """Tell what was done about a request, unless it has left. Raises OSError."""
        with self._changing:
            update = {"request": request, "state": state, "reason": reason}
            self._said = self._said.model_copy(update=update)
            self._write()

    def begin(self) -> None:
        """Tell that it serves the index from now on. Raises OSError."""
        with self._changing:
            self._said = self._said.model_copy(update={"new": False})
            self._write()

    def tell_recall(self, recall: Mapping[str, Tally]) -> None:
        """Tell how its answers did, for all to sum up. Raises OSError."""
        with self._changing:
            if recall != self._said.recall:
                self._said = self._said.model_copy(update={"recall": dict(recall)})
                self._write()

    def _write(self) -> None:
        if not self._left:
            write_file(self._path(SAID), self._said)

    def leave(self) -> None:
        """Take part no longer."""
        with self._changing:
            self._left = True
        for suffix in (LOCKED, SAID):
            with contextlib.suppress(OSError):
                self._path(suffix).unlink()
        os.close(self._lock)

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self.name}{suffix}"


class Everywhere:
    """One that serves every index, from now to `leave` or the end of its process.

    Raises SnapshotError, and OSError for a store that is read-only or knows no locks.
    """

    def __init__(self, root: Path, name: str) -> None:
        folder = root / FOLDER
        self._path = folder / f"{name}{LOCKED}"
        with locked(root):
            folder.mkdir(exist_ok=True)
            _tidy(folder)
            unfinished = folder / f".{name}"
            self._lock = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unfinished.rename(self._path)  # only now: nobody sees one that isn't held yet
            except OSError:
                self.leave()
                unfinished.unlink(missing_ok=True)
                raise

    def leave(self) -> None:
        """Be it no longer."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._lock)


def living_everywhere(root: Path) -> list[str]:
    """Those that serve every index below `root` and live, sorted."""
    return [lock.stem for lock in sorted((root / FOLDER).glob(f"*{LOCKED}")) if is_held(lock)]


def is_held(lock: Path) -> bool:
    """Whether the process that took this lock lives."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # it has just left
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _tidy(folder: Path) -> None:
    """Remove what the dead left; nobody joins meanwhile."""
    for path in folder.iterdir():
        if not is_held(path):
            path.unlink(missing_ok=True)

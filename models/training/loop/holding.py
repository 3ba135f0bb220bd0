"""One `hivlp train` a folder: the process that writes holds a lock on it while it is at work."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from hivlp.models.errors import TrainingError
from hivlp.models.runtime.progress import say

LOCK = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made where there is none. The lock ends with the process.

    Raises TrainingError where another holds it. A file system that knows no locks is told of, and
    goes without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(
                f"{folder}: another hivlp train is at work there; wait for its end, or choose "
                "another --out"
            ) from error
        except OSError as error:
            say(f"{folder}: can't be locked ({error}); see to it that nobody else trains there")
        yield

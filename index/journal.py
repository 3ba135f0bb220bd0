"""What a command says to the program that started it: one JSON object a line, to a file or a pipe.

    {"step": "encode default", "unit": "item", "done": 128, "total": 4000, "rate": 31.2, ...}
    {"result": "done", "index": "default", "snapshot": "20260101T000000-000000", ...}

The last line says what came of it: `done`, `failed` with a `reason`, or `interrupted`. Who reads
none, because the process was killed, knows that as well. A disk that is full, or a reader that has
gone, ends the telling and never the work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from hivlp.models.errors import HivlpError
from hivlp.models.runtime.progress import Step, reporting


class Journal(Protocol):
    """Takes what came of the work."""

    def done(self, **what: Any) -> None:
        """The work is done, and this is what there is now."""


class _Unread:
    def done(self, **what: Any) -> None:
        """Nobody reads it."""


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def step(self, step: Step) -> None:
        self.write(dataclasses.asdict(step))

    def done(self, **what: Any) -> None:
        self.write({"result": "done", **what})


@contextmanager
def journal(path: Path | None) -> Iterator[Journal]:
    """Tell what is done within the block to `path` (None: to nobody). Raises OSError at the start.

    The block says `done` itself; what it raises is told here, and goes on.
    """
    if path is None:
        yield _Unread()
        return
    stream = path.open("w", encoding="utf-8")
    try:
        lines = _Lines(stream)
        with reporting(lines.step):
            try:
                yield lines
            except BaseException as error:
                lines.write(_ending(error))
                raise
    finally:
        with suppress(OSError):
            stream.close()


def _ending(error: BaseException) -> dict[str, Any]:
    if isinstance(error, KeyboardInterrupt):
        return {"result": "interrupted"}
    if isinstance(error, MemoryError):
        reason = f"out of memory: {str(error) or 'no more could be had'}"
    elif isinstance(error, HivlpError | OSError):
        reason = str(error)
    else:
        reason = f"{type(error).__name__}: {error}"
    return {"result": "failed", "reason": reason}

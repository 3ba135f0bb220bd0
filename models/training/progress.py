"""Progress of a long step: a bar on a terminal that someone watches, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

EVERY_S = 15.0


def say(line: str) -> None:
    """One line to stderr, at once."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts steps of one task: `with Progress("fitting", 300, "step") as progress: ...`."""

    def __init__(self, task: str, total: int, unit: str = "item") -> None:
        self._task, self._total, self._unit = task, total, unit
        self._done = 0
        self._began = time.monotonic()
        self._next = self._began + EVERY_S
        terminal = sys.stderr.isatty()
        self._bar = tqdm(desc=task, total=total, unit=unit) if terminal and total else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None and self._total:
            took = time.monotonic() - self._began
            say(f"{self._task}: {self._done} {self._unit}s in {took:.0f} s")

    def step(self, count: int = 1) -> None:
        """`count` more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            say(f"{self._task}: {self._done} of {self._total} {self._unit}s")

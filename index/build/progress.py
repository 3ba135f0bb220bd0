"""Progress for people: a bar where someone watches a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

EVERY_S = 10.0


class Progress:
    """Counts steps of one task to stderr; `quiet` says nothing at all."""

    def __init__(self, task: str, total: int | None, *, quiet: bool = False) -> None:
        self._task = task
        self._total = total
        self._done = 0
        self._quiet = quiet
        self._next = time.monotonic() + EVERY_S
        terminal = sys.stderr.isatty() and not quiet
        self._bar = tqdm(desc=task, total=total, unit="item") if terminal else None

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
        elif kind is None:
            self._say()

    def step(self, count: int = 1) -> None:
        """`count` more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() >= self._next:
            self._say()

    def _say(self) -> None:
        if self._quiet:
            return
        self._next = time.monotonic() + EVERY_S
        total = "" if self._total is None else f" of {self._total}"
        print(f"{self._task}: {self._done}{total}", file=sys.stderr, flush=True)

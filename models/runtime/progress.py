"""Progress of long work: a bar where someone watches a terminal, else a line every few seconds."""

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
    """Counts steps of one task to stderr: `with Progress("fitting", 300, "step") as progress: ...`.

    `total` may be unknown; `quiet` says nothing at all.
    """

    def __init__(
        self, task: str, total: int | None, unit: str = "item", *, quiet: bool = False
    ) -> None:
        self._task, self._total, self._unit, self._quiet = task, total, unit, quiet
        self._done = 0
        self._note = ""
        self._began = time.monotonic()
        self._next = self._began + EVERY_S
        terminal = sys.stderr.isatty() and not quiet
        self._bar = tqdm(desc=task, total=total, unit=unit) if terminal and total != 0 else None

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
        elif kind is None and self._done:
            took = time.monotonic() - self._began
            self._say(f"{self._done} {self._unit}s in {took:.0f} s")

    def step(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; `note` is said beside the count, here and until the next one."""
        self._done += count
        self._note = note or self._note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            total = "" if self._total is None else f" of {self._total}"
            told = f", {self._note}" if self._note else ""
            self._say(f"{self._done}{total} {self._unit}s{told}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            say(f"{self._task}: {line}")

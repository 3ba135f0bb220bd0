"""Progress of long work: a bar where someone watches a terminal, else a line every few seconds.

A program that watches is told too, whatever is said on the terminal:

    with reporting(tell): ...      # `tell` gets a `Step` at each one's begin, end and in between
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

from tqdm import tqdm

EVERY_S = 15.0
REPORT_S = 0.5
"""A program that watches is told so often."""
PACE_S = 30.0
"""What `rate` looks back on: what came out of a cache at first says nothing about the rest."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far one step of long work is. `total` is None where nobody knows, `rate` a second."""

    step: str
    unit: str | None = None
    done: int = 0
    total: int | None = None
    rate: float | None = None
    seconds_left: float | None = None


Report = Callable[[Step], None]
_report: ContextVar[Report | None] = ContextVar("hivlp_progress_report", default=None)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Have `report` told of every step that this thread begins within the block."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def begin(step: str) -> None:
    """A step has begun that counts nothing."""
    if (report := _report.get()) is not None:
        report(Step(step))


def say(line: str) -> None:
    """One line to stderr, at once."""
    print(line, file=sys.stderr, flush=True)


class _Pace:
    """How many a second were done lately."""

    def __init__(self, now_s: float) -> None:
        self._seen = deque([(now_s, 0)])

    def rate(self, now_s: float, done: int) -> float | None:
        """By now, when so many are done; None before there is anything to tell by."""
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= PACE_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        self._seen.append((now_s, done))
        return (done - before) / (now_s - since_s) if now_s > since_s and done > before else None


class Progress:
    """Counts steps of one task to stderr: `with Progress("fitting", 300, "step") as progress: ...`.

    `total` may be unknown; `quiet` says nothing at all to whoever reads stderr.
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
        self._report = _report.get()
        self._pace = _Pace(self._began)
        self._told = self._began
        self._tell(self._began)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tell(time.monotonic())
        if self._bar is not None:
            self._bar.close()
        elif kind is None and self._done:
            took = time.monotonic() - self._began
            self._say(f"{self._done} {self._unit}s in {took:.0f} s")

    def step(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; `note` is said beside the count, here and until the next one."""
        self._done += count
        self._note = note or self._note
        now = time.monotonic()
        if now >= self._told + REPORT_S:
            self._tell(now)
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif now >= self._next:
            self._next = now + EVERY_S
            total = "" if self._total is None else f" of {self._total}"
            told = f", {self._note}" if self._note else ""
            self._say(f"{self._done}{total} {self._unit}s{told}")

    def _tell(self, now_s: float) -> None:
        """Tell the program that watches, if any."""
        self._told = now_s
        if self._report is None:
            return
        rate = self._pace.rate(now_s, self._done)
        left = None if self._total is None else max(0, self._total - self._done)
        seconds = None if left is None or rate is None else left / rate
        self._report(Step(self._task, self._unit, self._done, self._total, rate, seconds))

    def _say(self, line: str) -> None:
        if not self._quiet:
            say(f"{self._task}: {line}")

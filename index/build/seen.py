"""Which ids were seen before, in 8 bytes each: sorted arrays of 64-bit hashes."""

from __future__ import annotations

import numpy as np

from hivlp.index.snapshot.catalogue import HashArray

FRESH = 32_768
GROWTH = 4


class SeenHashes:
    """A set of 64-bit numbers that only grows: 8 bytes a number, 24 while runs are merged.

    The newest FRESH numbers are a Python set; full, it becomes a sorted run, and runs of like size
    are merged, so that there are only a few to look into.
    """

    def __init__(self) -> None:
        self._fresh: set[int] = set()
        self._runs: list[HashArray] = []

    def add(self, number: int) -> bool:
        """Add a number; whether it was there already."""
        if number in self:
            return True
        self._fresh.add(number)
        if len(self._fresh) >= FRESH:
            self._settle()
        return False

    def __contains__(self, number: int) -> bool:
        if number in self._fresh:
            return True
        wanted = np.uint64(number)
        for run in self._runs:
            place = run.searchsorted(wanted)
            if place < len(run) and run[place] == wanted:
                return True
        return False

    def _settle(self) -> None:
        run = np.fromiter(self._fresh, dtype=np.uint64, count=len(self._fresh))
        run.sort()
        self._fresh.clear()
        while self._runs and len(self._runs[-1]) < GROWTH * len(run):
            run = np.concatenate((self._runs.pop(), run))
            run.sort(kind="stable")  # merges runs that are sorted already
        self._runs.append(run)

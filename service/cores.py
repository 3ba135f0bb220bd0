"""Whether a core is free for the second half of a search, also where several processes serve.

A process knows what its own workers do. With as many processes as cores each has one worker, and
would never find a core free: so each writes how many of its workers are busy into memory that all
of them read. Nobody waits for anybody; a count that is out of date for a moment costs one search a
little time.
"""

from __future__ import annotations

import ctypes
from multiprocessing.context import BaseContext
from typing import Protocol


class Cores(Protocol):
    """The cores that a process may keep busy, alone or with others."""

    def tell(self, busy: int) -> None:
        """So many of the process's workers are at work."""

    def free(self) -> bool:
        """Whether fewer workers are at work than there are cores."""


class OwnCores:
    """Those of the only process that serves."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._busy = 0

    def tell(self, busy: int) -> None:
        """So many workers are at work."""
        self._busy = busy

    def free(self) -> bool:
        """Whether there are more cores than that."""
        return self._busy < self._count


class SharedCores:
    """Those of all processes: one count for each, which only its own process writes.

    Made by the parent, which clears the count of a process that died.
    """

    def __init__(self, context: BaseContext, processes: int, count: int) -> None:
        self._count = count
        self._busy = context.RawArray(ctypes.c_uint16, processes)

    def seat(self, place: int) -> Seat:
        """What the process in this place is given as it begins."""
        return Seat(self, place)

    def clear(self, place: int) -> None:
        """Nobody is at work there any more."""
        self._busy[place] = 0

    def tell(self, place: int, busy: int) -> None:
        """So many of its workers are at work."""
        self._busy[place] = busy

    def free(self) -> bool:
        """Whether there are more cores than workers at work in all of them."""
        return sum(self._busy) < self._count


class Seat:
    """Shared cores as one process sees them."""

    def __init__(self, shared: SharedCores, place: int) -> None:
        self._shared, self._place = shared, place

    def tell(self, busy: int) -> None:
        """So many workers of this process are at work."""
        self._shared.tell(self._place, busy)

    def free(self) -> bool:
        """Whether a core is free, whoever's."""
        return self._shared.free()

"""A serving process's sign of life: its event loop counts, in memory that its parent reads too.

The parent measures silence by what it sees at its own looks, not by a clock of the child's: where
all of them stood still together, as in a machine that was paused, nobody was silent.
"""

from __future__ import annotations

import ctypes
from multiprocessing.context import BaseContext

LOOK_S = 1.0
"""So often the parent looks."""


class Pulse:
    """One count, shared with a process that it is sent to as it begins. Writing it costs nothing
    that waits: it is memory.
    """

    def __init__(self, context: BaseContext) -> None:
        self._count = context.RawValue(ctypes.c_uint64, 0)

    @property
    def count(self) -> int:
        """How often it has beaten; 0 before it does, and again at rest."""
        return int(self._count.value)

    def beat(self) -> None:
        """The event loop has come round."""
        self._count.value += 1

    def rest(self) -> None:
        """It will not beat any more, and that is no trouble."""
        self._count.value = 0


class Silence:
    """How long a pulse hasn't been felt, by whoever looks every `LOOK_S` or oftener."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._seen = 0
        self._looked_s: float | None = None
        self._silent_s = 0.0

    def look(self, now_s: float) -> float:
        """Seconds without a beat by now; 0 of one that rests.

        Time in which nobody looked counts as little more than a look: the parent may have been
        stopped, and its children with it.
        """
        count = self._pulse.count
        since_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if count == self._seen and count:
            self._silent_s += min(since_s, 2 * LOOK_S)
        else:
            self._silent_s = 0.0
        self._seen, self._looked_s = count, now_s
        return self._silent_s

"""Which picture stands where in a run: one shuffled pass after another, as one long line.

Notable: nothing is remembered. Position p of the line belongs to pass p // n, and the order of a
pass follows from the seed and its number, so a run that goes on at any step, in any number of
loading workers, draws what it would have drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ORDER, DRAW, SHARDS, BUFFER, REPLACEMENT = range(5)
"""What a random stream is for, so that no two share one."""
Places = npt.NDArray[np.int64]


def stream(seed: int, purpose: int, *keys: int) -> np.random.Generator:
    """The random numbers of one purpose at one place; equal keys give equal numbers."""
    return np.random.default_rng((seed, purpose, *keys))


class EpochOrder:
    """Numbers 0..count-1 in a new order for each pass; the orders of two passes are kept."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._passes: dict[int, Places] = {}

    def at(self, position: int) -> tuple[int, int]:
        """Pass and number of what stands at a position, both from 0."""
        epoch, place = divmod(position, self._count)
        if epoch not in self._passes:
            kept = {e: order for e, order in self._passes.items() if abs(e - epoch) == 1}
            shuffled = stream(self._seed, ORDER, epoch).permutation(self._count)
            self._passes = {**kept, epoch: shuffled}
        return epoch, int(self._passes[epoch][place])


def batch_positions(step: int, process: int, processes: int, size: int) -> range:
    """Positions of one process's batch; together, batches of a step are one run of the line.

    So a batch of 2n on one process holds what two processes with n each hold, in the same order.
    """
    first = (step * processes + process) * size
    return range(first, first + size)

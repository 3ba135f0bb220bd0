"""How far a run is, and the learning rate that belongs to it.

Notable: a run that is bounded by time is planned. Its first steps are timed, and the rest is laid
out to end, with the learning rate as low as it should be, shortly before the time is over. The plan
is kept in checkpoints and rates follow from it alone, so a run that goes on does so at the same
rates. It is made anew only where the machine has become too slow for it, or so fast that much time
would be left. Seconds are counted over all sittings of a run, and the first process's count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from hivlp.models.training.loop.settings import TrainSettings

UNTIMED, TIMED = 3, 10
"""Steps of a sitting that pass before timing starts, and the fewest that are timed."""
TIMED_SHARE, MOST_TIMED_S = 0.02, 60.0
"""Timing takes this share of the time allowed, and no longer than this."""
WASTE = 0.1
"""The share of the time that a plan may leave unused before it is made anew."""
RESERVE = 0.02
"""The share of the time that a plan leaves free, for checkpoints and for slower steps."""


class Clock:
    """Seconds of training, those of earlier sittings included."""

    def __init__(self, before: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._before, self._now, self._began = before, now, now()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._before + self._now() - self._began


@dataclass(frozen=True, slots=True)
class Plan:
    """From step `start` on, where the share `done` was over, evenly up to step `steps`.

    `timed`: whether it was made from timed steps.
    """

    steps: int
    start: int = 0
    done: float = 0.0
    timed: bool = False

    def progress(self, step: int) -> float:
        """The share that is over after `step` steps, 1 at the end."""
        if step >= self.steps:
            return 1.0
        return self.done + (1.0 - self.done) * (step - self.start) / (self.steps - self.start)


class Planner:
    """Keeps a run within `max_seconds`; where that is infinite, its plan stays as it is."""

    def __init__(self, plan: Plan, max_seconds: float, most_steps: int, step: int) -> None:
        """A sitting that begins with step `step` (from 0); a plan has at most `most_steps`."""
        self.plan = plan
        self._most, self._most_steps = max_seconds, most_steps
        self._first = step + UNTIMED
        self._from = math.inf  # seconds at step `_first`

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is over after `step` steps, which began at `seconds`.

        By the plan; until there is one, by the time.
        """
        done = self.plan.progress(step)
        return done if self.plan.timed else min(max(done, seconds / self._most), 1.0)

    def look(self, step: int, seconds: float) -> bool:
        """Plan where it is time to, before step `step` at `seconds`; whether that was done."""
        if math.isinf(self._most):
            return False
        if step <= self._first:
            self._from = seconds if step == self._first else math.inf
            return False
        took, timed = seconds - self._from, step - self._first
        if timed < TIMED or took < min(self._most * TIMED_SHARE, MOST_TIMED_S):
            return False
        pace = max(took / timed, 1e-9)
        if self.plan.timed and self._suits(seconds + pace * (self.plan.steps - step)):
            return False
        reserve = RESERVE * (self._most - seconds if self.plan.timed else self._most)
        left = max(self._most - seconds - reserve, 0.0)
        steps = min(self._most_steps, step + max(1, int(left / pace)))
        self.plan = Plan(steps, step, self.progress(step, seconds), timed=True)
        self._first, self._from = step, seconds  # what comes is timed afresh
        return True

    def _suits(self, ends: float) -> bool:
        """Whether a plan that ends at `ends` seconds is as good as a new one."""
        early = ends < self._most * (1.0 - WASTE) and self.plan.steps < self._most_steps
        return not early and ends <= self._most


def learning_rate(done: float, settings: TrainSettings) -> float:
    """Linear from 0 to `learning_rate` over the warm-up's share, then linear to the last one."""
    if done < settings.warm_up:
        return settings.learning_rate * done / settings.warm_up
    left = (1.0 - done) / (1.0 - settings.warm_up)
    low = settings.last_learning_rate
    return low + (settings.learning_rate - low) * max(left, 0.0)


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every group of weights this learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate

"""Steps of an optimiser: a learning rate that rises, then falls as a cosine; a limit in seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hivlp.models.runtime.progress import say

WARM_UP = 0.1


class Deadline:
    """When a fit must be done. `math.inf` seconds for never."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end


class Steps:
    """Runs AdamW up to step `total`, from `start` on; ends early at the deadline."""

    def __init__(
        self,
        groups: Iterable[tuple[Iterable[nn.Parameter], float]],
        *,
        total: int,
        weight_decay: float,
        deadline: Deadline,
        start: int = 0,
    ) -> None:
        rated = [{"params": list(found), "lr": rate} for found, rate in groups if rate > 0]
        self.optimiser = torch.optim.AdamW(rated, weight_decay=weight_decay)
        self._rates = [group["lr"] for group in self.optimiser.param_groups]
        self._start, self._total = start, total
        self._deadline = deadline

    def __iter__(self) -> Iterator[int]:
        """Step numbers from `start`, each at its learning rate."""
        for step in range(self._start, self._total):
            if self._deadline.over:
                say(f"the time limit cuts this short, after {step} of {self._total} steps")
                return
            share = learning_share((step + 1) / self._total)
            for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
                group["lr"] = rate * share
            yield step

    def take(self, loss: Tensor) -> None:
        """One step down the gradient of `loss`."""
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()


def learning_share(done: float) -> float:
    """The share of the learning rate after the share `done` of all steps, both 0..1."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * (done - WARM_UP) / (1.0 - WARM_UP)))

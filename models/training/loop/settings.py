"""Settings of the training loop: the section `train` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hivlp.models.errors import TrainingError
from hivlp.models.fields import MOST, number

PrecisionChoice = Literal["auto", "fp32", "bf16"]
Only = Literal["everything", "early"]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Steps, rates and records of a run. The defaults are HiVLP's, see docs/papers.md.

    `batch` pictures a process, `accumulation` batches a step. A run ends after `epochs` passes, or
    `steps` steps (0: no such limit), or `max_seconds`, whichever is first; its learning rate ends
    at `last_learning_rate` in each case. `clip` is the largest length of the gradient, 0: any.
    `precision` auto is bf16 on a GPU that has it, else fp32. `from_` is a run's folder or a
    checkpoint to start from, which a recipe with `needs_from` can't do without; `only` early trains
    its early heads alone, on layers that stay as they are. `seed` decides everything that is drawn.
    """

    seed: int = number(0, 0, 2**63 - 1)
    from_: str = ""
    needs_from: bool = False
    only: Only = "everything"
    epochs: float = number(10, 0.001, 10**6, "passes")
    steps: int = number(0, 0, unit="steps")
    max_seconds: float = number(math.inf, 1, math.inf, "s")
    batch: int = number(32, 1, 10**6, "pictures a process")
    accumulation: int = number(6, 1, 10**6, "batches a step")
    learning_rate: float = number(1e-4, 1e-12, 10)
    last_learning_rate: float = number(1e-5, 0, 10)
    warm_up: float = number(0.1, 0, 0.99, "share of the run")
    beta1: float = number(0.9, 0, 0.9999)
    beta2: float = number(0.98, 0, 0.99999)
    eps: float = number(1e-8, 1e-15, 1)
    weight_decay: float = number(0.01, 0, 10)
    clip: float = number(1.0, 0, MOST, "length")
    precision: PrecisionChoice = "auto"
    checkpoint_seconds: float = number(600, 0, MOST, "s")
    keep: int = number(2, 1, 1000, "checkpoints")
    log_steps: int = number(10, 1, 10**6, "steps")

    def __post_init__(self) -> None:
        if self.only == "early" and not self.from_:
            raise TrainingError("only: early heads alone are trained on a run that `from` names")
        if self.last_learning_rate > self.learning_rate:
            raise TrainingError(
                f"last_learning_rate: {self.last_learning_rate:g} is more than learning_rate, "
                f"{self.learning_rate:g}"
            )

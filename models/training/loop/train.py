"""The training loop: steps of a run, whichever machine, and what it leaves behind.

Notable: what torch draws in a batch (dropout, hard negatives) is seeded by the run's seed, the
batch's number and the process, so nothing but weights, AdamW's moments and the step number has to
be kept for a run to go on as if it had never been killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hivlp.models.errors import TrainingError
from hivlp.models.network.hivlp import Hivlp
from hivlp.models.runtime.progress import Progress, say
from hivlp.models.training.hivlp_losses import Batch, LossSettings, hivlp_losses
from hivlp.models.training.loop.checkpoints import (
    Checkpoints,
    RunState,
    check_processes,
    load_model,
    load_optimiser,
)
from hivlp.models.training.loop.curves import Curves
from hivlp.models.training.loop.gather import gather
from hivlp.models.training.loop.optimiser import make_optimiser
from hivlp.models.training.loop.schedule import Clock, Plan, Planner, learning_rate, set_rate
from hivlp.models.training.loop.start import (
    Run,
    make_loader,
    make_model,
    weights_of,
)
from hivlp.models.training.recipe import losses_of

TOTAL = "total"


class Losses(nn.Module):
    """The model with its losses as one module, so that forward and backward are one whole for
    DistributedDataParallel.
    """

    def __init__(self, model: Hivlp, settings: LossSettings) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Fields of a `Batch` in, losses by name out."""
        return hivlp_losses(self.model, Batch(**tensors), self.settings, gather)


def seed_batch(seed: int, batch: int, process: int) -> None:
    """Seed torch for one batch of one process."""
    sequence = np.random.SeedSequence((seed, batch, process))
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))


@dataclass(slots=True)
class Window:
    """Sums since the last line of the curves."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0
    steps: int = 0
    gradient: float = 0.0
    began: float = 0.0

    def add(self, losses: dict[str, Tensor]) -> None:
        """Losses of one batch."""
        self.batches += 1
        for name, loss in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss.detach()

    def means(self) -> dict[str, float]:
        """Each loss a batch."""
        return {name: float(loss) / self.batches for name, loss in self.losses.items()}


class Trainer:
    """One run on one process."""

    def __init__(self, run: Run) -> None:
        self.run, self.train = run, run.recipe.train
        self.checkpoints = Checkpoints(run.folder, self.train.keep)
        self.state = RunState(0, 0.0, run.processes, Plan(run.steps))
        newest = self.checkpoints.newest()
        self.model = make_model(run, begun=newest is not None)
        if newest is not None:
            self.state = newest[1]
            check_processes(self.state, run.processes)
            load_model(newest[0], self.model)
        losses = Losses(self.model, losses_of(run.recipe))
        self.losses = run.accelerator.prepare(losses)
        self.optimiser = make_optimiser(self.model, self.train)
        if newest is not None:
            load_optimiser(newest[0], self.model, self.optimiser)
        self.weights = weights_of(self.model)
        self.clock = Clock(self.state.seconds)
        self.planner = Planner(self.state.plan, self.train.max_seconds, run.steps, self.state.step)

    def fit(self) -> RunState:
        """Take the steps that are left; returns the state at the end. Raises TrainingError."""
        run, start = self.run, self.state.step
        if self.state.finished:
            return self.state
        batches = iter(make_loader(run, self.model, start))
        with (
            Progress("training", self._known_steps(), "step", quiet=not run.first) as told,
            Curves(run.folder, start) if run.first else nullcontext() as curves,
        ):
            step = self._steps(batches, told, curves)
        self._save(step, self.clock.seconds, finished=True)
        return self.state

    def _known_steps(self) -> int | None:
        """Steps that are left, where that depends on no time."""
        known = math.isinf(self.train.max_seconds)
        return self.planner.plan.steps - self.state.step if known else None

    def _steps(self, batches: Iterator[dict[str, Tensor]], told: Progress, curves: Any) -> int:
        """Steps until the run is over; returns their number, earlier sittings included."""
        step, saved = self.state.step, self.clock.seconds
        window = Window(began=saved)
        while True:
            seconds = self._agreed_seconds()
            saving = step > self.state.step and seconds - saved >= self.train.checkpoint_seconds
            if self.planner.look(step, seconds) and self.run.first:
                say(f"planned: {self.planner.plan.steps} steps in {self.train.max_seconds:.0f} s")
            if saving:
                self._save(step, saved := seconds)
            if step >= self.planner.plan.steps or seconds >= self.train.max_seconds:
                return step
            done = self.planner.progress(step + 1, seconds)
            set_rate(self.optimiser, learning_rate(done, self.train))
            self._step(step, batches, window)
            step += 1
            if curves is not None:
                window = self._tell(step, done, window, told, curves)

    def _step(self, step: int, batches: Iterator[dict[str, Tensor]], window: Window) -> None:
        accelerator, count = self.run.accelerator, self.train.accumulation
        for batch in range(step * count, (step + 1) * count):
            last = batch == (step + 1) * count - 1
            device = accelerator.device
            tensors = {n: t.to(device, non_blocking=True) for n, t in next(batches).items()}
            seed_batch(self.train.seed, batch, accelerator.process_index)
            # gradients are averaged over processes once a step
            with nullcontext() if last else accelerator.no_sync(self.losses):
                losses = self.losses(**tensors)
                accelerator.backward(losses[TOTAL] / count)
            window.add(losses)
        length = accelerator.clip_grad_norm_(self.weights, self.train.clip or math.inf)
        window.gradient += checked_gradient(float(length), step + 1)
        window.steps += 1
        self.optimiser.step()
        self.model.temperature.hold()
        self.optimiser.zero_grad(set_to_none=True)

    def _agreed_seconds(self) -> float:
        """Seconds of the first process's clock, in every process."""
        seconds = self.clock.seconds
        if self.run.processes == 1 or math.isinf(self.train.max_seconds):
            return seconds
        from accelerate.utils import broadcast

        told = torch.tensor([seconds], device=self.run.accelerator.device)
        return float(broadcast(told, from_process=0))

    def _tell(
        self, step: int, done: float, window: Window, told: Progress, curves: Curves
    ) -> Window:
        """Progress after a step, a line of the curves now and then; the window to go on with."""
        if step % self.train.log_steps and step != self.planner.plan.steps:
            told.step()
            return window
        run, train, seconds = self.run, self.train, self.clock.seconds
        a_step = train.batch * train.accumulation * run.processes
        rate = window.steps * a_step / max(seconds - window.began, 1e-9)
        means = window.means()
        curves.write(
            {
                "step": step,
                "epoch": round(step * a_step / run.pictures, 4),
                "seconds": round(seconds, 2),
                "progress": round(done, 6),
                "learning_rate": self.optimiser.param_groups[0]["lr"],
                "gradient": window.gradient / window.steps,
                "pictures_per_second": round(rate, 2),
                "losses": means,
            }
        )
        steps = self.planner.plan.steps
        left = (steps - step) * (seconds - window.began) / window.steps
        told.step(
            note=f"step {step} of {steps}, loss {means[TOTAL]:.3f}, {rate:.0f} pictures/s, "
            f"{min(left, self.train.max_seconds - seconds) / 60:.0f} min left"
        )
        return Window(began=seconds)

    def _save(self, step: int, seconds: float, *, finished: bool = False) -> None:
        plan, processes = self.planner.plan, self.run.processes
        self.state = RunState(step, seconds, processes, plan, finished)
        if self.run.first:
            self.checkpoints.save(self.model, self.optimiser, self.state)


def checked_gradient(length: float, step: int) -> float:
    """The gradient's length. Raises TrainingError where it is none, before weights are lost."""
    if not math.isfinite(length):
        raise TrainingError(
            f"step {step}: the gradient is {length}; the weights of the last checkpoint are kept. "
            "A lower train.learning_rate or train.clip, or train.precision = fp32, may help"
        )
    return length


def train(run: Run) -> RunState:
    """Train until a run is over, going on where it was left; returns its state.

    Raises HivlpError; OSError where a checkpoint can't be written.
    """
    trainer = Trainer(run)
    before = trainer.state
    if run.first and before.finished:
        say(f"{run.folder}: finished before, after {before.step} steps")
    elif run.first and before.step:
        say(f"{run.folder}: goes on after step {before.step} of {before.plan.steps}")
    state = trainer.fit()
    run.accelerator.wait_for_everyone()
    return state

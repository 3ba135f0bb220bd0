"""Early layers trained together with their early heads, towards what the frozen model says.

Notable: later stages read those layers too, so the finest answer is part of the loss and must stay
what the frozen tower gave; gradients run through the layers above, which stay as they are, and so
does the finest head. No label is used, any input teaches. A step's draws follow from the seed and
its number, so a run that was killed ends with the weights of one that never stopped.

Memory: the tower, three more of each trained weight (gradient, AdamW's two moments), and what one
batch leaves in every layer. Time: steps of a whole forward and backward pass, `max_seconds` a
tower at most. Inputs are read again at every step, pictures decoded from their files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hivlp.models.network.exits import TowerExits
from hivlp.models.network.tower import Tensors, first_layers, mark_retrained
from hivlp.models.objectives.hierarchical import nested_levels
from hivlp.models.objectives.score_distillation import score_distillation_loss
from hivlp.models.runtime.progress import Progress, say
from hivlp.models.training.distil import Student, embed_all, level_targets
from hivlp.models.training.features import TowerExit, input_reader
from hivlp.models.training.fitting import Heads
from hivlp.models.training.loop.checkpoints import (
    Checkpoints,
    RunState,
    load_model,
    load_optimiser,
)
from hivlp.models.training.loop.schedule import Plan
from hivlp.models.training.schedule import Deadline, Steps
from hivlp.models.training.settings import FitSettings

KEPT_CHECKPOINTS = 2
SEED_STRIDE = 1_000_003
"""Between the seeds of two steps' dropout."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A tower, how many of its first layers are trained, and what on.

    `raw`: what lies behind the rows of `student`, texts or paths of pictures.
    """

    reading: TowerExit
    layers: int
    student: Student
    raw: Sequence[str] | Sequence[Path]
    epochs: int
    batch: int

    @property
    def total(self) -> int:
        """How many steps that makes."""
        return self.epochs * max(1, round(float(self.student.weights.sum()) / self.batch))


class _Trained(nn.Module):
    """What is trained of a tower with its exits, and nothing else."""

    def __init__(self, exits: TowerExits, layers: int) -> None:
        super().__init__()
        self.layers = first_layers(exits.tower, layers).requires_grad_(True)
        self.heads = nn.ModuleList(exits.exit_heads[:-1]).requires_grad_(True)


class _Aims:
    """What every level should answer: targets and galleries of the frozen model, coarse first."""

    def __init__(self, student: Student, heads: Heads, settings: FitSettings) -> None:
        whole = embed_all(heads[-1], student.features[-1])
        early = level_targets(whole, student.aim, settings.dims[:-1], settings.distil.aim_ridge)
        self.targets = [*early, torch.from_numpy(whole)]
        self.galleries = nested_levels(torch.from_numpy(student.gallery), settings.dims)
        self._sample = min(settings.distil.gallery_sample, len(student.gallery))
        self._weight, self._keep = settings.distil.score_weight, settings.unfreeze.keep

    def loss(self, found: Sequence[Tensor], rows: Tensor, rng: np.random.Generator) -> Tensor:
        """Of answers to some rows, (n, dim) a level: the early ones' sum, and the kept one's."""
        chosen = rng.choice(len(self.galleries[0]), self._sample, replace=False)
        seen = torch.from_numpy(chosen)
        losses = [
            score_distillation_loss(answer, target[rows], gallery[seen], weight=self._weight)
            for answer, target, gallery in zip(found, self.targets, self.galleries, strict=True)
        ]
        losses[-1] = losses[-1] * self._keep
        return torch.stack(losses).sum()


def unfreeze(lesson: Lesson, heads: Heads, settings: FitSettings, folder: Path) -> None:
    """Train layers 1..`lesson.layers` and the early `heads` in place; mark the tower as retrained.

    Every now and then a checkpoint goes to `folder`; one that is there is gone on from. Raises
    OSError where none can be written, and TrainingError for a tower that has no such layers.
    """
    exits = TowerExits(lesson.reading.tower, lesson.reading.exits, heads)
    trained = _Trained(exits, lesson.layers)
    checkpoints = Checkpoints(folder, KEPT_CHECKPOINTS)
    newest = checkpoints.newest()
    state = RunState(0, 0.0, 1, Plan(lesson.total)) if newest is None else newest[1]
    chosen = settings.unfreeze
    steps = Steps(
        [
            (trained.layers.parameters(), chosen.learning_rate),
            (trained.heads.parameters(), chosen.head_rate),
        ],
        total=lesson.total,
        weight_decay=chosen.weight_decay,
        deadline=Deadline(settings.max_seconds - state.seconds),
        start=state.step,
    )
    if newest is not None:
        load_model(newest[0], trained)
    if not state.finished:
        if newest is not None:
            load_optimiser(newest[0], trained, steps.optimiser)
        aims = _Aims(lesson.student, heads, settings)
        _train(lesson, exits, trained, aims, steps, checkpoints, state, settings)
    for head in heads:
        head.eval().requires_grad_(False)
    mark_retrained(exits.tower)


def _train(
    lesson: Lesson,
    exits: TowerExits,
    trained: _Trained,
    aims: _Aims,
    steps: Steps,
    checkpoints: Checkpoints,
    state: RunState,
    settings: FitSettings,
) -> None:
    modality = lesson.reading.tower.modality
    read = input_reader(lesson.reading.tower)
    shares = np.cumsum(lesson.student.weights / lesson.student.weights.sum())
    begun = saved = time.monotonic()
    done = state.step
    if done:
        say(f"unfrozen {modality} layers: going on after step {done} of {lesson.total}")

    def save(*, finished: bool = False) -> None:
        spent = state.seconds + time.monotonic() - begun
        checkpoints.save(trained, steps.optimiser, RunState(done, spent, 1, state.plan, finished))

    # the tower stays in inference mode: measured statistics and no dropout; heads have theirs
    trained.heads.train()
    with Progress(f"training {modality} layers 1..{lesson.layers}", lesson.total, "step") as bar:
        bar.step(done)
        for step in steps:
            rng = np.random.default_rng((settings.seed, step))
            torch.manual_seed((settings.seed + SEED_STRIDE * step) % 2**63)
            drawn = np.searchsorted(shares, rng.random(lesson.batch))
            rows = np.minimum(drawn, len(shares) - 1)
            arrays = read([lesson.raw[row] for row in rows])
            inputs: Tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
            steps.take(aims.loss(exits(inputs), torch.from_numpy(rows), rng))
            done = step + 1
            bar.step()
            if time.monotonic() - saved >= settings.unfreeze.checkpoint_seconds:
                save()
                saved = time.monotonic()
    save(finished=True)

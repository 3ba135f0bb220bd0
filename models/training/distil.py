"""Early heads, fitted without labels to what the finest embedding says of a gallery.

Any input teaches. A level's gallery holds the first dims[l] numbers of each vector, so a query's
target there is not its own first numbers but what scores those most like the full vectors score
(`score_map`): the numbers left out are in part told by those kept.
Each head starts as the ridge regression onto its targets, so that training begins where a straight
line ends. The finest head is not touched, and with it the gallery stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hivlp.models.levels import FloatArray
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.objectives.hierarchical import nested_levels
from hivlp.models.objectives.score_distillation import score_distillation_loss
from hivlp.models.runtime.progress import Progress
from hivlp.models.training.closed_form import ridge, score_map, standard_directions
from hivlp.models.training.schedule import Deadline, Steps
from hivlp.models.training.settings import DistilSettings

ENCODED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Student:
    """One modality's data for distillation.

    `features`: one (n, width) float32 per exit, coarse first, the finest last. `weights` (n,)
    float32: how often each row is drawn, relative to the others. `gallery` (g, D): full vectors to
    score against. `aim`: the galleries whose full scores a level should give, (g, D) each.
    """

    modality: str
    features: Sequence[FloatArray]
    weights: FloatArray
    gallery: FloatArray
    aim: Sequence[FloatArray]


def embed_all(head: ExitHead, features: FloatArray) -> FloatArray:
    """Embeddings of many rows: (n, width) in, (n, dim) float32 L2-normalised out."""
    with torch.no_grad():
        parts = [
            head.eval().embed(torch.from_numpy(features[start : start + ENCODED_AT_ONCE])).numpy()
            for start in range(0, len(features), ENCODED_AT_ONCE)
        ]
    return np.concatenate([np.zeros((0, head.shape.dim), np.float32), *parts])


def fit_early_heads(
    student: Student,
    finest: ExitHead,
    dims: Sequence[int],
    settings: DistilSettings,
    *,
    epochs: int,
    dropout: float,
    penalty: float,
    seed: int,
    deadline: Deadline,
) -> list[ExitHead]:
    """Heads of every exit but the finest, coarse first: (n, width) to (n, dims[level])."""
    torch.manual_seed(seed)
    whole = embed_all(finest, student.features[-1])
    targets = level_targets(whole, student.aim, dims[:-1], settings.aim_ridge)
    galleries = nested_levels(torch.from_numpy(student.gallery), dims[:-1])
    heads = [
        _start(rows, target.numpy(), settings, dropout, penalty)
        for rows, target in zip(student.features[:-1], targets, strict=True)
    ]
    if heads:
        _train(student, heads, targets, galleries, settings, epochs, seed, deadline)
    return [head.eval() for head in heads]


def level_targets(
    finest: FloatArray, aim: Sequence[FloatArray], dims: Sequence[int], penalty: float
) -> list[Tensor]:
    """What early queries should answer: one (n, dim) float32 of length 1 for each of `dims`.

    `finest` (n, D) are full queries. With a penalty of 0 their plain prefixes.
    """
    if not penalty:
        return nested_levels(torch.from_numpy(finest), dims)
    maps = [torch.from_numpy(score_map(aim, dim, penalty)) for dim in dims]
    return [F.normalize(torch.from_numpy(finest) @ each.T, dim=1) for each in maps]


def _start(
    features: FloatArray,
    target: FloatArray,
    settings: DistilSettings,
    dropout: float,
    penalty: float,
) -> ExitHead:
    """A head that is the best straight line: (n, width) and (n, dim) in."""
    mean, basis = standard_directions(features, features.shape[1])
    shape = HeadShape(
        features.shape[1],
        basis.shape[1],
        target.shape[1],
        settings.hidden,
        settings.layers,
        dropout,
    )
    head = ExitHead(shape)
    reduced: FloatArray = np.asarray((features - mean) @ basis, dtype=np.float32)
    weight, bias = ridge(reduced, target, penalty)
    with torch.no_grad():
        head.shift.copy_(torch.from_numpy(mean))
        # ridge wants rows of length 1, the MLP wants features of variance 1
        unit = float(np.sqrt(features.shape[1]))
        head.set_basis(torch.from_numpy(basis * unit))
        head.line.weight.copy_(torch.from_numpy(weight / unit))
        head.line.bias.copy_(torch.from_numpy(bias))
    return head


def _reduced(head: ExitHead, features: FloatArray) -> Tensor:
    """The fixed part of a head on many rows: (n, width) in, (n, kept) out."""
    with torch.no_grad():
        return torch.cat(
            [
                head.reduce(torch.from_numpy(features[start : start + ENCODED_AT_ONCE]))
                for start in range(0, len(features), ENCODED_AT_ONCE)
            ]
        )


def _train(
    student: Student,
    heads: Sequence[ExitHead],
    targets: Sequence[Tensor],
    galleries: Sequence[Tensor],
    settings: DistilSettings,
    epochs: int,
    seed: int,
    deadline: Deadline,
) -> None:
    rng = np.random.default_rng(seed)
    # what a head never trains of itself is computed once, not at every step
    features = [
        _reduced(head, rows) for head, rows in zip(heads, student.features[:-1], strict=True)
    ]
    share = student.weights / student.weights.sum()
    batch = min(settings.batch, len(share))
    total = epochs * max(1, round(student.weights.sum() / batch))
    parameters = [parameter for head in heads for parameter in head.parameters()]
    steps = Steps(
        [(parameters, settings.learning_rate)],
        total=total,
        weight_decay=settings.weight_decay,
        deadline=deadline,
    )
    cumulative = np.cumsum(share)
    for head in heads:
        head.train()
    with Progress(f"distilling early {student.modality} exits", total, "step") as progress:
        for _ in steps:
            rows = np.minimum(np.searchsorted(cumulative, rng.random(batch)), len(share) - 1)
            most = min(settings.gallery_sample, len(galleries[0]))
            seen = rng.choice(len(galleries[0]), most, replace=False)
            losses = [
                score_distillation_loss(
                    F.normalize(head.answer(found[rows]), dim=1), target[rows], gallery[seen],
                    weight=settings.score_weight,
                )
                for head, found, target, gallery in zip(
                    heads, features, targets, galleries, strict=True
                )
            ]  # fmt: skip
            steps.take(torch.stack(losses).sum())
            progress.step()

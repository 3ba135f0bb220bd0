"""All losses of HiVLP for one batch, in both forms; docs/papers.md writes them out.

`per_exit`, the paper's letter: every exit's own text and image vectors find each other; a level's
loss reaches no layer above its exit, since it reads none. `nested`, ours: the full depth's vectors
find each other at every level, and an early query is trained to search them: by whom it should
find, and by how the full query scores. Notable: whatever an early query searches or imitates is
detached, the temperature too, so no early exit moves the gallery by way of its targets.
Scores are computed in full precision, whatever the towers run in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from hivlp.models.errors import TrainingError
from hivlp.models.fields import number
from hivlp.models.network.cross_modal import CrossModalEncoder
from hivlp.models.network.exits import Reading, TowerExits
from hivlp.models.network.hivlp import Hivlp
from hivlp.models.network.mlm import MlmHead
from hivlp.models.network.tower import Tensors
from hivlp.models.objectives.hierarchical import nested_levels
from hivlp.models.objectives.matching import hard_negatives, matching_loss
from hivlp.models.objectives.mlm import mlm_loss
from hivlp.models.objectives.retrieval import one_way_loss
from hivlp.models.objectives.score_distillation import score_distillation_loss

MOST_WEIGHT = 10**6
NOT_MASKED = -100
"""The label of a token that isn't to be told."""

Gather = Callable[[Tensor], Tensor]
"""The rows of all processes, in the same order in each: (n, d) in, (processes x n, d) out, with the
gradient of every process's use coming back to the rows. n must be the same everywhere. Item numbers
go through it too, as (n, 1) int64 without a gradient.
"""
Losses = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """n pairs of picture and text.

    `pixel_values` (n, 3, H, W) float; `input_ids` and `attention_mask` (n, t) int64; `item` (n,)
    int64: pairs of equal number are of one item, and never each other's negatives; `mlm_ids` (n, t)
    with some tokens hidden, `mlm_labels` (n, t) what these were, -100 elsewhere.
    """

    pixel_values: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    item: Tensor
    mlm_ids: Tensor | None = None
    mlm_labels: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device; copies from pinned memory don't wait."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **moved)

    @property
    def texts(self) -> Tensors:
        """What a text tower reads."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def pictures(self) -> Tensors:
        """What an image tower reads."""
        return {"pixel_values": self.pixel_values}


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Weights of the losses in the total, 0 leaves one out. Raises TrainingError naming a field.

    `reduction`: whether the two directions of retrieval are added or averaged. Of `nested` alone:
    `early`, an early query's own search, and `distillation`, its likeness to the full query, in
    which `score_weight` weighs scores against direction; `early_gradient`: whether both reach the
    layers below an exit, or its head only.
    """

    retrieval: float = number(1.0, 0, MOST_WEIGHT)
    mlm: float = number(1.0, 0, MOST_WEIGHT)
    matching: float = number(1.0, 0, MOST_WEIGHT)
    early: float = number(1.0, 0, MOST_WEIGHT)
    distillation: float = number(1.0, 0, MOST_WEIGHT)
    score_weight: float = number(250.0, 0, MOST_WEIGHT)
    early_gradient: bool = True
    reduction: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        for name in ("retrieval", "mlm", "matching", "early", "distillation", "score_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise TrainingError(f"{name}: {getattr(self, name)} is not 0 or more, and finite")
        if self.reduction not in ("sum", "mean"):
            raise TrainingError(f"reduction: {self.reduction!r} is none of sum, mean")


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch's run through both towers: readings, and every head's answer as losses compare it.

    `texts`, `images`: (n, dim) of each level, coarse first, in full precision. `same` (n, N) bool:
    which of all processes' pairs are of the item of each pair here.
    """

    model: Hivlp
    batch: Batch
    settings: LossSettings
    gather: Gather
    text: Reading
    image: Reading
    texts: Sequence[Tensor]
    images: Sequence[Tensor]
    same: Tensor

    def scores(self, queries: Tensor, gallery: Tensor) -> Tensor:
        """(n, dim) and (m, dim) to (n, m), times the temperature's factor."""
        scaled: Tensor = self.model.temperature(queries @ gallery.T)
        return scaled

    def both(self, to_image: Tensor, to_text: Tensor) -> Tensor:
        """The two directions as one loss."""
        added = to_image + to_text
        return added if self.settings.reduction == "sum" else added / 2


def hivlp_losses(
    model: Hivlp, batch: Batch, settings: LossSettings, gather: Gather | None = None
) -> Losses:
    """Every loss by name, unweighted, and `total`, their weighted sum: scalars.

    `retrieval_1`..L; `early_1`..L-1 and `distillation_1`..L-1 of a nested model; `mlm` and
    `matching` where the model has the parts. `gather` lets retrieval see other processes' pairs;
    the mean of what all processes return is then the loss of the joint batch. Matching draws its
    negatives from the process's own pairs. Under DistributedDataParallel, wrap this call in a
    module's `forward`: gradients are joined for what runs inside one. Raises TrainingError for a
    batch without hidden tokens where the model has a head for them.
    """
    step = _run(model, batch, settings, gather or _alone)
    with torch.autocast(batch.item.device.type, enabled=False):
        losses = _nested(step) if model.dual.gallery == "nested" else _per_exit(step)
    if model.mlm is not None and settings.mlm:
        losses["mlm"] = _mlm(step, model.mlm)
    if model.cross is not None and settings.matching:
        losses["matching"] = _matching(step, model.cross)
    if not losses:
        raise TrainingError("retrieval, mlm, matching, early, distillation: nothing left to train")
    weighted = [loss * _weight(settings, name) for name, loss in losses.items()]
    return losses | {"total": torch.stack(weighted).sum()}


def _alone(rows: Tensor) -> Tensor:
    return rows


def _weight(settings: LossSettings, name: str) -> float:
    weight: float = getattr(settings, name.rsplit("_", 1)[0])
    return weight


def _run(model: Hivlp, batch: Batch, settings: LossSettings, gather: Gather) -> _Step:
    text, image = model.dual.text.read(batch.texts), model.dual.image.read(batch.pictures)
    cut = model.dual.gallery == "nested" and not settings.early_gradient
    texts = [model.compared(each) for each in _answers(model.dual.text, text, cut=cut)]
    images = [model.compared(each) for each in _answers(model.dual.image, image, cut=cut)]
    everywhere = gather(batch.item[:, None]).squeeze(1)  # (N,)
    same = batch.item[:, None] == everywhere[None, :]
    return _Step(model, batch, settings, gather, text, image, texts, images, same)


def _answers(exits: TowerExits, reading: Reading, *, cut: bool) -> list[Tensor]:
    """What each head says, (n, dim); `cut`: early ones without a way back into the tower."""
    *early, finest = reading.features
    read = [*(each.detach() if cut else each for each in early), finest]
    return [_in_full(head(features)) for head, features in zip(exits.exit_heads, read, strict=True)]


def _in_full(x: Tensor) -> Tensor:
    """In float32 at least: a softmax over scores up to 100 says little in 8 bits of mantissa."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _per_exit(step: _Step) -> Losses:
    """R1 at every level, on that level's own vectors; R2 is their sum."""
    losses: Losses = {}
    if not step.settings.retrieval:
        return losses
    for level, (texts, images) in enumerate(zip(step.texts, step.images, strict=True), 1):
        all_texts, all_images = step.gather(texts), step.gather(images)
        losses[f"retrieval_{level}"] = step.both(
            one_way_loss(step.scores(texts, all_images), targets=step.same.to(texts.dtype)),
            one_way_loss(step.scores(images, all_texts), targets=step.same.to(texts.dtype)),
        )
    return losses


def _nested(step: _Step) -> Losses:
    """N1 at every level of the full depth; N2 and N3 of every early query."""
    losses: Losses = {}
    same = step.same.to(step.texts[-1].dtype)
    dims = [spec.dim for spec in step.model.dual.text.levels]
    full = (step.texts[-1], step.images[-1])
    gathered = (step.gather(full[0]), step.gather(full[1]))
    levels = [nested_levels(each, dims) for each in (*full, *gathered)]
    for level, (texts, images, all_texts, all_images) in enumerate(zip(*levels, strict=True), 1):
        if step.settings.retrieval:
            losses[f"retrieval_{level}"] = step.both(
                one_way_loss(step.scores(texts, all_images), targets=same),
                one_way_loss(step.scores(images, all_texts), targets=same),
            )
        if level < len(dims):
            found = _early(step, level, (texts, images), (all_texts.detach(), all_images.detach()))
            losses |= found
    return losses


def _early(
    step: _Step, level: int, targets: tuple[Tensor, Tensor], gallery: tuple[Tensor, Tensor]
) -> Losses:
    """N2 and N3 of one level. `targets` (n, dim): what full texts and images are at this level;
    `gallery` (N, dim): the same of all processes, detached.
    """
    settings, losses = step.settings, dict[str, Tensor]()
    text, image = step.texts[level - 1], step.images[level - 1]
    same = step.same.to(text.dtype)
    texts, images = gallery
    if settings.early:
        factor = step.model.temperature.factor.detach()
        losses[f"early_{level}"] = step.both(
            one_way_loss(factor * (text @ images.T), targets=same),
            one_way_loss(factor * (image @ texts.T), targets=same),
        )
    if settings.distillation:
        every, weight = torch.cat([images, texts]), settings.score_weight
        losses[f"distillation_{level}"] = step.both(
            score_distillation_loss(text, targets[0], every, weight=weight),
            score_distillation_loss(image, targets[1], every, weight=weight),
        )
    return losses


def _mlm(step: _Step, head: MlmHead) -> Tensor:
    """R3: hidden tokens told from the last layer's states and the picture's pooled last state."""
    batch, exits = step.batch, step.model.dual.text
    if batch.mlm_ids is None or batch.mlm_labels is None:
        raise TrainingError("mlm_ids, mlm_labels: the model tells hidden words, the batch has none")
    inputs = {"input_ids": batch.mlm_ids, "attention_mask": batch.attention_mask}
    state = exits.tower.advance(exits.tower.begin(inputs), inputs, 0, exits.exits[-1])
    rows, places = (batch.mlm_labels != NOT_MASKED).nonzero(as_tuple=True)  # (m,) each
    states = exits.tower.sequence(state, inputs)[rows, places]  # (m, d)
    logits = head(states, step.image.features[-1][rows], step.model.word_embeddings)
    return mlm_loss(_in_full(logits), batch.mlm_labels[rows, places])


def _matching(step: _Step, cross: CrossModalEncoder) -> Tensor:
    """R4: n pairs that match, and up to 2n that don't but score high at the finest level."""
    batch, dual = step.batch, step.model.dual
    texts = dual.text.tower.sequence(step.text.state, batch.texts)
    images = dual.image.tower.sequence(step.image.state, batch.pictures)
    same = batch.item[:, None] == batch.item[None, :]
    scores = step.scores(step.texts[-1], step.images[-1]).detach()
    queried, wrong_images = hard_negatives(scores, same)
    shown, wrong_texts = hard_negatives(scores.T, same)
    pairs = torch.arange(len(same), device=same.device)
    t, v = torch.cat([pairs, queried, wrong_texts]), torch.cat([pairs, wrong_images, shown])
    logits = cross(texts[t], batch.attention_mask[t], images[v])
    return matching_loss(_in_full(logits), torch.arange(len(t), device=t.device) < len(pairs))

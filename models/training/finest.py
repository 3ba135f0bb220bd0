"""The finest heads of both towers, fitted on pairs.

The text tower's own geometry is kept: its head starts as a turn of the space onto the main
directions of text, most of the meaning in the first numbers, so that a thing that no picture was
seen of still lies where its name puts it. The picture's head starts as the ridge regression onto
its captions' vectors and is then trained contrastively at every level of the nested vector.
Unlabelled texts join as negatives of pictures: else every picture that was seen in training draws
near to words that were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from hivlp.models.levels import FloatArray
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.objectives.hierarchical import hierarchical_loss, nested_levels
from hivlp.models.objectives.retrieval import retrieval_loss
from hivlp.models.objectives.same_thing import same_thing_loss
from hivlp.models.objectives.temperature import Temperature
from hivlp.models.runtime.progress import Progress
from hivlp.models.training.closed_form import main_directions, ridge, standard_directions
from hivlp.models.training.schedule import Deadline, Steps
from hivlp.models.training.settings import FinestSettings

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairFeatures:
    """Features of pairs at one exit of each tower, and who belongs to whom.

    `captions` (c, w) and `pictures` (p, v) float32; `caption_group` (c,) and `picture_group` (p,)
    int64 say which thing each shows. `unlabelled` (u, w) are further texts.
    """

    captions: FloatArray
    pictures: FloatArray
    unlabelled: FloatArray
    caption_group: Rows
    picture_group: Rows


def fit_finest(
    data: PairFeatures,
    dims: Sequence[int],
    settings: FinestSettings,
    *,
    seed: int,
    deadline: Deadline,
) -> tuple[ExitHead, ExitHead]:
    """Text and image head, both (n, width) to (n, dims[-1]); every prefix of `dims` is trained."""
    torch.manual_seed(seed)
    text = _text_head(data, dims[-1])
    image = _image_head(data, text, settings)
    _train(_Batches(data, text, image, settings, seed), text, image, dims, settings, deadline)
    return text.eval(), image.eval()


def _text_head(data: PairFeatures, dim: int) -> ExitHead:
    """The tower's own space, turned; numbers beyond its width stay zero until trained."""
    width = data.captions.shape[1]
    mean, directions = main_directions(np.concatenate([data.captions, data.unlabelled]), width)
    head = ExitHead(HeadShape(width, width, dim, hidden=0))
    with torch.no_grad():
        head.shift.copy_(torch.from_numpy(mean))
        head.line.weight.zero_()
        head.line.bias.zero_()
        kept = min(dim, directions.shape[1])
        head.line.weight[:kept] = torch.from_numpy(directions.T[:kept])
    return head


def _image_head(data: PairFeatures, text: ExitHead, settings: FinestSettings) -> ExitHead:
    """Ridge regression from a picture's features onto the mean of its captions' vectors."""
    mean, basis = standard_directions(data.pictures, settings.kept_directions)
    shape = HeadShape(
        data.pictures.shape[1],
        basis.shape[1],
        text.shape.dim,
        hidden=settings.hidden,
        dropout=settings.dropout,
    )
    head = ExitHead(shape)
    reduced = ((data.pictures - mean) @ basis).astype(np.float32)
    with torch.no_grad():
        vectors = text.embed(torch.from_numpy(data.captions)).numpy()
        targets = _group_means(vectors, data.caption_group)[data.picture_group]
        weight, bias = ridge(reduced, targets, settings.ridge)
        head.shift.copy_(torch.from_numpy(mean))
        head.set_basis(torch.from_numpy(basis))
        head.line.weight.copy_(torch.from_numpy(weight))
        head.line.bias.copy_(torch.from_numpy(bias))
    return head


def _group_means(vectors: FloatArray, group: Rows) -> FloatArray:
    """Mean of each group's vectors, normalised: (groups, d), zero for a group without any."""
    sums = np.zeros((int(group.max()) + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, group, vectors)
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums


class _Batches:
    """Draws batches of things, each with one caption and some of its pictures."""

    def __init__(
        self,
        data: PairFeatures,
        text: ExitHead,
        image: ExitHead,
        settings: FinestSettings,
        seed: int,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._settings = settings
        with torch.no_grad():
            # fixed parts of the heads, once
            self.captions = text.reduce(torch.from_numpy(data.captions))
            self.unlabelled = text.reduce(torch.from_numpy(data.unlabelled))
            self.pictures = image.reduce(torch.from_numpy(data.pictures))
            self._meaning = F.normalize(self.captions, dim=1)
            self._other_meaning = F.normalize(self.unlabelled, dim=1)
        self._groups = np.unique(data.picture_group)
        self._caption_rows = _rows_by_group(data.caption_group)
        self._picture_rows = _rows_by_group(data.picture_group)

    @property
    def a_pass(self) -> int:
        """Batches that show every thing about once."""
        return max(1, round(len(self._groups) / self._settings.groups_a_batch))

    def draw(self) -> tuple[Rows, Rows, Tensor]:
        """Rows of captions and pictures, and (n, n) float, 1 where both show the same thing."""
        size = min(self._settings.groups_a_batch, len(self._groups))
        groups = self._rng.choice(self._groups, size, replace=False)
        texts, pictures, owners = [], [], []
        for i, group in enumerate(groups):
            own = self._picture_rows[int(group)]
            most = min(len(own), self._settings.pictures_a_group)
            chosen = self._rng.choice(own, most, replace=False)
            pictures += list(chosen)
            texts += list(self._rng.choice(self._caption_rows[int(group)], most))
            owners += [i] * most
        owner = torch.tensor(owners)
        same = (owner[:, None] == owner[None, :]).float()
        return np.array(texts), np.array(pictures), same

    def draw_negatives(self, texts: Rows) -> tuple[Rows, Tensor]:
        """Rows of unlabelled texts (m,), and (n, m) bool: which may be true of each caption."""
        most = min(self._settings.negatives, len(self.unlabelled))
        rows = self._rng.choice(len(self.unlabelled), most, replace=False)
        near = self._meaning[texts] @ self._other_meaning[rows].T
        return rows, near > self._settings.same_meaning


def _rows_by_group(group: Rows) -> dict[int, Rows]:
    order = np.argsort(group, kind="stable")
    values, starts = np.unique(group[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(value): rows for value, rows in zip(values, parts, strict=True)}


def _train(
    batches: _Batches,
    text: ExitHead,
    image: ExitHead,
    dims: Sequence[int],
    settings: FinestSettings,
    deadline: Deadline,
) -> None:
    temperature = Temperature(settings.scale)
    steps = Steps(
        [
            (image.parameters(), settings.learning_rate),
            (text.parameters(), settings.text_learning_rate),
            (temperature.parameters(), 1e-2),
        ],
        total=batches.a_pass * settings.epochs,
        weight_decay=settings.weight_decay,
        deadline=deadline,
    )
    text.train().requires_grad_(settings.text_learning_rate > 0)
    image.train()
    with Progress("fitting the finest level", batches.a_pass * settings.epochs, "step") as progress:
        for _ in steps:
            steps.take(_loss(batches, text, image, dims, temperature, settings))
            temperature.hold()
            progress.step()


def _loss(
    batches: _Batches,
    text: ExitHead,
    image: ExitHead,
    dims: Sequence[int],
    temperature: Temperature,
    settings: FinestSettings,
) -> Tensor:
    texts, pictures, same = batches.draw()
    others, barred = batches.draw_negatives(texts)
    text_levels = nested_levels(text.answer(batches.captions[texts]), dims)
    image_levels = nested_levels(image.answer(batches.pictures[pictures]), dims)
    other_levels = nested_levels(text.answer(batches.unlabelled[others]), dims)

    def at(level: int, texts: Tensor, images: Tensor) -> Tensor:
        more = temperature(images @ other_levels[level].T) if len(others) else None
        scores = temperature(texts @ images.T)
        found = retrieval_loss(scores, targets=same, more_texts=more, barred=barred)
        if settings.same_thing:
            among = temperature(images @ images.T)
            found = found + settings.same_thing * same_thing_loss(among, same)
        return found

    return hierarchical_loss(at, text_levels, image_levels)

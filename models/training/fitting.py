"""From features to the heads of both towers: contrastive at full depth, then early exits.

`nested`: the finest heads are fitted on pairs, early query heads distilled to them; in a
checkpoint's own space the finest heads only turn it. `per_exit`, the paper's form: each exit's two
heads are fitted on pairs, and nothing is distilled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hivlp.models.levels import FloatArray
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.training.closed_form import best_views
from hivlp.models.training.distil import Student, embed_all, fit_early_heads
from hivlp.models.training.finest import PairFeatures, Rows, fit_finest
from hivlp.models.training.schedule import Deadline
from hivlp.models.training.settings import FitSettings

Heads = list[ExitHead]
Mask = npt.NDArray[np.bool_]
Kept = Callable[[str, Callable[[], Heads]], Heads]
"""Runs a phase by name, or gives back what it made before."""


@dataclass(frozen=True, slots=True)
class Raw:
    """What features were made of, row by row."""

    captions: Sequence[str]
    pictures: Sequence[Path]
    unlabelled: Sequence[str]

    def only(self, captions: Mask, pictures: Mask, unlabelled: Mask) -> Raw:
        """The same with only some rows of each."""
        return Raw(
            list(compress(self.captions, captions)),
            list(compress(self.pictures, pictures)),
            list(compress(self.unlabelled, unlabelled)),
        )


@dataclass(frozen=True, slots=True)
class Corpus:
    """Features of everything a fit reads: one (n, width) float32 per exit in each list.

    `caption_group` and `picture_group` (n,) int64 say which thing each shows. `raw` is what a
    tower reads that is trained on; a corpus that only heads are fitted on may do without.
    """

    captions: list[FloatArray]
    pictures: list[FloatArray]
    unlabelled: list[FloatArray]
    caption_group: Rows
    picture_group: Rows
    raw: Raw | None = None

    def of_groups(self, groups: Rows) -> Corpus:
        """The same with only some things; unlabelled texts all stay."""
        return self.only(
            np.isin(self.caption_group, groups),
            np.isin(self.picture_group, groups),
            np.ones(len(self.unlabelled[0]), bool),
        )

    def only(self, captions: Mask, pictures: Mask, unlabelled: Mask) -> Corpus:
        """The same with only some rows of each."""
        return Corpus(
            [rows[captions] for rows in self.captions],
            [rows[pictures] for rows in self.pictures],
            [rows[unlabelled] for rows in self.unlabelled],
            self.caption_group[captions],
            self.picture_group[pictures],
            self.raw and self.raw.only(captions, pictures, unlabelled),
        )

    def at(self, text_exit: int, image_exit: int) -> PairFeatures:
        """The pairs as one exit of each tower sees them (indices from 0)."""
        return PairFeatures(
            self.captions[text_exit],
            self.pictures[image_exit],
            self.unlabelled[text_exit],
            self.caption_group,
            self.picture_group,
        )


@dataclass(frozen=True, slots=True)
class FittedHeads:
    """Heads of every level, coarse first."""

    text: Heads
    image: Heads


def run_phase(name: str, phase: Callable[[], Heads]) -> Heads:  # noqa: ARG001
    """Runs every phase, keeps nothing."""
    return phase()


def fit_heads(
    corpus: Corpus,
    settings: FitSettings,
    kept: Kept = run_phase,
    *,
    taught: Corpus | None = None,
) -> FittedHeads:
    """Fit every level of both towers; `kept` may remember finished phases.

    `taught`: what early heads are distilled on, where that isn't everything.
    """
    deadline = Deadline(settings.max_seconds)
    if settings.gallery == "per_exit":
        return _fit_per_exit(corpus, settings, kept, deadline)
    return _fit_nested(corpus, taught or corpus, settings, kept, deadline)


def _fit_per_exit(
    corpus: Corpus, settings: FitSettings, kept: Kept, deadline: Deadline
) -> FittedHeads:
    text: Heads = []
    image: Heads = []
    for level, dim in enumerate(settings.dims):
        pairs = corpus.at(level, level)

        def fit(pairs: PairFeatures = pairs, dim: int = dim) -> Heads:
            return list(
                fit_finest(pairs, [dim], settings.finest, seed=settings.seed, deadline=deadline)
            )

        of_text, of_image = kept(f"level{level + 1}", fit)
        text.append(of_text)
        image.append(of_image)
    return FittedHeads(text, image)


def _fit_nested(
    corpus: Corpus, taught: Corpus, settings: FitSettings, kept: Kept, deadline: Deadline
) -> FittedHeads:
    def fit_full_depth() -> Heads:
        if settings.space == "checkpoint":
            return list(turned_heads(corpus))
        pairs = corpus.at(-1, -1)
        return list(
            fit_finest(pairs, settings.dims, settings.finest, seed=settings.seed, deadline=deadline)
        )

    text, image = kept("finest", fit_full_depth)
    students = make_students(taught, text, image, settings)

    def early(
        index: int, finest: ExitHead, epochs: int, dropout: float, penalty: float
    ) -> Callable[[], Heads]:
        return lambda: fit_early_heads(
            students[index],
            finest,
            settings.dims,
            settings.distil,
            epochs=epochs,
            dropout=dropout,
            penalty=penalty,
            seed=settings.seed,
            deadline=deadline,
        )

    distil = settings.distil
    early_text = kept("text", early(0, text, distil.text_epochs, distil.dropout, distil.ridge))
    early_image = kept(
        "image", early(1, image, distil.image_epochs, distil.image_dropout, distil.image_ridge)
    )
    return FittedHeads([*early_text, text], [*early_image, image])


def turned_heads(corpus: Corpus) -> tuple[ExitHead, ExitHead]:
    """The finest heads of a checkpoint's own space: one turn of it, the same for both towers.

    A turn changes no cosine, so the finest level ranks as the checkpoint does; its first numbers
    tell the most of pictures and texts (`best_views`). Nothing is learned from labels.
    """
    said = np.concatenate([corpus.captions[-1], corpus.unlabelled[-1]])
    turn = torch.from_numpy(best_views([corpus.pictures[-1], said]))
    return _turned_head(turn), _turned_head(turn)


def _turned_head(turn: Tensor) -> ExitHead:
    width = len(turn)
    head = ExitHead(HeadShape(width, width, width, hidden=0))
    with torch.no_grad():
        head.line.weight.copy_(turn)
        head.line.bias.zero_()
    return head.eval()


def make_students(
    corpus: Corpus, text: ExitHead, image: ExitHead, settings: FitSettings
) -> tuple[Student, Student]:
    """Texts: captions, each counted several times, and unlabelled ones. Pictures: all there are.

    Both are scored against pictures and captions, since either may be searched. What texts aim at
    is told by pictures alone: that serves texts that search captions nearly as well.
    """
    pictures = embed_all(image, corpus.pictures[-1])
    captions = embed_all(text, corpus.captions[-1])
    # without captions, as many other texts as there are pictures
    step = max(1, len(corpus.unlabelled[-1]) // len(pictures))
    said = captions if len(captions) else embed_all(text, corpus.unlabelled[-1][::step])
    gallery = np.concatenate([pictures, said])
    texts = [np.concatenate(both) for both in zip(corpus.captions, corpus.unlabelled, strict=True)]
    weights = np.ones(len(texts[0]), np.float32)
    weights[: len(captions)] = settings.distil.caption_repeats
    return (
        Student("text", texts, weights, gallery, [pictures]),
        Student(
            "image",
            corpus.pictures,
            np.ones(len(pictures), np.float32),
            gallery,
            [pictures, said],
        ),
    )


def level_vectors(heads: Sequence[ExitHead], features: Sequence[FloatArray]) -> list[FloatArray]:
    """Every level's embeddings as queries: one (n, dim) float32 per level."""
    return [embed_all(head, rows) for head, rows in zip(heads, features, strict=True)]

"""The sum over levels: one loss per early output, added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

LevelLoss = Callable[[int, Tensor, Tensor], Tensor]
"""Level index (from 0), text and image vectors (n, dim) of that level, to a scalar."""


def hierarchical_loss(loss: LevelLoss, texts: Sequence[Tensor], images: Sequence[Tensor]) -> Tensor:
    """The same loss at every level, summed without weights.

    Idea:
        Every early output must be able to search on its own, so each has a loss of its own.

    Arguments:
        loss: what is asked of one level.

    Reference:
        HiVLP, the hierarchical retrieval loss (`docs/papers.md`, equation R2).

    Inputs:
        texts, images: one (n, dim) per level. Returns a scalar.

    Example:
        >>> hierarchical_loss(lambda level, t, v: (t * v).sum(), [torch.ones(1, 2)] * 3,
        ...                   [torch.ones(1, 2)] * 3)
        tensor(6.)
    """
    pairs = zip(texts, images, strict=True)
    return torch.stack([loss(i, text, image) for i, (text, image) in enumerate(pairs)]).sum()


def nested_levels(vectors: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """The levels of a nested vector.

    Idea:
        Level l of a full-depth vector is its first dims[l] numbers, L2-normalised again; the loss
        of every level then trains the one vector.

    Arguments:
        dims: growing; the last may be the whole vector.

    Reference:
        Ours (nested gallery); prefixes that serve as embeddings are known as Matryoshka
        representations.

    Inputs:
        vectors: (n, D) float, of any length. Returns one (n, dim) per level, L2-normalised.

    Example:
        >>> [v.shape[1] for v in nested_levels(torch.ones(1, 8), (2, 8))]
        [2, 8]
    """
    return [F.normalize(vectors[:, :dim], dim=1) for dim in dims]

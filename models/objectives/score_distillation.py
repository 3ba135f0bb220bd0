"""Score-space distillation: an early query should score a gallery as the finest query does."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def score_distillation_loss(
    early: Tensor, target: Tensor, gallery: Tensor, *, weight: float = 250.0
) -> Tensor:
    """Distance of an early query from the finest one's prefix, by direction and by scores.

    Idea:
        What matters of a query is how it orders a gallery. So besides the angle to its target, the
        difference of the scores that both give to a sample of gallery vectors is punished.

    Arguments:
        weight: of the scores' mean squared difference, beside (1 - cosine).

    Reference:
        Ours (`docs/papers.md`, equation O2). No labels are needed: any input has a finest
        embedding. Target and gallery are detached here: neither learns from an early exit.

    Inputs:
        early, target: (n, dim), gallery: (m, dim), all L2-normalised. Returns a scalar.

    Example:
        >>> import torch
        >>> score_distillation_loss(torch.eye(2), torch.eye(2), torch.eye(2))
        tensor(0.)
    """
    target, gallery = target.detach(), gallery.detach()
    direction = 1.0 - (early * target).sum(1).mean()
    scores = F.mse_loss(early @ gallery.T, target @ gallery.T)
    return direction + weight * scores

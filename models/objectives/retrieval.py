"""In-batch retrieval: each text finds its picture among the batch, each picture its text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Reduction = Literal["sum", "mean"]
_NEVER = -1e4
"""A score so low that its softmax share is zero in float32, and its gradient too."""


def retrieval_loss(
    scores: Tensor,
    *,
    targets: Tensor | None = None,
    reduction: Reduction = "sum",
    more_texts: Tensor | None = None,
    barred: Tensor | None = None,
) -> Tensor:
    """Contrastive loss over a batch of pairs, in both directions.

    Idea:
        Row i of the scores is text i against every picture, column j picture j against every text.
        A softmax over each row and each column should put its mass on the pair.

    Arguments:
        targets: where the mass belongs, if not on the diagonal: a 0/1 matrix of pairs that belong
            together. Two pictures of one thing are then no negatives of each other; a row's mass
            is shared equally among its ones.
        reduction: `sum` adds the two directions, as the paper reads; `mean` halves the sum.
        more_texts: scores of each picture against texts that have no picture here. They are
            negatives of the picture-to-text direction only.
        barred: which of `more_texts` may be true of the picture, and so count for nothing.

    Reference:
        HiVLP, the loss of one early output layer (`docs/papers.md`, equation R1). Dividing by a
        temperature is ours: pass scores already divided by it, see `temperature.py`.

    Inputs:
        scores: (n, n) float, rows texts, columns pictures. targets: (n, n). more_texts: (n, m),
        rows pictures. barred: (n, m) bool. Returns a scalar.

    Example:
        >>> retrieval_loss(torch.zeros(3, 3))  # 2 ln 3
        tensor(2.1972)
    """
    turned = None if targets is None else targets.T
    to_image = one_way_loss(scores, targets=targets)
    to_text = one_way_loss(scores.T, targets=turned, more=_with_bars(more_texts, barred))
    both = to_image + to_text
    return both if reduction == "sum" else both / 2


def _with_bars(more: Tensor | None, barred: Tensor | None) -> Tensor | None:
    return more if more is None or barred is None else more.masked_fill(barred, _NEVER)


def one_way_loss(
    scores: Tensor, *, targets: Tensor | None = None, more: Tensor | None = None
) -> Tensor:
    """One direction of the retrieval loss: each row searches the columns.

    Idea:
        Several processes hold a batch together: the rows of one search the columns of all.

    Arguments:
        targets: where each row's mass belongs, if not on the diagonal: 0/1, at least one 1 a row.
        more: scores of each row against further columns, none of them right.

    Reference:
        As `retrieval_loss`, which is the sum of this over both directions.

    Inputs:
        scores: (n, m) float, m = n without targets. targets: (n, m). more: (n, k). Returns a
        scalar, the mean over rows.

    Example:
        >>> one_way_loss(torch.zeros(2, 4), targets=torch.eye(2, 4))  # ln 4
        tensor(1.3863)
    """
    n, m = scores.shape
    every = scores if more is None else torch.cat([scores, more], 1)
    if targets is None:
        return F.cross_entropy(every, torch.arange(n, device=scores.device))
    share = targets / targets.sum(1, keepdim=True)
    logs = F.log_softmax(every, dim=1)[:, :m]
    return -(share * logs).sum(1).mean()

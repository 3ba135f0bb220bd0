"""Image-text matching: does this text describe this picture? Asked of pairs that nearly do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of the cross-modal encoder's answers.

    Idea:
        A model that reads both sequences together says whether they belong together.

    Arguments:
        None.

    Reference:
        HiVLP, the loss of its cross-modal encoder (`docs/papers.md`, equation R4).

    Inputs:
        logits: (k,) float, log-odds of a match. labels: (k,) 0/1. Returns a scalar.

    Example:
        >>> matching_loss(torch.zeros(2), torch.tensor([0, 1]))  # ln 2
        tensor(0.6931)
    """
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


@torch.no_grad()
def hard_negatives(
    scores: Tensor, same: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one wrong answer for each row, those that score high more often.

    Idea:
        A pair that two towers already tell apart teaches nothing new. Each row draws a column with
        the probability that the row's softmax gives it, its own item's columns left out.

    Arguments:
        generator: where the draws come from; torch's global one by default.

    Reference:
        ALBEF (arXiv 2107.07651), section 3; HiVLP says only that pairs are mismatched. Leaving out
        every column of the row's item, not the diagonal alone, is ours.

    Inputs:
        scores: (n, m) float, already divided by a temperature. same: (n, m) bool, True where row
        and column are of one item. Returns rows (k,) and columns (k,), int64: the k rows that
        have a column of another item, and what each drew.

    Example:
        >>> hard_negatives(torch.zeros(2, 2), torch.eye(2, dtype=torch.bool))
        (tensor([0, 1]), tensor([1, 0]))
    """
    rows = (~same).any(1).nonzero().squeeze(1)
    if not len(rows):
        return rows, rows
    allowed = scores.detach().float().masked_fill(same, -torch.inf)[rows]
    drawn = torch.multinomial(allowed.softmax(1), 1, generator=generator)
    return rows, drawn.squeeze(1)

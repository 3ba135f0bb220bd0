"""Masked language modelling: hidden words are told from those around them, and from a picture."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def mlm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the hidden tokens.

    Idea:
        Some tokens of a text are hidden, 15 % in the paper; the model says which they were. What
        the logits were made from (the words that are left, and the picture) is the model's matter.

    Arguments:
        None.

    Reference:
        HiVLP, the loss of linguistic representation modelling (`docs/papers.md`, equation R3).

    Inputs:
        logits: (m, v) float, one row for each hidden token, of all texts together. labels: (m,)
        int64. Returns a scalar, the mean over hidden tokens; 0 where there are none.

    Example:
        >>> import torch
        >>> mlm_loss(torch.zeros(2, 4), torch.tensor([0, 3]))  # ln 4
        tensor(1.3863)
    """
    # the mean of nothing is not a number; a sum of nothing keeps the graph
    return F.cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))

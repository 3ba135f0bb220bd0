"""Pictures of the same thing find each other among a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def same_thing_loss(scores: Tensor, same: Tensor) -> Tensor:
    """Contrastive loss within one modality, with as many right answers as there are.

    Idea:
        Pictures drawn near one caption still need not be near each other; searching pictures with
        a picture asks for that. Each row's softmax, itself left out, should put its mass on the
        others that show the same thing, shared equally.

    Arguments:
        same: which rows show the same thing. Rows without a fellow count for nothing.

    Reference:
        Supervised contrastive learning (arXiv 2004.11362), its outer form; adding it to a retrieval
        loss is ours (`docs/papers.md`, equation O3).

    Inputs:
        scores: (n, n) float, symmetric, already divided by a temperature. same: (n, n) 0/1, ones
        on the diagonal. Returns a scalar, 0 where no row has a fellow.

    Example:
        >>> same_thing_loss(torch.zeros(3, 3), torch.ones(3, 3))  # ln 2
        tensor(0.6931)
    """
    itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    fellows = same.masked_fill(itself, 0.0)
    counts = fellows.sum(1)  # (n,)
    logs = F.log_softmax(scores.masked_fill(itself, -1e4), dim=1)
    rows = -(fellows * logs).sum(1) / counts.clamp(min=1.0)
    return rows.sum() / (counts > 0).sum().clamp(min=1)

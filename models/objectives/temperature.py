"""A learnable temperature: how sharply a softmax looks at cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """Scales scores by a learnable factor.

    Idea:
        Cosines lie within -1..1, too flat for a softmax. They are multiplied by exp(s), s learned.

    Arguments:
        scale: the factor to start from; `limit`: the largest it may become, which holds where
        `hold` follows each step of the optimiser. Notable: s itself is set back, as CLIP does it,
        since a factor that is clamped on its way to the loss has no gradient that could bring it
        down again.

    Reference:
        Ours, after CLIP; the paper's text names no temperature. `scale` = 1 with un-normalised
        embeddings and no training of it is the paper's letter.

    Inputs:
        scores of any shape. Returns the same shape.

    Example:
        >>> Temperature(20.0)(torch.tensor(0.5)).item()
        10.0
    """

    def __init__(self, scale: float = 20.0, *, limit: float = 100.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.limit = limit

    @property
    def factor(self) -> Tensor:
        """The factor as it stands: a scalar."""
        return self.log_scale.exp()

    @torch.no_grad()
    def hold(self) -> None:
        """Set a factor that has grown above its limit back to it."""
        self.log_scale.clamp_(max=math.log(self.limit))

    def forward(self, scores: Tensor) -> Tensor:
        """Scores times the factor."""
        return scores * self.factor

"""AdamW over a model's weights, without decay where decay would pull a norm or a bias to zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hivlp.models.training.loop.settings import TrainSettings

Named = list[tuple[str, nn.Parameter]]


def make_optimiser(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Every trainable weight, in two groups: matrices decay; norms, biases and scalars don't."""
    decayed, kept = split(model.named_parameters())
    groups = [
        {"params": [weight for _, weight in decayed], "weight_decay": settings.weight_decay},
        {"params": [weight for _, weight in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )


def split(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[Named, Named]:
    """Weights that decay and weights that don't; what isn't trained is in neither."""
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    decayed = [(name, weight) for name, weight in trained if weight.dim() > 1]
    kept = [(name, weight) for name, weight in trained if weight.dim() <= 1]
    return decayed, kept

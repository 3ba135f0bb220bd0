"""What is done to the weights of any module: how they start, and the hash they are known by."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

INITIAL_STD = 0.02


def initialise(module: nn.Module, std: float = INITIAL_STD) -> None:
    """Start every linear map, convolution and embedding from a normal cut at two deviations.

    Biases start at zero; norms keep 1 and 0. (As BERT, arXiv 1810.04805, and ViT's ports do; HiVLP
    says nothing of it.) Draws from torch's global generator, in the order of the modules.
    """
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d, nn.Embedding)):
            start_normal(part.weight, std)
        if isinstance(part, (nn.Linear, nn.Conv2d)) and part.bias is not None:
            nn.init.zeros_(part.bias)


def start_normal(weight: Tensor, std: float = INITIAL_STD) -> None:
    """Fill one weight, of any shape, as `initialise` does."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def weights_hash(module: nn.Module) -> str:
    """sha256 (64 hex digits) over the names, shapes and numbers of everything in a state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        # bytes, not numbers: numpy knows no bfloat16
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

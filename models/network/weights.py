"""What is done to the weights of any module: how they start, and the hash they are known by."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

BASE_STD, BASE_WIDTH = 0.02, 768


def initial_std(width: int) -> float:
    """How far weights of a network `width` wide start from zero: .02 at the base width of 768.

    BERT (arXiv 1810.04805) and ViT's ports take .02; HiVLP says nothing of it. In proportion to
    1 / sqrt(width) elsewhere, so that a layer adds as much to what it reads at any width: from .02
    narrow towers learn later (bench/initial_std.py).
    """
    return BASE_STD * math.sqrt(BASE_WIDTH / width)


def initialise(module: nn.Module, width: int) -> None:
    """Start every linear map, convolution and embedding from a normal cut at two deviations.

    `width` is that of the network which the module is a part of, see `initial_std`. Biases start at
    zero; norms keep 1 and 0. Draws from torch's global generator, in the order of the modules.
    """
    std = initial_std(width)
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d, nn.Embedding)):
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
        if isinstance(part, (nn.Linear, nn.Conv2d)) and part.bias is not None:
            nn.init.zeros_(part.bias)


def weights_hash(module: nn.Module) -> str:
    """sha256 (64 hex digits) over the names, shapes and numbers of everything in a state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        # bytes, not numbers: numpy knows no bfloat16
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

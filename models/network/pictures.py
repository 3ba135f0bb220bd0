"""Pretrained vision Transformers, which CLIP, SigLIP, ViT and DeiT share: patches to one vector.

Notable: patches are cut by one strided convolution, and no, one or two learned tokens stand before
them. Attention pooling never computes keys and values of all tokens: its one query is fixed, so
the key's map is folded into it, and values are averaged before they are mapped. The same numbers,
for a thirtieth of the work, which matters as every layer up to an exit is pooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation
from hivlp.models.network.blocks import Attention, BlockShape, FeedForward
from hivlp.models.network.pretrained import Files, Layers, PretrainedTower
from hivlp.models.network.tower import Pooling, Tensors

PicturePooling = Literal["first", "first+second", "attention"]
Last = Literal["nothing", "projection", "pooler"]


@dataclass(frozen=True, slots=True)
class PictureShape:
    """What differs from family to family.

    `image` and `patch` are (height, width) in pixels. `tokens` stand before the patches.
    `patch_bias`: the patches' map has one; `first_norm`: a norm before the first layer. `last` maps
    the last layer's pooled vector: a linear map to `out` numbers, or one with tanh after it.
    """

    layers: Layers
    image: tuple[int, int]
    patch: tuple[int, int]
    tokens: int
    patch_bias: bool
    first_norm: bool
    pooling: PicturePooling
    last: Last = "nothing"
    out: int = 0

    @property
    def positions(self) -> int:
        """Tokens and patches."""
        rows, columns = (side // cut for side, cut in zip(self.image, self.patch, strict=True))
        return self.tokens + rows * columns


class PictureTower(PretrainedTower):
    """`pixel_values` (n, 3, height, width) to states (n, tokens + patches, d)."""

    modality = "image"
    input_names = ("pixel_values",)

    def __init__(self, shape: PictureShape, files: Files, prepared: ImagePreparation) -> None:
        super().__init__(shape.layers, files)
        self.shape, self._prepared = shape, prepared
        width, eps = shape.layers.block.width, shape.layers.block.eps
        self.patches = nn.Conv2d(3, width, shape.patch, shape.patch, bias=shape.patch_bias)
        self.tokens = nn.Parameter(torch.zeros(shape.tokens, width)) if shape.tokens else None
        self.positions = nn.Parameter(torch.zeros(shape.positions, width))
        self.first_norm = nn.LayerNorm(width, eps=eps) if shape.first_norm else None
        self.probe = Probe(shape.layers.block) if shape.pooling == "attention" else None
        self.last = (
            None
            if shape.last == "nothing"
            else nn.Linear(self.pooled_width, shape.out, bias=shape.last == "pooler")
        )

    @property
    def pooling(self) -> Pooling:
        """first, first+second or attention."""
        return self.shape.pooling

    @property
    def preparation(self) -> ImagePreparation:
        """As the checkpoint's image processor does."""
        return self._prepared

    @property
    def pooled_width(self) -> int:
        """One token's width, or two tokens'."""
        return self.layers.block.width * (2 if self.shape.pooling == "first+second" else 1)

    @property
    def output_width(self) -> int:
        """The pooled width, or what the checkpoint maps it to."""
        return self.pooled_width if self.shape.last == "nothing" else self.shape.out

    def begin(self, inputs: Tensors) -> Tensors:
        """`hidden` (n, tokens + patches, d); nothing is pooled yet, for it would tell nothing."""
        patches = self.patches(inputs["pixel_values"]).flatten(2).transpose(1, 2)  # (n, p, d)
        if self.tokens is not None:
            tokens = self.tokens.expand(len(patches), -1, -1)
            patches = torch.cat([tokens, patches], 1)
        hidden = patches + self.positions
        return {"hidden": hidden if self.first_norm is None else self.first_norm(hidden)}

    def _mask(self, hidden: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def vector(self, state: Tensors) -> Tensor:
        """The first token, the first two one after the other, or what the probe attends to."""
        hidden = state["hidden"]
        if self.probe is not None:
            attended: Tensor = self.probe(self.norm(hidden))
            return attended
        few: Tensor = self.norm(hidden[:, : 2 if self.shape.pooling == "first+second" else 1])
        return few.flatten(1)

    def output(self, state: Tensors) -> Tensor:
        """`vector`, mapped as the checkpoint maps it."""
        pooled = self.vector(state)
        if self.last is None:
            return pooled
        mapped: Tensor = self.last(pooled)
        return mapped.tanh() if self.shape.last == "pooler" else mapped


class Probe(nn.Module):
    """Attention pooling: one learned query to all tokens, then a feed-forward part (SigLIP)."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, shape.width))
        self.attention = Attention(shape.width, shape.heads)
        self.norm = nn.LayerNorm(shape.width, eps=shape.eps)
        self.feed = FeedForward(shape.width, shape.inner, shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, t, d) in, (n, d) out."""
        attended = self._attend(hidden)
        fed: Tensor = attended + self.feed(self.norm(attended))
        return fed

    def _attend(self, hidden: Tensor) -> Tensor:
        """What `attention` says of the query, without keys and values: (n, d).

        A key's bias adds the same to all of a head's scores, and so nothing.
        """
        heads = self.attention.heads
        query = self.attention.query(self.query).reshape(heads, 1, -1)  # (heads, 1, d / heads)
        width = hidden.shape[2]
        key = self.attention.key.weight.reshape(heads, -1, width)  # (heads, d / heads, d)
        folded = (query @ key).squeeze(1) / math.sqrt(query.shape[2])  # (heads, d)
        weights = (hidden @ folded.T).softmax(1)  # (n, t, heads)
        means = (weights.transpose(1, 2) @ hidden).unsqueeze(2)  # (n, heads, 1, d)
        value = self.attention.value.weight.reshape(heads, -1, width).transpose(1, 2)
        mixed = (means @ value).flatten(1) + self.attention.value.bias
        found: Tensor = self.attention.out(mixed)
        return found

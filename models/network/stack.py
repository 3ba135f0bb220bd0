"""A tower that is a stack of blocks and is trained here, not loaded: what both modalities share.

Notable: with norms before each part (`pre`) the states between layers are un-normed, so one final
norm is applied to what any exit reads, early ones too; with `post` the embeddings are normed
instead and a layer's output already is. Such a tower has no files of its own: it is known by the
hash of its weights, so a tower that was trained on is another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hivlp.models.errors import TrainingError
from hivlp.models.fields import number
from hivlp.models.network.blocks import Activation, Block, BlockShape, NormPlacement
from hivlp.models.network.pooling import pool_mean
from hivlp.models.network.tower import Pooling, Tensors, Tower
from hivlp.models.network.weights import initial_std, weights_hash

StackPooling = Literal["first", "mean"]
MOST_LAYERS, MOST_WIDTH, MOST_INNER = 256, 16_384, 65_536
EPS, DROPOUT = (1e-15, 0.1), (0, 0.99)
"""Limits of what a recipe may ask for; whether it fits into memory is another matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Sizes of a stack of blocks, the base size by default; see `BlockShape`.

    `inner` = 0 is four times the width. Raises TrainingError naming the field that can't be.
    """

    depth: int = number(12, 1, MOST_LAYERS, "layers")
    width: int = number(768, 1, MOST_WIDTH)
    heads: int = number(12, 1, MOST_WIDTH)
    inner: int = number(0, 0, MOST_INNER)
    norm: NormPlacement = "pre"
    activation: Activation = "gelu"
    eps: float = number(1e-6, *EPS)
    dropout: float = number(0.0, *DROPOUT)
    pooling: StackPooling = "first"

    def __post_init__(self) -> None:
        at_least("depth", self.depth, 1)
        at_least("inner", self.inner, 0)
        if self.pooling not in get_args(StackPooling):
            known = ", ".join(get_args(StackPooling))
            raise TrainingError(f"pooling: {self.pooling!r} is none of {known}")
        _ = self.block

    @property
    def block(self) -> BlockShape:
        """The shape of each layer."""
        return BlockShape(
            self.width,
            self.heads,
            self.inner or 4 * self.width,
            self.norm,
            self.activation,
            self.eps,
            self.dropout,
        )


def at_least(name: str, value: int, least: int) -> None:
    """Raise TrainingError naming the field unless `value` reaches `least`."""
    if value < least:
        raise TrainingError(f"{name}: {value} is less than {least}")


class StackTower(Tower):
    """Embeddings, blocks, final norm. A subclass embeds, and says what may be attended to."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.shape = shape
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape.block) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=shape.eps)

    @abstractmethod
    def _embed(self, inputs: Tensors) -> Tensor:
        """Tokens with their positions, the special token first: (n, t, width)."""

    @abstractmethod
    def _mask(self, inputs: Tensors) -> Tensor | None:
        """What may be attended to, as `Block` wants it."""

    @abstractmethod
    def _pooled(self, hidden: Tensor, inputs: Tensors) -> Tensor:
        """(n, t), 1 or True for the tokens that `mean` is taken over."""

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.shape.depth

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    @property
    def pooling(self) -> Pooling:
        """first or mean."""
        return self.shape.pooling

    @property
    def sources(self) -> tuple[Path, ...]:
        """No files."""
        return ()

    def width(self, layer: int) -> int:  # noqa: ARG002
        """The same at every layer."""
        return self.shape.width

    def begin(self, inputs: Tensors) -> Tensors:
        """`hidden` (n, t, width): embeddings, normed where the blocks are `post`."""
        hidden = self._embed(inputs)
        normed = self.norm(hidden) if self.shape.norm == "post" else hidden
        return {"hidden": self.drop(normed)}

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        """Run layers start+1..stop on `hidden` (n, t, width)."""
        hidden, mask = state["hidden"], self._mask(inputs)
        for block in self.blocks[start:stop]:
            hidden = block(hidden, mask)
        return {"hidden": hidden}

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:  # noqa: ARG002
        """The normed state of the first token, or the mean of those of `_pooled`: (n, width)."""
        hidden = state["hidden"]
        if self.shape.pooling == "first":
            return self._normed(hidden[:, 0])  # no other token needs the norm
        return pool_mean(self._normed(hidden), self._pooled(hidden, inputs))

    def sequence(self, state: Tensors, inputs: Tensors) -> Tensor:  # noqa: ARG002
        """Every token's state, normed: (n, t, width)."""
        return self._normed(state["hidden"])

    def _normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden) if self.shape.norm == "pre" else hidden
        return normed

    def attention_maps(self, inputs: Tensors) -> list[Tensor]:
        """Who attends to whom, layer by layer: `depth` of (n, heads, t, t), rows summing to 1."""
        hidden, mask, maps = self.begin(inputs)["hidden"], self._mask(inputs), list[Tensor]()
        for block in self.blocks:
            hidden = block(hidden, mask, maps=maps)
        return maps

    def identity(self) -> dict[str, str]:
        """Its sizes, its weights' hash, its files if any, and how they are read."""
        own = {"shape": str(sorted(asdict(self.shape).items())), "weights": weights_hash(self)}
        return super().identity() | own


def special_token(width: int) -> nn.Parameter:
    """A learned token that stands before all others: (1, 1, width)."""
    return nn.Parameter(torch.empty(1, 1, width).normal_(std=initial_std(width)))


def learned_positions(count: int, width: int) -> nn.Parameter:
    """One learned vector for each place: (count, width)."""
    return nn.Parameter(torch.empty(count, width).normal_(std=initial_std(width)))

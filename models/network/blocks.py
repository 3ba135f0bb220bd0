"""The Transformer block that every tower and the cross-modal encoder are built of.

Notable: attention runs on `scaled_dot_product_attention`, and no map of it ever exists in memory.
Who wants to see the maps passes a list, and the same weights go the explicit way, which is also the
oracle of the fast one. Norms stand before each part (`pre`) or after its sum (`post`); a stack of
`pre` blocks leaves its last states un-normed, and its owner applies a final norm. A block with a
`memory` attends to a second sequence between its own attention and its feed-forward part.
Masks are boolean, True where a token may be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.errors import TrainingError

NormPlacement = Literal["pre", "post"]
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
}
"""By the names that Hugging Face's config.json gives them; two of them are one function."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block. `inner` is the feed-forward width; `memory` the width of what it also
    attends to, 0 for none. `dropout` is a share, of each part's output and of attention weights.
    Raises TrainingError naming the field that can't be.
    """

    width: int
    heads: int
    inner: int
    norm: NormPlacement = "pre"
    activation: Activation = "gelu"
    eps: float = 1e-6
    dropout: float = 0.0
    memory: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "heads", "inner"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name}: {getattr(self, name)} is less than 1")
        if self.width % self.heads:
            raise TrainingError(f"width: {self.width} is not a multiple of heads, {self.heads}")
        if self.memory < 0:
            raise TrainingError(f"memory: {self.memory} is less than 0")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"dropout: {self.dropout} is not within 0..1, 1 left out")
        if not 0 < self.eps < 1:
            raise TrainingError(f"eps: {self.eps} is not within 0..1, both left out")
        for name, known in (("norm", NormPlacement), ("activation", Activation)):
            if (given := getattr(self, name)) not in get_args(known):
                raise TrainingError(f"{name}: {given!r} is none of {', '.join(get_args(known))}")


class Attention(nn.Module):
    """Multi-head attention of one sequence to another, or to itself.

    `memory` is the width of the sequence that is attended to, if it differs from `width`.
    """

    def __init__(
        self, width: int, heads: int, *, memory: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(memory or width, width)
        self.value = nn.Linear(memory or width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """Attend from `hidden` (n, t, width) to `memory` (n, m, .), to itself by default.

        mask: bool, to be broadcast to (n, heads, t, m). Where `maps` is given, the attention
        weights, (n, heads, t, m), rows summing to 1, are appended to it. Returns (n, t, width).
        """
        source = hidden if memory is None else memory
        q = self._split(self.query(hidden))  # (n, heads, t, width / heads)
        k, v = self._split(self.key(source)), self._split(self.value(source))
        dropout = self.dropout if self.training else 0.0
        if maps is None:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            maps.append(attention_map(q, k, mask))
            found = F.dropout(maps[-1], dropout) @ v
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        return x.reshape(n, tokens, self.heads, width // self.heads).transpose(1, 2)


def attention_map(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The weights that `scaled_dot_product_attention` never shows.

    q: (n, heads, t, d), k: (n, heads, m, d) in, (n, heads, t, m) out, rows summing to 1.
    """
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(3)


class FeedForward(nn.Module):
    """Widen, bend, narrow: (n, t, width) in and out."""

    def __init__(self, width: int, inner: int, activation: Activation = "gelu") -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner)
        self.activation = ACTIVATIONS[activation]
        self.outer = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Each token by itself."""
        fed: Tensor = self.outer(self.activation(self.inner(hidden)))
        return fed


class Block(nn.Module):
    """One layer: attention, attention to a memory where the shape has one, feed-forward."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        width, heads, dropout = shape.width, shape.heads, shape.dropout
        self.attention = Attention(width, heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width, eps=shape.eps)
        if shape.memory:
            self.cross = Attention(width, heads, memory=shape.memory, dropout=dropout)
            self.cross_norm = nn.LayerNorm(width, eps=shape.eps)
        self.feed = FeedForward(width, shape.inner, shape.activation)
        self.feed_norm = nn.LayerNorm(width, eps=shape.eps)
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the layer on `hidden` (n, t, width); memory: (n, m, shape.memory).

        Masks are bool, to be broadcast to (n, heads, t, t) and (n, heads, t, m): see
        `attention_mask`. `maps` gets the layer's attention weights, its own first.
        """
        assert (memory is not None) == bool(self.shape.memory), "a memory, or a shape without one"
        hidden = self._add(
            hidden, lambda x: self.attention(x, mask=mask, maps=maps), self.attention_norm
        )
        if memory is not None:
            hidden = self._add(
                hidden, lambda x: self.cross(x, memory, memory_mask, maps), self.cross_norm
            )
        return self._add(hidden, self.feed, self.feed_norm)

    def _add(
        self, hidden: Tensor, part: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The residual sum around one part, its norm where the shape puts it."""
        pre = self.shape.norm == "pre"
        summed: Tensor = hidden + self.drop(part(norm(hidden) if pre else hidden))
        return summed if pre else norm(summed)


def attention_mask(
    hidden: Tensor, kept: Tensor | None = None, *, causal: bool = False
) -> Tensor | None:
    """What each token of `hidden` (n, t, .) may look at: bool for `Block`, None for everything.

    kept: (n, t), 1 or True for a token, 0 for padding; every row keeps at least one. `causal`:
    nothing behind itself. Returns (n, 1, 1, t), (1, 1, t, t) or both, (n, 1, t, t).
    """
    mask = None if kept is None else key_mask(kept)
    if not causal:
        return mask
    places = torch.arange(hidden.shape[1], device=hidden.device)
    before = (places[None, :] <= places[:, None])[None, None]  # (1, 1, t, t)
    return before if mask is None else mask & before


def key_mask(kept: Tensor) -> Tensor:
    """(n, m), 1 or True for what may be attended to, as (n, 1, 1, m) bool."""
    return kept.bool()[:, None, None, :]

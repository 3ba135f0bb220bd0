"""The cross-modal encoder: does this text describe this picture? (HiVLP, on re-ranking and ITM.)

    [TXT] w1 w2 .. > (self-attention, attention to the picture, feed-forward) x 6 > [TXT] > logit

It reads token states of the full depth of both towers, which stay as they are. Notable: towers of
other widths than its own are read without resizing: the picture's states are the memory that its
keys and values are made of, and texts of another width go through one linear map first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from hivlp.models.network.blocks import (
    Activation,
    Block,
    BlockShape,
    NormPlacement,
    attention_mask,
    key_mask,
)
from hivlp.models.network.stack import at_least
from hivlp.models.network.weights import initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossModalShape:
    """Sizes of a cross-modal encoder; the defaults are the paper's: 6 layers, 768 wide, 12 heads.

    `text` and `image` are the widths of the towers' states. `inner` = 0 is four times the width;
    `dropout` is a share, in training only. Raises TrainingError naming the field that can't be.
    """

    depth: int = 6
    width: int = 768
    heads: int = 12
    inner: int = 0
    text: int = 768
    image: int = 768
    norm: NormPlacement = "pre"
    activation: Activation = "gelu"
    eps: float = 1e-6
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("depth", "text", "image"):
            at_least(name, getattr(self, name), 1)
        at_least("inner", self.inner, 0)
        _ = self.block

    @property
    def block(self) -> BlockShape:
        """The shape of one of its layers."""
        return BlockShape(
            width=self.width,
            heads=self.heads,
            inner=self.inner or 4 * self.width,
            norm=self.norm,
            activation=self.activation,
            eps=self.eps,
            dropout=self.dropout,
            memory=self.image,
        )

    def as_dict(self) -> dict[str, int | float | str]:
        """For a checkpoint."""
        return asdict(self)


class CrossModalEncoder(nn.Module):
    """Pairs of token states to one logit a pair: the log-odds that text and picture match.

    Position 0 of the text, [TXT] or whatever the tower puts there, is where the answer is read.
    """

    def __init__(self, shape: CrossModalShape) -> None:
        super().__init__()
        self.shape = shape
        same = shape.text == shape.width
        self.entry = nn.Identity() if same else nn.Linear(shape.text, shape.width)
        self.blocks = nn.ModuleList(Block(shape.block) for _ in range(shape.depth))
        # Pre-norm layers leave a sum that nothing has normalised.
        self.norm = nn.LayerNorm(shape.width, shape.eps) if shape.norm == "pre" else nn.Identity()
        self.answer = nn.Linear(shape.width, 1)
        initialise(self, shape.width)

    def forward(
        self,
        text: Tensor,
        text_mask: Tensor,
        image: Tensor,
        image_mask: Tensor | None = None,
        *,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits (n,) of n pairs; their sigmoid is the probability of a match.

        text: (n, t, shape.text), text_mask: (n, t), image: (n, m, shape.image), image_mask: (n, m)
        or None; masks are 1 or True for a token, 0 for padding. `maps` gets two maps a layer: of
        the text to itself (n, heads, t, t), and to the picture (n, heads, t, m).
        """
        hidden = self.entry(text)  # (n, t, width)
        mask = attention_mask(hidden, text_mask)
        memory_mask = None if image_mask is None else key_mask(image_mask)
        for block in self.blocks:
            hidden = block(hidden, mask, memory=image, memory_mask=memory_mask, maps=maps)
        logits: Tensor = self.answer(self.norm(hidden[:, 0]))  # (n, 1)
        return logits.squeeze(1)

    def probability(
        self, text: Tensor, text_mask: Tensor, image: Tensor, image_mask: Tensor | None = None
    ) -> Tensor:
        """Probabilities (n,) in [0, 1] that pairs match, from what `forward` takes."""
        return torch.sigmoid(self(text, text_mask, image, image_mask))

"""The head that tells hidden words, from the text around them and from the picture as a whole.

Notable: the picture comes in as one vector, the vision tower's pooled last state, spread over all
text positions; how it is fused is a setting, since the paper's text says only that words are
conditioned on it. The decoder is the text tower's own word embeddings, passed in at every call, so
that a checkpoint holds them once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.network.weights import initialise

Fusion = Literal["add", "multiply", "none"]


class MlmHead(nn.Module):
    """Fusion, linear, GELU, LayerNorm, tied decoder with a bias of its own (BERT's head).

    `image` is the width of the picture's vector: another one than `width` is mapped to it first.
    """

    def __init__(
        self, width: int, vocabulary: int, *, image: int, fusion: Fusion = "add", eps: float = 1e-12
    ) -> None:
        super().__init__()
        self.fusion: Fusion = fusion
        fits = image == width or fusion == "none"
        self.image = nn.Identity() if fits else nn.Linear(image, width)
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        initialise(self, width)

    def forward(self, states: Tensor, image: Tensor, words: Tensor) -> Tensor:
        """Logits (m, vocabulary) of m tokens.

        states: (m, width), their last states; image: (m, image), the vector of each one's picture;
        words: (vocabulary, width), the text tower's word embeddings.
        """
        hidden = self.norm(F.gelu(self.dense(self._fused(states, image))))
        return F.linear(hidden, words, self.bias)

    def _fused(self, states: Tensor, image: Tensor) -> Tensor:
        if self.fusion == "none":
            return states
        seen: Tensor = self.image(image)
        return states + seen if self.fusion == "add" else states * seen

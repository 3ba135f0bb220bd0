"""Attention of a few tokens to many: the same answer, without keys and values of the many.

Notable: in `q (W m + b)` the query can take the key map over, `(q W) m`, since `q b` is one number
for every m and softmax doesn't see it; and as the weights of a query sum to 1, the value map can be
applied to what was gathered, `W (sum of p m) + b`. With t queries of width w in heads of k numbers
and m tokens looked at, that is t/k + t/m of the work: a quarter for a query of 12 tokens and a
picture of 197. Beyond about 48 tokens it is more. For inference only: nothing here is trained.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hivlp.models.network.blocks import Attention


class FewQueries(nn.Module):
    """What an `Attention` to a memory does, by its weights, for a text that is short."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        assert isinstance(attention, Attention)
        self.heads = attention.heads
        self.query, self.out = attention.query, attention.out
        key, value = attention.key, attention.value
        width, memory = key.weight.shape
        by_head = (self.heads, width // self.heads, memory)  # (h, k, memory)
        self.key = nn.Parameter(key.weight.detach().reshape(by_head).clone())
        values = value.weight.detach().reshape(by_head).transpose(1, 2)
        self.value = nn.Parameter(values.contiguous())
        self.shift = nn.Parameter(value.bias.detach().reshape(self.heads, 1, -1).clone())

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """From `hidden` (n, t, width) to `memory` (n, m, .), as `Attention`; never with maps."""
        assert maps is None, "maps are for the attention that this was made of"
        n, tokens, _ = hidden.shape
        asked = (
            self.query(hidden).reshape(n, tokens, self.heads, -1).transpose(1, 2)
        )  # (n, h, t, k)
        asked = (asked / math.sqrt(self.key.shape[1])) @ self.key  # (n, h, t, memory)
        scores = asked.flatten(1, 2) @ memory.transpose(1, 2)  # (n, h x t, m)
        if mask is not None:  # broadcast to (n, h, t, m), as `Attention` takes it
            wide = mask.expand(n, self.heads, tokens, memory.shape[1])
            scores = scores.masked_fill(~wide.flatten(1, 2), -math.inf)
        gathered = scores.softmax(2) @ memory  # (n, h x t, memory)
        found = gathered.reshape(n, self.heads, tokens, -1) @ self.value + self.shift
        mixed: Tensor = self.out(torch.flatten(found.transpose(1, 2), 2))
        return mixed

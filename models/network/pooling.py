"""How the states of a sequence become one vector: first, mean, eos, last or attention.

All leave padding out. A mask is (n, t), 1 for a token and 0 for padding, padding at the end.
"""

from __future__ import annotations

from torch import Tensor


def pool_first(hidden: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG001 - one signature for all
    """The state of position 0: (n, t, d) in, (n, d) out."""
    return hidden[:, 0]


def pool_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over tokens that the mask keeps: (n, t, d) in, (n, d) out."""
    kept = mask.to(hidden.dtype).unsqueeze(-1)  # (n, t, 1)
    return (hidden * kept).sum(1) / kept.sum(1).clamp(min=1.0)


def pool_last(hidden: Tensor, mask: Tensor) -> Tensor:
    """The state of the last token that the mask keeps: (n, t, d) in, (n, d) out."""
    return pool_at(hidden, (mask.sum(1) - 1).clamp(min=0))


def pool_at(hidden: Tensor, places: Tensor) -> Tensor:
    """The state of one place of each item: (n, t, d) and (n,) int64 in, (n, d) out."""
    index = places.reshape(-1, 1, 1).expand(-1, 1, hidden.shape[2])
    return hidden.gather(1, index).squeeze(1)

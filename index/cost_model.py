"""What a cascade costs by HiVLP's formula, and what stands in the way of it.

One query, all exits and searches, in multiplications (HiVLP section 3.4):

    t_traditional = e_L t_e + N d_L
    t_cascade     = e_1 t_e + sum over l < L of max((e_l+1 - e_l) t_e, N_l d_l) + N_L d_L

with exits e_l (layers), t_e a layer's cost, N_l the rows scored at level l (N_1 = N) and d_l its
dimension; the search of a level runs beside the layers that follow its exit. The paper's example
gives 5.9986, printed there as about 7. It puts a layer at 1,000 multiplications; a layer of width w
over t tokens needs about t (12 w^2 + 2 t w), 10^8 for 16 tokens of 768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PAPER_LAYER = 1e3


@dataclass(frozen=True, slots=True)
class CascadeCost:
    """Multiplications of one query, with and without the cascade."""

    traditional: float
    cascade: float

    @property
    def ratio(self) -> float:
        """How many times less the cascade costs."""
        return self.traditional / self.cascade


@dataclass(frozen=True, slots=True)
class Example:
    """A gallery that the paper speaks of: `scored` are the rows scored at each level."""

    name: str
    scored: tuple[int, ...]


EXAMPLES = (
    Example("Flickr30K test", (1_000, 1_000, 100)),
    Example("COCO 5K test", (5_000, 1_000, 100)),
    Example("Flickr30K, all", (31_014, 1_000, 100)),
    Example("COCO, all", (123_287, 5_000, 1_000)),
    Example("the paper's example", (1_000_000_000, 100_000, 100)),
)


def cascade_cost(
    scored: Sequence[int], dims: Sequence[int], exits: Sequence[int], layer: float
) -> CascadeCost:
    """The formula for any number of levels, coarse first; `layer` is t_e in multiplications."""
    assert len(scored) == len(dims) == len(exits) >= 1, (scored, dims, exits)
    searches = [n * d for n, d in zip(scored, dims, strict=True)]
    hidden = sum(
        max((later - earlier) * layer, search)
        for (earlier, later), search in zip(pairwise(exits), searches, strict=False)
    )
    return CascadeCost(
        traditional=exits[-1] * layer + scored[0] * dims[-1],
        cascade=exits[0] * layer + hidden + searches[-1],
    )


def layer_multiplications(width: int, tokens: int) -> float:
    """One transformer layer over `tokens`: four projections, a 4x feed-forward, attention."""
    return float(tokens * (12 * width**2 + 2 * tokens * width))

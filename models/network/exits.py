"""One tower with its exits: the network in pieces, a head at the end of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from hivlp.models.levels import LevelSpec
from hivlp.models.network.heads import Head
from hivlp.models.network.tower import Tensors, Tower, check_exits


@dataclass(frozen=True, slots=True)
class Reading:
    """What one run through a tower leaves: features at each exit, and the last layer's state.

    `features`: (n, width(exit)) each, coarse first.
    """

    features: tuple[Tensor, ...]
    state: Tensors


class TowerExits(nn.Module):
    """A tower that answers early: stage l runs to exit l and gives level l's embedding."""

    heads: nn.ModuleList

    def __init__(self, tower: Tower, exits: Sequence[int], heads: Sequence[Head]) -> None:
        super().__init__()
        self.tower = tower
        self.exits = check_exits(tower, exits)
        for exit_layer, head in zip(self.exits, heads, strict=True):
            assert head.features == tower.width(exit_layer), "a head of another exit"
        self.heads = nn.ModuleList(heads)

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """The early outputs, coarse first."""
        dims = [head.dim for head in self.exit_heads]
        pairs = zip(self.exits, dims, strict=True)
        return tuple(LevelSpec(i, layer, dim) for i, (layer, dim) in enumerate(pairs, 1))

    @property
    def exit_heads(self) -> tuple[Head, ...]:
        """The heads, coarse first."""
        return tuple(head for head in self.heads if isinstance(head, Head))

    def folded(self) -> TowerExits:
        """The same answers from fewer numbers, for inference: see `Head.folded`."""
        return TowerExits(self.tower, self.exits, [head.folded() for head in self.exit_heads])

    def read(self, inputs: Tensors) -> Reading:
        """Run the whole tower once, for a loss that wants more than the embeddings."""
        state, found = self.tower.begin(inputs), []
        for start, stop in pairwise((0, *self.exits)):
            state = self.tower.advance(state, inputs, start, stop)
            found.append(self.tower.pool(state, inputs, stop))
        return Reading(tuple(found), state)

    def run_stage(self, index: int, state: Tensors, inputs: Tensors) -> tuple[Tensor, Tensors]:
        """Stage `index` (from 0): its level's embedding (n, dim), and the state it leaves.

        The first stage begins from `inputs`, and its `state` is not read.
        """
        start, stop = (0, *self.exits)[index : index + 2]
        before = self.tower.begin(inputs) if index == 0 else state
        after = self.tower.advance(before, inputs, start, stop)
        return self.exit_heads[index].embed(self.tower.pool(after, inputs, stop)), after

    def forward(self, inputs: Tensors) -> list[Tensor]:
        """Embeddings of every level, coarse first: (n, dim) each, L2-normalised."""
        return list(self.answers(inputs))

    def answers(self, inputs: Tensors) -> Iterator[Tensor]:
        """The same, one at a time, each computed when it is asked for."""
        state: Tensors = {}
        for index, _ in enumerate(pairwise((0, *self.exits))):
            embedding, state = self.run_stage(index, state, inputs)
            yield embedding

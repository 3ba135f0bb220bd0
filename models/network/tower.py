"""A tower that can stop early: the protocol that every family implements, pretrained or not.

A tower runs in pieces. `begin` turns inputs into a state, `advance` runs some layers on it, and
`pool` reads one vector per item off it. The state is a dict of named tensors, so that a later piece
needs nothing but the state and `carried_inputs`; the export writes each piece as its own graph.
How a state is pooled, and which norm the checkpoint applies before, is the tower's own business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation, TextPreparation, file_record
from hivlp.models.errors import TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.weights import weights_hash

Tensors = Mapping[str, Tensor]
"""Named tensors; the first axis of each is the item, n."""

Pooling = Literal["first", "first+second", "mean", "eos", "last", "attention", "mean+max"]


class TowerError(TrainingError):
    """A checkpoint that can't be loaded as it stands; names the file and what is wrong."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Tower(nn.Module, ABC):
    """An encoder of one modality, `depth` layers deep.

    `input_names` are what `begin` reads; `carried_inputs` are those that `advance` and `pool` read
    as well (a text tower's `attention_mask`).
    """

    modality: ClassVar[Modality]
    family: ClassVar[str]
    input_names: ClassVar[tuple[str, ...]]
    carried_inputs: ClassVar[tuple[str, ...]] = ()
    retrained: str = ""
    """Hash of the weights where some are no longer the checkpoint's: see `load_layers`."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many layers it has; an exit is read after layer 1..depth."""

    @property
    @abstractmethod
    def pooling(self) -> Pooling:
        """How an exit's state becomes one vector."""

    @abstractmethod
    def width(self, layer: int) -> int:
        """The number of features that `pool` gives after `layer`."""

    @abstractmethod
    def begin(self, inputs: Tensors) -> Tensors:
        """The state before layer 1, from all of `input_names`."""

    @abstractmethod
    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        """Run layers start+1..stop on the state that layer `start` left."""

    @abstractmethod
    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:
        """Features of the exit after `layer`: (n, width(layer)) float32."""

    def sequence(self, state: Tensors, inputs: Tensors) -> Tensor:  # noqa: ARG002
        """What the last layer left of every token, for a cross-modal encoder: (n, t, d).

        With the final norm where the tower has one. Raises TrainingError for a tower without
        token states.
        """
        if "hidden" not in state:
            raise TrainingError(f"a tower of family {self.family} has no token states to attend to")
        return state["hidden"]

    @property
    @abstractmethod
    def preparation(self) -> TextPreparation | ImagePreparation:
        """How raw input becomes `input_names`; a tokenizer's file is relative to the checkpoint."""

    @property
    @abstractmethod
    def sources(self) -> tuple[Path, ...]:
        """The checkpoint's files, in an order of their own: see `identity`."""

    def identity(self) -> dict[str, str]:
        """What tells this tower from any other: what its files hold, and how they are read.

        Files count by their place in `sources`: two may bear one name, and a renamed checkpoint
        is still the same.
        """
        files = {f"source{i}": file_record(path).sha256 for i, path in enumerate(self.sources)}
        since = {"retrained": self.retrained} if self.retrained else {}
        return (
            files
            | since
            | {
                "family": self.family,
                "pooling": self.pooling,
                "preparation": self.preparation.model_dump_json(),
            }
        )

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """Layers 1..depth, to be trained apart from the rest.

        Raises TrainingError for a tower whose layers can't be told apart.
        """
        raise TrainingError(f"a tower of family {self.family} can't be unfrozen")

    @property
    def joint_space(self) -> str | None:
        """What names the space of the last exit where a text and a picture tower share one.

        The same for both towers of one checkpoint (CLIP), None for a tower that stands alone.
        """
        return None

    @property
    def vocabulary(self) -> int:
        """How many token ids a text tower knows; 0 for a tower of pictures."""
        return 0

    def exits(self, count: int) -> tuple[int, ...]:
        """`count` exits at equal distances, the last one after the last layer."""
        if not 1 <= count <= self.depth:
            raise TrainingError(f"{count} exits asked of {self.depth} layers ({self.family})")
        return tuple(round(self.depth * (i + 1) / count) for i in range(count))

    def features(self, inputs: Tensors, exits: Sequence[int]) -> list[Tensor]:
        """Pooled features at each exit, coarse first: a list of (n, width(exit)) float32."""
        check_exits(self, exits)
        state, found = self.begin(inputs), []
        for start, stop in pairwise((0, *exits)):
            state = self.advance(state, inputs, start, stop)
            found.append(self.pool(state, inputs, stop))
        return found


def check_exits(tower: Tower, exits: Sequence[int]) -> tuple[int, ...]:
    """Return `exits` as a tuple. Raises TrainingError unless they grow within 1..depth."""
    grows = all(a < b for a, b in pairwise((0, *exits)))
    if not exits or not grows or exits[-1] > tower.depth:
        raise TrainingError(
            f"exits {list(exits)} must grow within 1..{tower.depth}, "
            f"the layers of this {tower.modality} tower ({tower.family})"
        )
    return tuple(exits)


def first_layers(tower: Tower, count: int) -> nn.ModuleList:
    """Layers 1..count of a tower, the very modules. Raises TrainingError where it has fewer."""
    layers = tower.layer_modules
    if not 0 <= count <= len(layers):
        raise TrainingError(
            f"{count} layers to unfreeze: must be within 0..{len(layers)}, the layers of this "
            f"{tower.modality} tower ({tower.family})"
        )
    return nn.ModuleList(layers[:count])


def mark_retrained(tower: Tower) -> Tower:
    """Freeze a tower whose layers were trained, and tell it from what its files hold."""
    tower.retrained = weights_hash(tower)
    return freeze(tower)


def freeze(tower: Tower) -> Tower:
    """Put a tower into inference mode, with no gradient for any weight."""
    return tower.eval().requires_grad_(False)

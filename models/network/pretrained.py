"""What the pretrained Transformer towers with norms before each part share: CLIP, SigLIP, ViT.

Notable: with such norms a layer's states are un-normed, so the checkpoint's final norm is applied
to whatever an exit reads, early ones too. An early exit reads the pooled vectors of the last
`READ` layers up to it, each of length 1, one after the other: layers differ, pooling costs next to
nothing, and more layers would only make heads that are slower to fit. The last exit reads the
checkpoint's own output and nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.artifact import file_record, fingerprint
from hivlp.models.network.blocks import ACTIVATIONS, Activation, Block, BlockShape
from hivlp.models.network.fields import Fields
from hivlp.models.network.tower import Tensors, Tower

READ = 6


@dataclass(frozen=True, slots=True)
class Layers:
    """How many blocks, and of which shape."""

    depth: int
    block: BlockShape


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint's files: what a tower's identity is told by.

    `weights` are the files of the whole checkpoint; `joint`: they hold two towers that meet in one
    space. `others` are configuration and, for texts, the tokenizer.
    """

    folder: Path
    weights: tuple[Path, ...]
    others: tuple[Path, ...]
    joint: bool = False


def read_layers(fields: Fields, *, activation: Activation, eps: float, base: Layers) -> Layers:
    """A stack under Hugging Face's names; sizes that aren't said, and the norms, are as in `base`.

    Raises TowerError naming field and file.
    """
    width = fields.whole("hidden_size", base.block.width)
    heads = fields.whole("num_attention_heads", base.block.heads)
    if width % heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads, {heads}")
    block = replace(
        base.block,
        width=width,
        heads=heads,
        inner=fields.whole("intermediate_size", base.block.inner),
        activation=fields.word("hidden_act", ACTIVATIONS, activation),
        eps=fields.number("layer_norm_eps", eps),
    )
    return Layers(fields.whole("num_hidden_layers", base.depth), block)


class PretrainedTower(Tower):
    """Blocks with norms before, and a final norm. A subclass embeds, masks and pools."""

    def __init__(self, layers: Layers, files: Files) -> None:
        super().__init__()
        self.layers, self.files = layers, files
        self.blocks = nn.ModuleList(Block(layers.block) for _ in range(layers.depth))
        self.norm = nn.LayerNorm(layers.block.width, eps=layers.block.eps)

    @abstractmethod
    def _mask(self, hidden: Tensor) -> Tensor | None:
        """What may be attended to, as `Block` wants it."""

    @abstractmethod
    def vector(self, state: Tensors) -> Tensor:
        """The checkpoint's pooling and final norm on a layer's state: (n, pooled width)."""

    @abstractmethod
    def output(self, state: Tensors) -> Tensor:
        """The checkpoint's own answer, from the last layer's state: (n, width(depth))."""

    @property
    @abstractmethod
    def pooled_width(self) -> int:
        """The width of `vector`."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """The width of `output`."""

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.layers.depth

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    @property
    def sources(self) -> tuple[Path, ...]:
        """Configuration, tokenizer and weights."""
        return (*self.files.others, *self.files.weights)

    @property
    def joint_space(self) -> str | None:
        """The same for both towers of one checkpoint; None for a tower that stands alone."""
        if not self.files.joint:
            return None
        hashes = [file_record(path).sha256 for path in self.files.weights]
        return fingerprint({f"weights{i}": sha for i, sha in enumerate(hashes)})

    def width(self, layer: int) -> int:
        """Pooled vectors of the last `READ` layers up to this one; at the last layer the output."""
        if layer == self.depth:
            return self.output_width
        return min(layer, READ) * self.pooled_width

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:  # noqa: ARG002
        """Run layers start+1..stop on `hidden` (n, t, d), adding to `pooled`."""
        now = dict(state)
        pooled = [state["pooled"]] if start else []
        mask = self._mask(state["hidden"])
        for block in self.blocks[start:stop]:
            now["hidden"] = block(now["hidden"], mask)
            pooled.append(F.normalize(self.vector(now), dim=1))
        now["pooled"] = torch.cat(pooled, 1)[:, -READ * self.pooled_width :]
        return now

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:  # noqa: ARG002
        """(n, width(layer)): see `width`. What the last layer gives has length 1 as well."""
        if layer == self.depth:
            return F.normalize(self.output(state), dim=1)
        return state["pooled"]

    def sequence(self, state: Tensors, inputs: Tensors) -> Tensor:  # noqa: ARG002
        """Every token's state after the final norm: (n, t, d)."""
        normed: Tensor = self.norm(state["hidden"])
        return normed

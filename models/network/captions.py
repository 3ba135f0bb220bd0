"""Pretrained text towers with norms before each part, which CLIP and SigLIP share.

Notable: where the one vector is read. CLIP looks back only and ends in an end token: before it a
token knows nothing of the text, behind it nothing is looked at, so padding is cut and changes no
number. SigLIP was trained attending to padding up to a fixed length, and is read at the last place
whatever stands there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hivlp.models.artifact import TextPreparation
from hivlp.models.network.blocks import attention_mask
from hivlp.models.network.pooling import pool_at
from hivlp.models.network.pretrained import Files, Layers, PretrainedTower
from hivlp.models.network.tower import Pooling, Tensors

HIGHEST = -1
"""For `end_id`: the end token is the highest number of each text (CLIP's first checkpoints)."""


@dataclass(frozen=True, slots=True)
class CaptionShape:
    """What differs from family to family.

    `eos` pools at the end token `end_id` and looks back only; `last` pools at the last place and
    looks everywhere. `out` numbers come out of the last layer's map, which has a bias or not; 0
    where the checkpoint maps no further.
    """

    layers: Layers
    vocabulary: int
    positions: int
    pooling: Literal["eos", "last"]
    end_id: int = HIGHEST
    out: int = 0
    bias: bool = False


class CaptionTower(PretrainedTower):
    """`input_ids` (n, t) int64 to states (n, t, d). Who pools at the last place reads no mask."""

    modality = "text"
    input_names: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")

    def __init__(self, shape: CaptionShape, files: Files, prepared: TextPreparation) -> None:
        super().__init__(shape.layers, files)
        self.shape, self._prepared = shape, prepared
        width = shape.layers.block.width
        self.words = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(shape.positions, width)
        self.last = nn.Linear(width, shape.out, bias=shape.bias) if shape.out else None

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.shape.vocabulary

    @property
    def pooling(self) -> Pooling:
        """eos or last."""
        return self.shape.pooling

    @property
    def preparation(self) -> TextPreparation:
        """The checkpoint's tokenizer, token limit and padding."""
        return self._prepared

    @property
    def pooled_width(self) -> int:
        """One token's width."""
        return self.layers.block.width

    @property
    def output_width(self) -> int:
        """The projection's numbers, or one token's width."""
        return self.shape.out or self.pooled_width

    def begin(self, inputs: Tensors) -> Tensors:
        """`hidden` (n, t, d), and `place` (n,) int64, the token that is read."""
        ids = inputs["input_ids"]
        hidden = self.words(ids) + self.positions.weight[: ids.shape[1]]
        if self.shape.pooling == "last":
            return {"hidden": hidden, "place": torch.full_like(ids[:, 0], ids.shape[1] - 1)}
        return {"hidden": hidden, "place": self._end(ids, inputs["attention_mask"])}

    def _end(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The first end token of each text; of one without, its last token: (n,) int64."""
        kept = torch.where(mask.bool(), ids, -1)
        wanted = kept.amax(1, keepdim=True) if self.shape.end_id == HIGHEST else self.shape.end_id
        behind = mask.sum(1, keepdim=True) - 1
        places = torch.arange(ids.shape[1], device=ids.device)
        found = torch.where(kept == wanted, places, behind)
        return found.amin(1)

    def _mask(self, hidden: Tensor) -> Tensor | None:
        return attention_mask(hidden, causal=self.shape.pooling == "eos")

    def vector(self, state: Tensors) -> Tensor:
        """The state of the token that is read, after the final norm."""
        normed: Tensor = self.norm(pool_at(state["hidden"], state["place"]))
        return normed

    def output(self, state: Tensors) -> Tensor:
        """`vector`, mapped as the checkpoint maps it."""
        pooled = self.vector(state)
        return pooled if self.last is None else self.last(pooled)

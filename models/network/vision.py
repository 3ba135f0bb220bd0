"""HiVLP's vision tower, a ViT trained from nothing: patches, an [IMG] token, learned positions.

Notable: patches are cut and mapped by one strided convolution, which is the linear map of flattened
patches. The position of [IMG] is 0, patches follow row by row. What the paper leaves open
(resolution, patch, where the norms stand) has its default here and its reason in docs/papers.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation
from hivlp.models.errors import TrainingError
from hivlp.models.fields import number
from hivlp.models.network.stack import (
    StackShape,
    StackTower,
    at_least,
    learned_positions,
    special_token,
)
from hivlp.models.network.tower import Tensors
from hivlp.models.network.weights import initialise

HALF = (0.5, 0.5, 0.5)
MOST_PIXELS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape(StackShape):
    """A stack that reads pictures of `image_size` pixels a side in patches of `patch`.

    `fit`, `mean` and `std`: how a picture is brought to that size and scaled, see
    `ImagePreparation`.
    """

    image_size: int = number(224, 1, MOST_PIXELS, "pixels a side")
    patch: int = number(16, 1, MOST_PIXELS, "pixels a side")
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    mean: tuple[float, float, float] = number(HALF, -1000, 1000)
    std: tuple[float, float, float] = number(HALF, 1e-6, 1000)

    def __post_init__(self) -> None:
        StackShape.__post_init__(self)  # a slotted dataclass has no super() without arguments
        at_least("patch", self.patch, 1)
        at_least("image_size", self.image_size, self.patch)
        if self.image_size % self.patch:
            raise TrainingError(
                f"image_size: {self.image_size} is not a multiple of patch, {self.patch}"
            )
        if self.fit not in ("stretch", "crop", "pad"):
            raise TrainingError(f"fit: {self.fit!r} is none of stretch, crop, pad")
        if not all(deviation > 0 for deviation in self.std):
            raise TrainingError(f"std: {self.std} must be above 0")

    @property
    def patches(self) -> int:
        """How many patches a picture has."""
        return (self.image_size // self.patch) ** 2


class VisionTower(StackTower):
    """A ViT: `pixel_values` (n, 3, image_size, image_size) to states (n, 1 + patches, width)."""

    modality = "image"
    family = "hivlp-vision"
    input_names = ("pixel_values",)

    def __init__(self, shape: VisionShape) -> None:
        super().__init__(shape)
        self.sizes = shape
        self.patches = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.image_token = special_token(shape.width)
        self.positions = learned_positions(1 + shape.patches, shape.width)
        initialise(self, shape.width)

    @property
    def preparation(self) -> ImagePreparation:
        """Brought to `image_size` a side, scaled by `mean` and `std`."""
        shape = self.sizes
        return ImagePreparation(
            height=shape.image_size,
            width=shape.image_size,
            fit=shape.fit,
            mean=shape.mean,
            std=shape.std,
        )

    def _embed(self, inputs: Tensors) -> Tensor:
        pixels = inputs["pixel_values"]
        side = self.sizes.image_size
        assert pixels.shape[1:] == (3, side, side), f"pictures of 3 x {side} x {side} are wanted"
        patches = self.patches(pixels).flatten(2).transpose(1, 2)  # (n, patches, width)
        first = self.image_token.expand(patches.shape[0], -1, -1)
        return torch.cat([first, patches], 1) + self.positions

    def _mask(self, inputs: Tensors) -> Tensor | None:  # noqa: ARG002
        return None

    def _pooled(self, hidden: Tensor, inputs: Tensors) -> Tensor:  # noqa: ARG002
        """Every patch; [IMG] is none."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        return (places > 0).expand(hidden.shape[0], -1)

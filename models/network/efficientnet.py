"""EfficientNet-Lite vision towers (0 to 4), from the .pth state dict of their PyTorch port.

Lite means: inverted residual blocks without squeeze-and-excitation, ReLU6, and a stem and a head
that are not widened. A *layer* here is one of the seven published stages, the eighth is the head
convolution. Notable: an exit's features are the mean and the maximum over positions of every layer
so far, since a convolutional network says different things at each depth, and pooled maps cost
nothing to carry along. Padding is TensorFlow's "same", whose odd pixel goes right and below, and
pixels are scaled as (x - 127) / 128: the weights were trained that way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.artifact import ImagePreparation
from hivlp.models.network.checkpoint import load_strictly, read_pickled
from hivlp.models.network.tower import Pooling, Tensors, Tower, TowerError

STEM, HEAD = 32, 1280
NORM_EPSILON = 1e-3


@dataclass(frozen=True, slots=True)
class StageShape:
    """One published stage: kernel size, first stride, expansion, channels out, repeats."""

    kernel: int
    stride: int
    expand: int
    channels: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Variant:
    """How a member of the family is scaled: width and depth factors, input side in pixels."""

    width: float
    depth: float
    side: int


BASE = (
    StageShape(3, 1, 1, 16, 1),
    StageShape(3, 2, 6, 24, 2),
    StageShape(5, 2, 6, 40, 2),
    StageShape(3, 2, 6, 80, 3),
    StageShape(5, 1, 6, 112, 3),
    StageShape(5, 2, 6, 192, 4),
    StageShape(3, 1, 6, 320, 1),
)
VARIANTS = {
    "lite0": Variant(1.0, 1.0, 224),
    "lite1": Variant(1.0, 1.1, 240),
    "lite2": Variant(1.1, 1.2, 260),
    "lite3": Variant(1.2, 1.4, 280),
    "lite4": Variant(1.4, 1.8, 300),
}


def scaled_stages(variant: Variant) -> tuple[StageShape, ...]:
    """The stages of a variant; the first and the last are never repeated more often."""
    return tuple(
        StageShape(
            stage.kernel,
            stage.stride,
            stage.expand,
            _round_channels(stage.channels * variant.width),
            stage.repeats if i in (0, len(BASE) - 1) else math.ceil(stage.repeats * variant.depth),
        )
        for i, stage in enumerate(BASE)
    )


def _round_channels(channels: float) -> int:
    """To a multiple of 8, never more than a tenth below what was asked."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


class SameConv(nn.Module):
    """Convolution with TensorFlow's padding, then batch norm, then ReLU6 where `active`."""

    def __init__(
        self, inner: int, outer: int, kernel: int, stride: int = 1, *, groups: int = 1,
        active: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel, self.stride, self.active = kernel, stride, active
        self.conv = nn.Conv2d(inner, outer, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outer, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inner, h, w) in, (n, outer, ceil(h / stride), ceil(w / stride)) out."""
        if self.kernel > 1:
            x = F.pad(x, (*self._padding(x.shape[3]), *self._padding(x.shape[2])))
        normed: Tensor = self.norm(self.conv(x))
        return F.relu6(normed) if self.active else normed

    def _padding(self, side: int) -> tuple[int, int]:
        total = max((math.ceil(side / self.stride) - 1) * self.stride + self.kernel - side, 0)
        return total // 2, total - total // 2


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow again; added to its input where the shapes agree."""

    def __init__(self, inner: int, shape: StageShape, *, stride: int) -> None:
        super().__init__()
        middle = inner * shape.expand
        widen = [SameConv(inner, middle, 1)] if shape.expand > 1 else []
        self.steps = nn.Sequential(
            *widen,
            SameConv(middle, middle, shape.kernel, stride, groups=middle),
            SameConv(middle, shape.channels, 1, active=False),
        )
        self.adds = stride == 1 and inner == shape.channels

    def forward(self, x: Tensor) -> Tensor:
        """(n, inner, h, w) in, (n, channels, h / stride, w / stride) out."""
        y: Tensor = self.steps(x)
        return x + y if self.adds else y


class EfficientNetLite(Tower):
    """An EfficientNet-Lite whose stages are run in pieces; its classifier is left out."""

    modality = "image"
    family = "efficientnet-lite"
    input_names = ("pixel_values",)

    def __init__(self, variant: Variant, *, path: Path) -> None:
        super().__init__()
        self.variant, self.path = variant, path
        self.stem = SameConv(3, STEM, 3, 2)
        stages, inner = scaled_stages(variant), STEM
        self.widths = (*(stage.channels for stage in stages), HEAD)
        self.layers = nn.ModuleList()
        for stage in stages:
            self.layers.append(_stage(inner, stage))
            inner = stage.channels
        self.layers.append(SameConv(inner, HEAD, 1))

    @property
    def depth(self) -> int:
        """Seven stages and the head convolution."""
        return len(self.layers)

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """Seven stages and the head convolution; the stem is none of them."""
        return list(self.layers)

    @property
    def pooling(self) -> Pooling:
        """Mean and maximum over positions."""
        return "mean+max"

    @property
    def preparation(self) -> ImagePreparation:
        """Stretched to the variant's side, scaled as TensorFlow's weights want it."""
        side = self.variant.side
        return ImagePreparation(
            height=side, width=side, fit="stretch", mean=(127 / 255,) * 3, std=(128 / 255,) * 3
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        """The weights."""
        return (self.path,)

    def exits(self, count: int) -> tuple[int, ...]:
        """The last `count` layers: earlier maps tell textures, not things (docs/papers.md)."""
        super().exits(count)
        return tuple(range(self.depth - count + 1, self.depth + 1))

    def width(self, layer: int) -> int:
        """Mean and maximum of every layer so far."""
        return 2 * sum(self.widths[:layer])

    def begin(self, inputs: Tensors) -> Tensors:
        """The stem on `pixel_values` (n, 3, h, w) float32; nothing pooled yet."""
        pixels = inputs["pixel_values"]
        return {"maps": self.stem(pixels), "pooled": pixels.new_zeros(pixels.shape[0], 0)}

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:  # noqa: ARG002
        """Run layers start+1..stop on `maps`, adding to `pooled` (n, width(stop))."""
        maps, pooled = state["maps"], [state["pooled"]] if start else []
        for layer in self.layers[start:stop]:
            maps = layer(maps)  # (n, c, h, w)
            pooled += [maps.mean((2, 3)), maps.amax((2, 3))]
        return {"maps": maps, "pooled": torch.cat(pooled, 1)}

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:  # noqa: ARG002
        """What was pooled on the way: (n, width(layer))."""
        return state["pooled"]


def _stage(inner: int, shape: StageShape) -> nn.Sequential:
    first = InvertedResidual(inner, shape, stride=shape.stride)
    rest = [InvertedResidual(shape.channels, shape, stride=1) for _ in range(shape.repeats - 1)]
    return nn.Sequential(first, *rest)


def is_efficientnet_lite(path: Path) -> bool:
    """Whether `path` is a .pth file with this family's names in it."""
    if path.suffix not in (".pth", ".pt") or not path.is_file():
        return False
    return {"_conv_stem.weight", "_conv_head.weight"} <= read_pickled(path).keys()


def load_efficientnet_lite(path: Path) -> EfficientNetLite:
    """Load a .pth state dict; the variant is told by its shapes. Raises TowerError."""
    weights = read_pickled(path)
    tower = EfficientNetLite(_variant(weights, path), path=path)
    kept = {name: value for name, value in weights.items() if not name.startswith("_fc.")}
    names = _our_names(tower)
    named = {names.get(name, name): value.float() for name, value in kept.items()}
    for name, value in weights.items():
        if name.endswith("num_batches_tracked"):
            named[names.get(name, name)] = value
    load_strictly(tower, named, path)
    return tower


def _variant(weights: dict[str, Tensor], path: Path) -> Variant:
    blocks = {int(name.split(".")[1]) for name in weights if name.startswith("_blocks.")}
    head = weights["_conv_head.weight"] if "_conv_head.weight" in weights else torch.empty(0, 0)
    for variant in VARIANTS.values():
        stages = scaled_stages(variant)
        count = sum(stage.repeats for stage in stages)
        if len(blocks) == count and head.shape[1] == stages[-1].channels:
            return variant
    found = f"{len(blocks)} blocks, {head.shape[1]} channels before the head"
    raise TowerError(path, f"no EfficientNet-Lite has {found}; known: {', '.join(VARIANTS)}")


def _our_names(tower: EfficientNetLite) -> dict[str, str]:
    """The port's name of each weight -> ours."""
    names: dict[str, str] = {}

    def add(ours: str, conv: str, norm: str) -> None:
        names[f"{conv}.weight"] = f"{ours}.conv.weight"
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            names[f"{norm}.{part}"] = f"{ours}.norm.{part}"

    add("stem", "_conv_stem", "_bn0")
    add(f"layers.{tower.depth - 1}", "_conv_head", "_bn1")
    convs = ("_expand_conv", "_depthwise_conv", "_project_conv")
    index = 0
    for layer, stage in enumerate(scaled_stages(tower.variant)):
        for block in range(stage.repeats):
            # a block that doesn't widen has no first convolution, and starts with _bn1
            used = [i for i in range(3) if i or stage.expand > 1]
            for step, i in enumerate(used):
                theirs = f"_blocks.{index}."
                ours = f"layers.{layer}.{block}.steps.{step}"
                add(ours, theirs + convs[i], f"{theirs}_bn{i}")
            index += 1
    return names

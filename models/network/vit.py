"""ViT (arXiv 2010.11929) and DeiT (2012.12877) towers of pictures, from a Hugging Face folder.

Notable: what is read is what the checkpoint's own class reads. The pooler where it was saved with
one (ViTModel), else the class token after the final norm. A DeiT that answers as the mean of two
classifiers, one on its class token and one on its distillation token, is read at both, one after
the other, as each says something of its own; any other DeiT at the class token.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hivlp.models.network.blocks import BlockShape
from hivlp.models.network.checkpoint import (
    load_strictly,
    read_weights,
    renaming,
    shards,
    weight_file,
)
from hivlp.models.network.fields import Fields
from hivlp.models.network.folders import CONFIG, model_type
from hivlp.models.network.image_processors import processor_file, read_processor
from hivlp.models.network.pictures import Last, PictureShape, PictureTower
from hivlp.models.network.pretrained import Files, Layers, read_layers

# What a field that isn't said is in Hugging Face's configuration of both families.
BASE = Layers(12, BlockShape(768, 12, 3072))
EPS = 1e-12
TWO_TOKENS = "DeiTForImageClassificationWithTeacher"
Tower = TypeVar("Tower", bound=PictureTower)
_UNUSED = re.compile(r"^((cls_|distillation_)?classifier|decoder)\.|(^|\.)mask_token$")
_PREFIX = re.compile(r"^(vit|deit)\.")
_TOKENS, _POOLER = "embeddings.cls_token", "pooler.dense.weight"
_SECOND = "embeddings.distillation_token"
_NAMES = renaming(
    ("blocks.", "encoder.layer."),
    ("attention.query", "attention.attention.query"),
    ("attention.key", "attention.attention.key"),
    ("attention.value", "attention.attention.value"),
    ("attention.out", "attention.output.dense"),
    ("attention_norm", "layernorm_before"),
    ("feed.inner", "intermediate.dense"),
    ("feed.outer", "output.dense"),
    ("feed_norm", "layernorm_after"),
    ("patches.", "embeddings.patch_embeddings.projection."),
    ("positions", "embeddings.position_embeddings"),
    ("tokens", _TOKENS),
    ("last.", "pooler.dense."),
)


class VitTower(PictureTower):
    """A ViT."""

    family = "vit"


class DeitTower(PictureTower):
    """A DeiT with a distillation token; one without was saved as a ViT."""

    family = "deit"


def is_vit(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of model type vit."""
    return model_type(path) == "vit"


def is_deit(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of model type deit."""
    return model_type(path) == "deit"


def load_vit(path: Path) -> VitTower:
    """Load a folder of model type vit. Raises TowerError."""
    return _load(path, VitTower, two_tokens=False)


def load_deit(path: Path) -> DeitTower:
    """Load a folder of model type deit. Raises TowerError."""
    return _load(path, DeitTower, two_tokens=True)


def _load(path: Path, kind: type[Tower], *, two_tokens: bool) -> Tower:
    fields, file = Fields.read(path / CONFIG), weight_file(path)
    weights = _weights(file, two_tokens=two_tokens)
    fields.refuse("num_channels", 3)
    pooler = _POOLER in weights
    if pooler:
        fields.refuse("pooler_act", "tanh")
    layers = read_layers(fields, activation="gelu", eps=EPS, base=BASE)
    named = fields.values.get("architectures")
    both = two_tokens and isinstance(named, list) and TWO_TOKENS in named
    last: Last = "pooler" if pooler else "nothing"
    shape = PictureShape(
        layers,
        fields.sides("image_size", 224),
        fields.sides("patch_size", 16),
        tokens=2 if two_tokens else 1,
        patch_bias=True,
        first_norm=False,
        pooling="first+second" if both else "first",
        last=last,
        out=fields.whole("pooler_output_size", layers.block.width) if pooler else 0,
    )
    processor = processor_file(path)
    files = Files(path, shards(file), (fields.path, processor))
    tower = kind(shape, files, read_processor(processor, shape.image))
    if not fields.flag("qkv_bias", True):
        weights |= _no_biases(layers)
    load_strictly(tower, weights, file, _their_name)
    return tower


def _their_name(name: str) -> str:
    return f"layernorm.{name.removeprefix('norm.')}" if name.startswith("norm.") else _NAMES(name)


def _weights(file: Path, *, two_tokens: bool) -> dict[str, Tensor]:
    """What the tower is made of; with two tokens both lie in the first one's place."""
    read = read_weights(file)
    kept = {_PREFIX.sub("", name): v for name, v in read.items() if not _UNUSED.search(name)}
    if two_tokens and _TOKENS in kept and _SECOND in kept:
        first, second = kept.pop(_TOKENS), kept.pop(_SECOND)
        kept[_TOKENS] = torch.cat([first.flatten(0, -2), second.flatten(0, -2)])
    return kept


def _no_biases(layers: Layers) -> dict[str, Tensor]:
    """A checkpoint without biases of queries, keys and values has zeros there."""
    zeros = torch.zeros(layers.block.width)
    return {
        _NAMES(f"blocks.{i}.attention.{part}.bias"): zeros
        for i in range(layers.depth)
        for part in ("query", "key", "value")
    }

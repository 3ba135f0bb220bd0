"""OpenCLIP's checkpoints of CLIP with ViT towers: their own configuration and names of weights.

Notable: queries, keys and values lie in one fused matrix, projections are kept turned, and the end
token is the highest id of each text. What OpenCLIP can build besides (timm's vision towers, Hugging
Face's text towers, other poolings) is refused by its field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hivlp.models.artifact import TextPreparation
from hivlp.models.network.blocks import Activation, BlockShape
from hivlp.models.network.captions import HIGHEST, CaptionShape, CaptionTower
from hivlp.models.network.checkpoint import (
    has_weights,
    load_strictly,
    read_weights,
    renaming,
    shards,
    unfuse,
    weight_file,
)
from hivlp.models.network.fields import Fields
from hivlp.models.network.image_processors import read_open_clip
from hivlp.models.network.pictures import PictureShape, PictureTower
from hivlp.models.network.pretrained import Files, Layers
from hivlp.models.network.tokenizer_files import CLIP_PAIRS, TOKENIZER, check_tokenizer

OPEN_CONFIG = "open_clip_config.json"
OPEN_WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
HEAD_WIDTH, EPS = 64, 1e-5
# Fields -> the one value that is implemented; an absent field has it.
_VISION_ONLY: Mapping[str, Any] = {
    "timm_model_name": "",
    "attentional_pool": False,
    "no_ln_pre": False,
    "ls_init_value": None,
    "global_average_pool": False,
    "pool_type": "tok",
    "final_ln_after_pool": False,
    "pos_embed_type": "learnable",
    "input_patchnorm": False,
    "act_kwargs": None,
    "norm_kwargs": None,
}
_TEXT_ONLY: Mapping[str, Any] = {
    "hf_model_name": "",
    "ls_init_value": None,
    "embed_cls": False,
    "no_causal_mask": False,
    "pool_type": "argmax",
    "proj_type": "linear",
    "proj_bias": False,
    "final_ln_after_pool": False,
    "act_kwargs": None,
    "norm_kwargs": None,
    "tokenizer_kwargs": {},
}
_NOWHERE = re.compile(
    r"^(logit_scale|logit_bias|attn_mask|input_resolution|context_length|vocab_size)$"
)
_BLOCKS = (
    ("blocks.", "transformer.resblocks."),
    *(
        (f"attention.{part}.{kind}", f"attn.in_proj_{kind}[{part}]")
        for part in ("query", "key", "value")
        for kind in ("weight", "bias")
    ),
    ("attention.out", "attn.out_proj"),
    ("attention_norm", "ln_1"),
    ("feed.inner", "mlp.c_fc"),
    ("feed.outer", "mlp.c_proj"),
    ("feed_norm", "ln_2"),
)
_TEXT = renaming(
    *_BLOCKS,
    ("words.", "token_embedding."),
    ("positions.weight", "positional_embedding"),
    ("last.weight", "text_projection"),
)
_PICTURE = renaming(
    *_BLOCKS,
    ("patches.", "conv1."),
    ("tokens", "class_embedding"),
    ("positions", "positional_embedding"),
    ("first_norm", "ln_pre"),
    ("last.weight", "proj"),
)


class OpenClipText(CaptionTower):
    """OpenCLIP's own text tower."""

    family = "openclip"


class OpenClipPicture(PictureTower):
    """OpenCLIP's own vision tower."""

    family = "openclip"


def is_open_clip(path: Path) -> bool:
    """Whether `path` is a folder of OpenCLIP's."""
    return (path / OPEN_CONFIG).is_file() and has_open_weights(path)


def has_open_weights(path: Path) -> bool:
    """Whether weights under OpenCLIP's names of files lie in `path`."""
    return has_weights(path, OPEN_WEIGHTS)


def load_open_clip_text(path: Path) -> OpenClipText:
    """The text tower of a folder. Raises TowerError."""
    model, own, width = _fields(path, "text_cfg")
    for name, value in _TEXT_ONLY.items():
        own.refuse(name, value)
    block = _block(model, own, width, own.whole("heads", 8))
    shape = CaptionShape(
        Layers(own.whole("layers", 12), block),
        own.whole("vocab_size", 49408),
        own.whole("context_length", 77),
        "eos",
        HIGHEST,
        out=model.whole("embed_dim"),
    )
    check_tokenizer(path, CLIP_PAIRS, shape.vocabulary)
    prepared = TextPreparation(tokenizer_file=TOKENIZER, max_tokens=shape.positions, pad_id=0)
    file = weight_file(path, OPEN_WEIGHTS)
    tower = OpenClipText(shape, _files(path, file, path / TOKENIZER), prepared)
    weights = {n: v for n, v in _weights(file).items() if not n.startswith("visual.")}
    load_strictly(tower, _turned(weights, "text_projection"), file, _named(_TEXT, "", "ln_final"))
    return tower


def load_open_clip_picture(path: Path) -> OpenClipPicture:
    """The vision tower of a folder. Raises TowerError."""
    model, own, width = _fields(path, "vision_cfg")
    for name, value in _VISION_ONLY.items():
        own.refuse(name, value)
    heads, rest = divmod(width, own.whole("head_width", HEAD_WIDTH))
    if rest:
        raise own.error("head_width", f"must divide width, {width}")
    shape = PictureShape(
        Layers(own.whole("layers", 12), _block(model, own, width, heads)),
        own.sides("image_size", 224),
        own.sides("patch_size", 16),
        tokens=1,
        patch_bias=False,
        first_norm=True,
        pooling="first",
        last="projection",
        out=model.whole("embed_dim"),
    )
    file = weight_file(path, OPEN_WEIGHTS)
    prepared = read_open_clip(_config(path).part("preprocess_cfg"), shape.image)
    tower = OpenClipPicture(shape, _files(path, file), prepared)
    weights = {n: v for n, v in _weights(file).items() if n.startswith("visual.")}
    theirs = _named(_PICTURE, "visual.", "ln_post")
    load_strictly(tower, _turned(weights, "visual.proj"), file, theirs)
    return tower


def _config(path: Path) -> Fields:
    return Fields.read(path / OPEN_CONFIG)


def _fields(path: Path, part: str) -> tuple[Fields, Fields, int]:
    """The model's fields, those of one tower, and the tower's width."""
    model = _config(path).part("model_cfg")
    if part not in model:
        raise model.error(part, "is missing")
    own = model.part(part)
    return model, own, own.whole("width", 768 if part == "vision_cfg" else 512)


def _block(model: Fields, own: Fields, width: int, heads: int) -> BlockShape:
    if width % heads:
        raise own.error("heads", f"must divide width, {width}")
    activation: Activation = "quick_gelu" if model.flag("quick_gelu", False) else "gelu"
    inner = int(width * own.number("mlp_ratio", 4.0))
    return BlockShape(width, heads, inner, activation=activation, eps=EPS)


def _files(path: Path, file: Path, *others: Path) -> Files:
    return Files(path, shards(file), (path / OPEN_CONFIG, *others), joint=True)


def _weights(file: Path) -> dict[str, Tensor]:
    """Every weight of both towers; a text tower that stands apart has a prefix of its own."""
    read = {name.removeprefix("text."): value for name, value in read_weights(file).items()}
    return unfuse({name: value for name, value in read.items() if not _NOWHERE.search(name)})


def _turned(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """A projection is kept as (width, out), to be multiplied from the left."""
    return weights | {name: weights[name].T.contiguous()} if name in weights else weights


def _named(renamed: Callable[[str], str], prefix: str, norm: str) -> Callable[[str], str]:
    def named(name: str) -> str:
        if name.startswith("norm."):
            return f"{prefix}{norm}.{name.removeprefix('norm.')}"
        return prefix + renamed(name)

    return named

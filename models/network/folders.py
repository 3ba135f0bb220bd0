"""A Hugging Face folder that holds a text tower, a vision tower, or both: CLIP's and SigLIP's form.

Notable: of a folder with both, a tower takes its own weights and leaves the other's alone; whatever
belongs to neither is unexpected. Weights are named in errors as the file names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from hivlp.models.network.checkpoint import (
    read_weights,
    renaming,
    shards,
    unfuse,
    weight_file,
)
from hivlp.models.network.fields import Fields
from hivlp.models.network.pretrained import Files

CONFIG = "config.json"
Side = Literal["text", "vision"]
TEXT: Side = "text"
VISION: Side = "vision"
_OF: Mapping[Side, tuple[str, ...]] = {
    "text": ("text_model.", "text_projection."),
    "vision": ("vision_model.", "visual_projection."),
}
# What belongs to no tower: factors of a loss, and numbers that only count places.
_NOWHERE = re.compile(r"^logit_(scale|bias)$|(^|\.)position_ids$")
# Our names to Hugging Face's, in both towers of both families.
_BLOCKS = (
    ("blocks.", "encoder.layers."),
    ("attention.query", "self_attn.q_proj"),
    ("attention.key", "self_attn.k_proj"),
    ("attention.value", "self_attn.v_proj"),
    ("attention.out", "self_attn.out_proj"),
    ("attention_norm", "layer_norm1"),
    ("feed.inner", "mlp.fc1"),
    ("feed.outer", "mlp.fc2"),
    ("feed_norm", "layer_norm2"),
)
_TEXT = renaming(
    *_BLOCKS,
    ("words.", "embeddings.token_embedding."),
    ("positions.", "embeddings.position_embedding."),
)
_PICTURE = renaming(*_BLOCKS, ("patches.", "embeddings.patch_embedding."))
_PROBE = {
    "probe.query": "head.probe",
    **{
        f"probe.attention.{part}.{kind}": f"head.attention.in_proj_{kind}[{part}]"
        for part in ("query", "key", "value")
        for kind in ("weight", "bias")
    },
    "probe.attention.out.weight": "head.attention.out_proj.weight",
    "probe.attention.out.bias": "head.attention.out_proj.bias",
}
_PROBE_PARTS = renaming(
    ("probe.norm", "head.layernorm"),
    ("probe.feed.inner", "head.mlp.fc1"),
    ("probe.feed.outer", "head.mlp.fc2"),
)


def model_type(path: Path) -> str:
    """What a folder's config.json says it is; nothing where there is none."""
    config = path / CONFIG
    return str(Fields.read(config).values.get("model_type", "")) if config.is_file() else ""


@dataclass(frozen=True, slots=True)
class TowerFolder:
    """One tower of a folder, read: `whole` configuration and the tower's `own`, its weights.

    `joint`: the folder holds both towers. `prefix` stands before the names of the tower's weights.
    """

    path: Path
    whole: Fields
    own: Fields
    joint: bool
    prefix: str
    weight_file: Path
    weights: Mapping[str, Tensor]

    @staticmethod
    def read(path: Path, side: Side) -> TowerFolder:
        """Read the configuration and this side's weights. Raises TowerError."""
        whole, file = Fields.read(path / CONFIG), weight_file(path)
        joint = "_model" not in whole.text("model_type")
        found = read_weights(file)
        other = _OF["vision" if side == "text" else "text"] if joint else ()
        own = {
            name: value
            for name, value in found.items()
            if not name.startswith(other) and not _NOWHERE.search(name)
        }
        prefix = _OF[side][0]
        named = any(name.startswith(prefix) for name in own)
        return TowerFolder(
            path,
            whole,
            _config(whole, side) if joint else whole,
            joint,
            prefix if joint or named else "",
            file,
            unfuse(own),
        )

    def files(self, other: Path) -> Files:
        """The files read, and one `other`: the tokenizer's or the image processor's."""
        return Files(self.path, shards(self.weight_file), (self.whole.path, other), self.joint)


def _config(whole: Fields, side: Side) -> Fields:
    """A side's configuration; what stands in the older `text_config_dict` goes before."""
    name = f"{side}_config"
    newer, older = whole.part(name), whole.part(f"{name}_dict")
    return Fields({**newer.values, **older.values}, whole.path, f"{name}.")


def text_name(prefix: str, *, norm: str, last: str) -> Callable[[str], str]:
    """Our names of a text tower's weights to Hugging Face's."""

    def named(name: str) -> str:
        part, _, rest = name.partition(".")
        if part == "last":
            return f"{last}.{rest}"
        return f"{prefix}{norm}.{rest}" if part == "norm" else prefix + _TEXT(name)

    return named


def picture_name(prefix: str, *, last: str = "") -> Callable[[str], str]:
    """Our names of a vision tower's weights to Hugging Face's."""
    special = {
        "tokens": "embeddings.class_embedding",
        "positions": "embeddings.position_embedding.weight",
        **_PROBE,
    }

    def named(name: str) -> str:
        part, _, rest = name.partition(".")
        if name in special:
            return prefix + special[name]
        if part == "last":
            return f"{last}.{rest}"
        if part == "probe":
            return prefix + _PROBE_PARTS(name)
        # the first norm is so written in every checkpoint
        norms = {"norm": "post_layernorm", "first_norm": "pre_layrnorm"}
        return f"{prefix}{norms[part]}.{rest}" if part in norms else prefix + _PICTURE(name)

    return named

"""Which family of tower lies at a path: the one registry of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hivlp.models.levels import Modality
from hivlp.models.network.bert import is_bert, is_roberta, load_bert, load_roberta
from hivlp.models.network.checkpoint import WEIGHT_FILES
from hivlp.models.network.clip import is_clip, load_clip_picture, load_clip_text
from hivlp.models.network.efficientnet import is_efficientnet_lite, load_efficientnet_lite
from hivlp.models.network.openclip import (
    OPEN_WEIGHTS,
    is_open_clip,
    load_open_clip_picture,
    load_open_clip_text,
)
from hivlp.models.network.siglip import is_siglip, load_siglip_picture, load_siglip_text
from hivlp.models.network.tower import Tower, TowerError, freeze
from hivlp.models.network.vit import is_deit, is_vit, load_deit, load_vit


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint: what it looks like, and how it is recognised and loaded.

    `weights`: the names that its weights may bear in a folder; the first that is there is read.
    """

    modality: Modality
    looks_like: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path], Tower]
    weights: tuple[str, ...] = WEIGHT_FILES


FAMILIES: dict[str, Family] = {
    "bert": Family(
        "text", "a Hugging Face folder, config.json with model_type bert", is_bert, load_bert
    ),
    "roberta": Family("text", "the same with model_type roberta", is_roberta, load_roberta),
    "clip-text": Family(
        "text", "the same with model_type clip", partial(is_clip, modality="text"), load_clip_text
    ),
    "siglip-text": Family(
        "text",
        "the same with model_type siglip",
        partial(is_siglip, modality="text"),
        load_siglip_text,
    ),
    "openclip-text": Family(
        "text",
        "a folder with open_clip_config.json",
        is_open_clip,
        load_open_clip_text,
        OPEN_WEIGHTS,
    ),
    "efficientnet-lite": Family(
        "image", "a .pth state dict with _conv_stem", is_efficientnet_lite, load_efficientnet_lite
    ),
    "vit": Family(
        "image", "a Hugging Face folder, config.json with model_type vit", is_vit, load_vit
    ),
    "deit": Family("image", "the same with model_type deit", is_deit, load_deit),
    "clip-image": Family(
        "image",
        "the same with model_type clip",
        partial(is_clip, modality="image"),
        load_clip_picture,
    ),
    "siglip-image": Family(
        "image",
        "the same with model_type siglip",
        partial(is_siglip, modality="image"),
        load_siglip_picture,
    ),
    "openclip-image": Family(
        "image",
        "a folder with open_clip_config.json",
        is_open_clip,
        load_open_clip_picture,
        OPEN_WEIGHTS,
    ),
}


def load_tower(path: Path, modality: Modality) -> Tower:
    """The frozen tower at `path`. Raises TowerError where no family of `modality` knows it."""
    if not path.exists():
        raise TowerError(path, f"no such file or folder ({modality} tower)")
    known = families_at(path)
    for family in known.values():
        if family.modality == modality:
            return freeze(family.load(path))
    wanted = {name: each for name, each in FAMILIES.items() if each.modality == modality}
    listed = "; ".join(f"{name}: {family.looks_like}" for name, family in wanted.items())
    raise TowerError(path, f"no {modality} tower of a known family. Known are {listed}")


def families_at(path: Path) -> dict[str, Family]:
    """The families that know a path, one a modality at most: two of a folder with both towers."""
    found: dict[Modality, tuple[str, Family]] = {}
    for name, family in FAMILIES.items():
        if family.modality not in found and family.recognises(path):
            found[family.modality] = (name, family)
    return dict(found.values())

"""Which family of tower lies at a path: the one registry of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.levels import Modality
from hivlp.models.network.bert import is_bert, load_bert
from hivlp.models.network.efficientnet import is_efficientnet_lite, load_efficientnet_lite
from hivlp.models.network.tower import Tower, TowerError, freeze


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint: what it looks like, and how it is recognised and loaded."""

    modality: Modality
    looks_like: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path], Tower]


FAMILIES: dict[str, Family] = {
    "bert": Family(
        "text", "a Hugging Face folder, config.json with model_type bert", is_bert, load_bert
    ),
    "efficientnet-lite": Family(
        "image", "a .pth state dict with _conv_stem", is_efficientnet_lite, load_efficientnet_lite
    ),
}


def load_tower(path: Path, modality: Modality) -> Tower:
    """The frozen tower at `path`. Raises TowerError where no family of `modality` knows it."""
    if not path.exists():
        raise TowerError(path, f"no such file or folder ({modality} tower)")
    known = {name: family for name, family in FAMILIES.items() if family.modality == modality}
    for family in known.values():
        if family.recognises(path):
            return freeze(family.load(path))
    listed = "; ".join(f"{name}: {family.looks_like}" for name, family in known.items())
    raise TowerError(path, f"no {modality} tower of a known family. Known are {listed}")

"""Weights into a module of ours, strictly: missing, unexpected or mis-shaped ones are an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hivlp.models.errors import MissingExtra
from hivlp.models.network.tower import TowerError

NAMED = 4  # how many names an error lists


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a .safetensors file. Raises TowerError naming the file."""
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise MissingExtra("safetensors", "train") from error
    if not path.is_file():
        raise TowerError(path, "no such file")
    try:
        return dict(load_file(path))
    except Exception as error:  # the library raises its own bare errors
        raise TowerError(path, f"not a readable safetensors file: {error}") from error


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Every tensor of a .pth state dict, read with `weights_only`. Raises TowerError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        raise TowerError(path, f"not a state dict that can be read safely: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise TowerError(path, "holds something else than a flat state dict of tensors")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises TowerError naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TowerError(path, f"can't be read: {error.strerror}") from error
    except ValueError as error:
        raise TowerError(path, f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TowerError(path, "not a JSON object")
    return found


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy `weights` into `module`. Raises TowerError naming the weights that don't fit."""
    wanted = module.state_dict()
    _refuse(path, "missing", [name for name in wanted if name not in weights])
    _refuse(path, "unexpected", [name for name in weights if name not in wanted])
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if weights[name].shape != value.shape
    ]
    _refuse(path, "mis-shaped", shapes)
    broken = [n for n, v in weights.items() if v.is_floating_point() and not v.isfinite().all()]
    _refuse(path, "not finite", broken)
    module.load_state_dict(dict(weights), strict=True)


def _refuse(path: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise TowerError(path, f"{what} weights: {', '.join(names[:NAMED])}{more}")

"""Weights into a module of ours, strictly: missing, unexpected or mis-shaped ones are an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hivlp.models.errors import MissingExtra
from hivlp.models.network.tower import TowerError

NAMED = 4  # how many names an error lists
# A Hugging Face folder's weights: the first that is there is read.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


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
    if not path.is_file():
        raise TowerError(path, "no such file")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        raise TowerError(path, f"not a state dict that can be read safely: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise TowerError(path, "holds something else than a flat state dict of tensors")
    return found


def has_weights(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> bool:
    """Whether one of the files of weights, or an index of them, lies in `folder`."""
    return any((folder / name).is_file() for name in names)


def weight_file(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> Path:
    """The file that holds a folder's weights, or their index. Raises TowerError where none does."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise TowerError(folder, f"no weights: one of {', '.join(names)} is needed")


def shards(path: Path) -> tuple[Path, ...]:
    """The files of weights behind `path`: itself, or all that an index names.

    Raises TowerError for a broken index, and for a name that leaves its folder.
    """
    if path.suffix != ".json":
        return (path,)
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise TowerError(path, "field 'weight_map' must say which file holds each weight")
    files = sorted({path.parent / name for name in listed.values()})
    for file in files:
        if file.parent != path.parent or file.name == "..":
            raise TowerError(path, f"field 'weight_map': {file.name!r} leaves the folder")
    return tuple(files)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor behind `path`, numbers as float32, whatever they were kept in.

    `path` is a .safetensors, a pickled state dict, or the index of several. Raises TowerError.
    """
    found: dict[str, Tensor] = {}
    for file in shards(path):
        read = read_safetensors if file.suffix == ".safetensors" else read_pickled
        found |= {n: v.float() if v.is_floating_point() else v for n, v in read(file).items()}
    if path.suffix == ".json":
        listed = read_json(path)["weight_map"]
        _refuse(path, "missing", [name for name in listed if name not in found])
        _refuse(path, "unexpected", [name for name in found if name not in listed])
    return found


def read_anything(path: Path) -> Any:
    """Any JSON value. Raises TowerError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TowerError(path, f"can't be read: {error.strerror}") from error
    except ValueError as error:
        raise TowerError(path, f"not JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises TowerError naming the file."""
    found = read_anything(path)
    if not isinstance(found, dict):
        raise TowerError(path, "not a JSON object")
    return found


def load_strictly(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    path: Path,
    theirs: Callable[[str], str] = str,
) -> None:
    """Copy `weights` into `module`. Raises TowerError naming the weights that don't fit.

    `theirs` gives the file's name for each of the module's own. Axes of length 1 don't count.
    """
    wanted = {theirs(name): (name, value) for name, value in module.state_dict().items()}
    _refuse(path, "missing", [name for name in wanted if name not in weights])
    _refuse(path, "unexpected", [name for name in weights if name not in wanted])
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, (_, value) in wanted.items()
        if _axes(weights[name]) != _axes(value)
    ]
    _refuse(path, "mis-shaped", shapes)
    broken = [n for n, v in weights.items() if v.is_floating_point() and not v.isfinite().all()]
    _refuse(path, "not finite", broken)
    fitted = {own: weights[name].reshape(value.shape) for name, (own, value) in wanted.items()}
    module.load_state_dict(fitted, strict=True)


def _axes(value: Tensor) -> list[int]:
    return [length for length in value.shape if length != 1]


def unfuse(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with each `in_proj_weight` or `in_proj_bias` as its three parts.

    `x.in_proj_weight` (3 d, d) becomes `x.in_proj_weight[query]`, `[key]` and `[value]`, (d, d)
    each, in the order in which torch's own attention keeps them.
    """
    parts: dict[str, Tensor] = {}
    for name, value in weights.items():
        fused = name.endswith((".in_proj_weight", ".in_proj_bias")) and value.shape[0] % 3 == 0
        if fused:
            thirds = zip(("query", "key", "value"), value.chunk(3), strict=True)
            parts |= {f"{name}[{part}]": third for part, third in thirds}
        else:
            parts[name] = value
    return parts


def renaming(*renames: tuple[str, str]) -> Callable[[str], str]:
    """A function that replaces, in every name, each first text of a pair by its second, in turn."""

    def renamed(name: str) -> str:
        for ours, theirs in renames:
            name = name.replace(ours, theirs)
        return name

    return renamed


def _refuse(path: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise TowerError(path, f"{what} weights: {', '.join(names[:NAMED])}{more}")

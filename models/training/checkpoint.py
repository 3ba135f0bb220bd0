"""What a fit leaves: the heads as safetensors, and a JSON that says what they belong to.

heads.safetensors      every weight of every head, `text.0.line.weight` and so on, and of every
                       layer of a tower that was trained, `text.tower.0.attention.query.weight`
fit.json               towers (path, hash), exits, head shapes, settings, what was measured
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hivlp.models.artifact import file_record
from hivlp.models.errors import CheckpointError, TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.checkpoint import load_strictly, read_json, read_safetensors
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.tower import first_layers, mark_retrained
from hivlp.models.runtime.progress import say
from hivlp.models.training.features import TowerExit
from hivlp.models.training.fitting import FittedHeads, Heads
from hivlp.models.training.settings import FitSettings
from hivlp.models.training.towers import open_tower

WEIGHTS, DESCRIPTION = "heads.safetensors", "fit.json"
LAYERS = ".tower."
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TowerUse:
    """Which checkpoint a fit was made on, by path and by hash, and where it is read.

    `layers`: how many of its first ones were trained since.
    """

    path: Path
    key: str
    exits: tuple[int, ...]
    layers: int = 0

    @staticmethod
    def of(path: Path, reading: TowerExit, layers: int = 0) -> TowerUse:
        """Describe a tower as it was loaded."""
        return TowerUse(path.resolve(), reading.key, reading.exits, layers)

    def as_dict(self) -> dict[str, Any]:
        """For the description."""
        told = {"path": str(self.path), "key": self.key, "exits": list(self.exits)}
        return told | ({"layers": self.layers} if self.layers else {})


@dataclass(frozen=True, slots=True)
class Fit:
    """A finished fit. `layers`: by modality, the weights of layers that were trained."""

    heads: FittedHeads
    text: TowerUse
    image: TowerUse
    settings: FitSettings
    measured: Mapping[str, float]
    layers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def save_fit(folder: Path, fit: Fit) -> None:
    """Write `folder`; the description comes last, so that a folder with one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    weights: dict[str, Tensor] = {}
    for name, heads in (("text", fit.heads.text), ("image", fit.heads.image)):
        weights |= _weights(heads, name)
    for name, layers in fit.layers.items():
        weights |= {f"{name}{LAYERS}{key}": value.contiguous() for key, value in layers.items()}
    _replace(folder / WEIGHTS, lambda path: save_file(weights, path))
    description = {
        "format_version": FORMAT_VERSION,
        "towers": {"text": fit.text.as_dict(), "image": fit.image.as_dict()},
        "heads": {
            "text": [head.shape.as_dict() for head in fit.heads.text],
            "image": [head.shape.as_dict() for head in fit.heads.image],
        },
        "settings": fit.settings.as_dict(),
        "measured": dict(fit.measured),
        "weights_sha256": file_record(folder / WEIGHTS).sha256,
    }
    text = json.dumps(description, indent=2) + "\n"
    _replace(folder / DESCRIPTION, lambda path: path.write_text(text, encoding="utf-8"))


def _check_hash(path: Path, wanted: str) -> None:
    if not path.is_file():
        raise CheckpointError(path, "no such file")
    if file_record(path).sha256 != wanted:
        raise CheckpointError(path, "differs from what was written")


def _replace(target: Path, write: Any) -> None:
    part = target.with_name(target.name + ".part")
    write(part)
    part.replace(target)


def _weights(heads: Heads, name: str) -> dict[str, Tensor]:
    return {
        f"{name}.{level}.{key}": value.contiguous()
        for level, head in enumerate(heads)
        for key, value in head.state_dict().items()
    }


def load_fit(folder: Path) -> Fit:
    """Read a fit's folder. Raises CheckpointError."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise CheckpointError(path, "no such file: not a finished fit (see hivlp fit-exits)")
    told = read_json(path)
    if told.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(path, f"format_version is not {FORMAT_VERSION}")
    try:
        _check_hash(folder / WEIGHTS, told["weights_sha256"])
        weights = read_safetensors(folder / WEIGHTS)
        shapes = {name: [HeadShape(**s) for s in told["heads"][name]] for name in told["heads"]}
        towers = {
            name: TowerUse(Path(use["path"]), use["key"], tuple(use["exits"]), use.get("layers", 0))
            for name, use in told["towers"].items()
        }
        settings = FitSettings.from_dict(told["settings"])
        heads = {n: build_heads(weights, n, shapes[n], folder / WEIGHTS) for n in towers}
        fitted = FittedHeads(heads["text"], heads["image"])
        layers = {name: _layers(weights, name) for name, use in towers.items() if use.layers}
        return Fit(fitted, towers["text"], towers["image"], settings, told["measured"], layers)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"field {error} is missing or of another kind") from error


def _layers(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = f"{name}{LAYERS}"
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def build_heads(
    weights: Mapping[str, Tensor], name: str, shapes: list[HeadShape], path: Path
) -> Heads:
    """Heads of one tower from saved weights. Raises TowerError naming what doesn't fit."""
    heads = []
    for level, shape in enumerate(shapes):
        prefix = f"{name}.{level}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        head = ExitHead(shape)
        load_strictly(head, own, path)
        heads.append(head.eval().requires_grad_(False))
    return heads


def dual_encoder(fit: Fit, *, text: Path | None = None, image: Path | None = None) -> DualEncoder:
    """The fitted model: towers loaded from where they were, or from the paths given.

    Raises CheckpointError for a tower that is not the one that the heads were fitted on.
    """
    return DualEncoder(
        _tower_exits(fit, fit.text, fit.heads.text, "text", text or fit.text.path),
        _tower_exits(fit, fit.image, fit.heads.image, "image", image or fit.image.path),
        fit.settings.gallery,
    )


def _tower_exits(
    fit: Fit, use: TowerUse, heads: Heads, modality: Modality, path: Path
) -> TowerExits:
    tower = open_tower(path, modality)
    if TowerExit(tower, use.exits).key != use.key:
        raise CheckpointError(path, f"not the {modality} tower that these heads were fitted on")
    if use.layers:
        load_strictly(first_layers(tower, use.layers), fit.layers[modality], Path(WEIGHTS))
        mark_retrained(tower)
    return TowerExits(tower, use.exits, heads)


class PhaseStore:
    """Finished phases of a running fit, so that an interrupted one goes on; one folder per key.

    A phase whose files were damaged since is run again.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder / key[:32]

    def __call__(self, name: str, phase: Any) -> Heads:
        """The heads of a phase: kept from before, or made now and kept."""
        weights, shapes = self._folder / f"{name}.safetensors", self._folder / f"{name}.json"
        if shapes.is_file():
            try:
                return self._kept(name, weights, shapes)
            except (TrainingError, OSError, KeyError, TypeError) as error:
                say(f"phase {name!r} was kept, but is damaged ({error}); it runs again")
        heads: Heads = phase()
        self._folder.mkdir(parents=True, exist_ok=True)
        shapes.unlink(missing_ok=True)
        _replace(weights, lambda path: save_file(_weights(heads, name), path))
        told = [head.shape.as_dict() for head in heads]
        text = json.dumps({"heads": told, "sha256": file_record(weights).sha256})
        _replace(shapes, lambda path: path.write_text(text, encoding="utf-8"))
        return heads

    def _kept(self, name: str, weights: Path, shapes: Path) -> Heads:
        told = read_json(shapes)
        _check_hash(weights, told["sha256"])
        found = [HeadShape(**shape) for shape in told["heads"]]
        return build_heads(read_safetensors(weights), name, found, weights)

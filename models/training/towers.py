"""Where a fit's towers come from: a checkpoint of a known family, or a run of `hivlp train`.

Notable: a run's tower ends in the run's own finest head, so its two towers share a space as CLIP's
do, and early exits can be fitted to it afterwards; the run's own early heads are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation, TextPreparation, fingerprint
from hivlp.models.errors import TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.families import load_tower
from hivlp.models.network.text_tower import TextTower
from hivlp.models.network.tower import Pooling, Tensors, Tower, freeze
from hivlp.models.network.vision import VisionTower
from hivlp.models.network.weights import weights_hash
from hivlp.models.training.loop.record import is_run
from hivlp.models.training.loop.trained import load_run


class RunTower(Tower):
    """A trained tower and its finest head as one: the last exit is the run's finest embedding."""

    def __init__(self, exits: TowerExits, space: str) -> None:
        super().__init__()
        self.tower, self.head = exits.tower, exits.exit_heads[-1]
        self._space = space

    @property
    def depth(self) -> int:
        """The trained tower's."""
        return self.tower.depth

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The trained tower's."""
        return self.tower.layer_modules

    @property
    def pooling(self) -> Pooling:
        """The trained tower's."""
        return self.tower.pooling

    @property
    def preparation(self) -> TextPreparation | ImagePreparation:
        """The trained tower's."""
        return self.tower.preparation

    @property
    def sources(self) -> tuple[Path, ...]:
        """The trained tower's."""
        return self.tower.sources

    @property
    def joint_space(self) -> str:
        """The hash of both finest heads."""
        return self._space

    @property
    def vocabulary(self) -> int:
        """The trained tower's."""
        return self.tower.vocabulary

    def width(self, layer: int) -> int:
        """The tower's; at the end, the embedding's."""
        return self.head.dim if layer == self.depth else self.tower.width(layer)

    def begin(self, inputs: Tensors) -> Tensors:
        """As the trained tower."""
        return self.tower.begin(inputs)

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        """As the trained tower."""
        return self.tower.advance(state, inputs, start, stop)

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:
        """The tower's features; at the end, the embedding (n, dim) before it is normalised."""
        features = self.tower.pool(state, inputs, layer)
        embedding: Tensor = self.head(features) if layer == self.depth else features
        return embedding

    def sequence(self, state: Tensors, inputs: Tensors) -> Tensor:
        """As the trained tower."""
        return self.tower.sequence(state, inputs)

    def identity(self) -> dict[str, str]:
        """The trained tower's, and the hash of its head."""
        return self.tower.identity() | super().identity() | {"head": weights_hash(self.head)}


class RunText(RunTower):
    """The text tower of a run."""

    modality = "text"
    family = "hivlp-text with its finest head"
    input_names = TextTower.input_names
    carried_inputs = TextTower.carried_inputs


class RunPicture(RunTower):
    """The vision tower of a run."""

    modality = "image"
    family = "hivlp-vision with its finest head"
    input_names = VisionTower.input_names
    carried_inputs = VisionTower.carried_inputs


def open_tower(path: Path, modality: Modality) -> Tower:
    """The frozen tower of a checkpoint or of a run. Raises TrainingError."""
    if not is_run(path):
        return load_tower(path, modality)
    trained = load_run(path)
    if not trained.record.recipe.model.normalise:
        raise TrainingError(f"{path}: model.normalise is false; exits are fitted to cosines alone")
    dual = trained.model.dual
    heads = {m: dual.tower(m).exit_heads[-1] for m in ("text", "image")}
    space = fingerprint({name: weights_hash(head) for name, head in heads.items()})
    kind = RunText if modality == "text" else RunPicture
    return freeze(kind(dual.tower(modality), space))

"""Is a loaded tower what transformers makes of the same folder? Asked when one is imported.

Notable: it is asked of the user's own weights, where a test can only ask it of made ones. States
are compared token by token as directions, so that a network with a few very large numbers in its
states is held to the same 1e-4.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hivlp.models.artifact import TextPreparation
from hivlp.models.errors import TrainingError
from hivlp.models.network.captions import HIGHEST, CaptionTower
from hivlp.models.network.pictures import PictureTower
from hivlp.models.network.pretrained import PretrainedTower
from hivlp.models.network.tower import Tensors, Tower
from hivlp.models.training.parity import probe_inputs

TOLERANCE = 1e-4
ITEMS = 3


class ReferenceDiffers(TrainingError):
    """A tower that answers otherwise than transformers: where, and by how much."""

    def __init__(self, *, tower: str, place: str, difference: float) -> None:
        super().__init__(
            f"{tower} tower, {place}: differs from transformers by {difference:.2e}, more than "
            f"{TOLERANCE:.0e}; nothing was written"
        )
        self.tower = tower
        self.place = place
        self.difference = difference


def check_reference(folder: Path, towers: Sequence[Tower]) -> float | None:
    """Largest difference of any layer's states and of the output; None without transformers.

    Raises ReferenceDiffers.
    """
    try:
        import transformers
    except ImportError:
        return None
    with _quietly(transformers), torch.no_grad():
        model = _open(transformers, folder)
        return max(_compare(model, tower) for tower in towers)


@contextlib.contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Without its warnings, such as of weights that its class doesn't use."""
    before = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()


def _open(transformers: Any, folder: Path) -> Any:
    """The model by the class that the folder names, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    model = _class(transformers, config).from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval()


def _class(transformers: Any, config: Any) -> Any:
    """The class of models of this configuration that it names first; where it's none, AutoModel."""
    named = getattr(config, "architectures", None)
    first = named[0] if isinstance(named, (list, tuple)) and named else None
    found = getattr(transformers, first, None) if isinstance(first, str) else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    own = getattr(found, "config_class", None) if is_model else None
    return found if isinstance(own, type) and isinstance(config, own) else transformers.AutoModel


def _compare(model: Any, tower: Tower) -> float:
    inputs = _probe(tower)
    read = {name: inputs[name] for name in tower.input_names}
    # what padding says means nothing, unless the tower attends to it
    told = inputs["attention_mask"].bool() if "attention_mask" in read else ...
    joint = getattr(model, f"get_{tower.modality}_features", None)
    side = "text_model" if tower.modality == "text" else "vision_model"
    core = model.base_model if joint is None else getattr(model, side)
    theirs = core(**read, output_hidden_states=True)
    state, worst = tower.begin(inputs), 0.0
    for layer, wanted in enumerate(theirs.hidden_states):
        if layer:
            state = tower.advance(state, inputs, layer - 1, layer)
        apart = (_directions(state["hidden"]) - _directions(wanted))[told].abs().max()
        worst = max(worst, _checked(tower, f"layer {layer}", float(apart)))
    answer = theirs if joint is None and core is model else (joint or model)(**read)
    ours, wanted = _answers(tower, state, inputs, (theirs, answer))
    apart = (ours - wanted)[told if ours.dim() == 3 else ...].abs().max() / wanted.abs().max()
    return max(worst, _checked(tower, "output", float(apart)))


def _probe(tower: Tower) -> dict[str, Tensor]:
    """Inputs that both read alike: texts end in their end token, and padding only pads."""
    inputs = dict(probe_inputs(tower, ITEMS))
    spec = tower.preparation
    if not isinstance(spec, TextPreparation):
        return inputs
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    other = spec.pad_id + 1 if spec.pad_id + 1 < tower.vocabulary else 0
    ids[(mask == 1) & (ids == spec.pad_id)] = other
    if isinstance(tower, CaptionTower) and tower.pooling == "eos":
        end = tower.vocabulary - 1 if tower.shape.end_id == HIGHEST else tower.shape.end_id
        ids[torch.arange(ITEMS), mask.sum(1) - 1] = end
    return inputs


def _answers(tower: Tower, state: Tensors, inputs: Tensors, theirs: Any) -> tuple[Tensor, Tensor]:
    """The vectors that both answer with, or every token's last state where there is no such one.

    `theirs`: what the core of a class of transformers said, and the class itself, which may hold a
    pooler that the checkpoint has no weights for.
    """
    unpooled = isinstance(tower, PictureTower) and tower.shape.last == "nothing"
    if isinstance(tower, PretrainedTower) and not (unpooled and tower.pooling != "attention"):
        names = ("text_embeds", "image_embeds", "pooler_output")
        found = (getattr(theirs[1], name, None) for name in names)
        vector = next((each for each in found if each is not None), theirs[1])
        return tower.output(state), vector
    return tower.sequence(state, inputs), theirs[0].last_hidden_state


def _directions(hidden: Tensor) -> Tensor:
    return F.normalize(hidden, dim=-1)


def _checked(tower: Tower, place: str, difference: float) -> float:
    if not difference <= TOLERANCE:
        raise ReferenceDiffers(tower=tower.modality, place=place, difference=difference)
    return difference

"""Weights and tokenizer that a run starts from, where it doesn't start from nothing."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hivlp.models.errors import TrainingError
from hivlp.models.network.checkpoint import load_strictly, read_safetensors
from hivlp.models.network.hivlp import Hivlp
from hivlp.models.runtime.progress import say
from hivlp.models.training.loop.checkpoints import FOLDER, MODEL, Checkpoints

TOKENIZER = "tokenizer.json"
Weights = dict[str, Tensor]
PARTS = ("mlm", "cross")
"""Parts that a model may lack and its start may have: they are of use in training only."""


def initial_weights(given: Path) -> Path:
    """The file of weights at a run's folder, a checkpoint's folder, or itself.

    Raises TrainingError where there is none.
    """
    if given.is_file():
        return given
    if (given / MODEL).is_file():
        return given / MODEL
    newest = Checkpoints(given, keep=1).newest()
    if newest is None:
        raise TrainingError(
            f"train.from: {given} is no run's folder, no checkpoint and no .safetensors"
        )
    return newest[0] / MODEL


def initial_tokenizer(start: str) -> str:
    """The tokenizer of the run that `start` belongs to; "" where there is none."""
    if not start:
        return ""
    weights = initial_weights(Path(start))
    folder = weights.parent
    for place in (folder, folder.parent.parent if folder.parent.name == FOLDER else folder):
        if (place / TOKENIZER).is_file():
            return str(place / TOKENIZER)
    return ""


def load_initial(start: Path, model: Hivlp, *, early_anew: bool = False) -> None:
    """Load weights strictly, but for whole parts that the model does without.

    `early_anew`: a start with another number of levels gives its last heads only, and early ones
    stay as they are. Raises TowerError naming weights that are missing, unexpected or of another
    shape.
    """
    path = initial_weights(start)
    weights = read_safetensors(path)
    for part in PARTS:
        if getattr(model, part) is None and any(name.startswith(f"{part}.") for name in weights):
            say(f"{path}: its part {part!r} is left out, as the recipe does without")
            weights = {n: w for n, w in weights.items() if not n.startswith(f"{part}.")}
    if early_anew:
        for tower in ("text", "image"):
            weights = _last_head_only(weights, model, f"dual.{tower}.heads.")
    load_strictly(model, weights, path)


def _last_head_only(weights: Weights, model: Hivlp, place: str) -> Weights:
    """The start's last head as the model's last, the model's own early heads before it."""
    state = model.state_dict()
    theirs, ours = _heads(weights, place), _heads(state, place)
    if not theirs or theirs == ours:
        return weights
    say(f"{place[:-1]}: {max(theirs) + 1} in the start; the first {max(ours)} of ours begin anew")
    last, own = f"{place}{max(theirs)}.", f"{place}{max(ours)}."
    kept = {n: w for n, w in weights.items() if not n.startswith(place)}
    early = {n: w for n, w in state.items() if n.startswith(place) and not n.startswith(own)}
    moved = {n.removeprefix(last): w for n, w in weights.items() if n.startswith(last)}
    return kept | early | {own + n: w for n, w in moved.items()}


def _heads(weights: Weights, place: str) -> set[int]:
    """Numbers of the heads whose weights are there."""
    names = (n.removeprefix(place) for n in weights if n.startswith(place))
    return {int(name.split(".", 1)[0]) for name in names}

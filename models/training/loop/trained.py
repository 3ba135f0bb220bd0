"""The model that a run has made so far: what export, re-ranker and tests load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.errors import CheckpointError
from hivlp.models.network.cross_modal import CrossModalEncoder
from hivlp.models.network.hivlp import Hivlp, make_hivlp
from hivlp.models.runtime.progress import say
from hivlp.models.training.loop.checkpoints import Checkpoints, RunState, load_model
from hivlp.models.training.loop.curves import read_curves
from hivlp.models.training.loop.record import TOKENIZER, RunRecord, read_record
from hivlp.models.training.recipe import losses_of


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's newest checkpoint: the model in inference mode, and what the run says of itself."""

    model: Hivlp
    record: RunRecord
    state: RunState
    measured: Mapping[str, float]

    @property
    def reranker(self) -> CrossModalEncoder | None:
        """The cross-modal encoder, where it was trained here or came with the start."""
        recipe = self.record.recipe
        taught = losses_of(recipe).matching > 0 or bool(recipe.train.from_)
        if self.model.cross is not None and not taught:
            say("losses.matching is 0: the cross-modal encoder was never trained and is left out")
        return self.model.cross if taught else None


def load_run(folder: Path) -> Trained:
    """Load a run's model. Raises TrainingError for a folder without a whole checkpoint."""
    record = read_record(folder)
    newest = Checkpoints(folder, keep=1).newest()
    if newest is None:
        raise CheckpointError(folder, "has no checkpoint yet")
    path, state = newest
    if not state.finished:
        say(f"{folder}: the run isn't finished; this is the model after {state.step} steps")
    model = make_hivlp(record.recipe.model, folder / TOKENIZER)
    load_model(path, model)
    measured = {"trained_steps": float(state.step), "trained_seconds": round(state.seconds, 1)}
    lines = [line for line in read_curves(folder) if line["step"] <= state.step]
    for name, loss in (lines[-1]["losses"] if lines else {}).items():
        measured[f"loss_{name}"] = round(loss, 4)
    return Trained(model.eval().requires_grad_(False), record, state, measured)

"""A cross-modal encoder as the three graphs of an artifact's re-ranker, checked against torch.

    text_states.onnx     input_ids, attention_mask -> text_states (n, t, d)
    image_states.onnx    pixel_values -> image_states (n, m, d')
    cross.onnx           text_states, attention_mask, image_states -> probability (n,)

Each tower runs through its whole depth once more in a graph of its own: the stages of a tower leave
what their successors read, which need not be what the cross-modal encoder reads (a final norm, cut
padding), and running a short text again costs next to nothing beside the pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hivlp.models.artifact import RerankerRecord, TextPreparation, fingerprint
from hivlp.models.errors import TrainingError
from hivlp.models.network.cross_modal import CrossModalEncoder
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.few_queries import FewQueries
from hivlp.models.network.tower import Tower
from hivlp.models.network.weights import weights_hash
from hivlp.models.training.graphs import GraphRunner, Ports, sample_inputs, write_graph
from hivlp.models.training.parity import BATCHES, TOLERANCE, probe_inputs

GRAPHS = 3
TEXT, IMAGE, PROBABILITY, MASK = "text_states", "image_states", "probability", "attention_mask"


class RerankerParityError(TrainingError):
    """A graph of the re-ranker that answers otherwise than torch: which, and by how much."""

    def __init__(self, *, graph: str, items: int, difference: float) -> None:
        super().__init__(
            f"re-ranker, {graph}: the graph differs from torch by {difference:.2e} on {items} "
            f"items, more than {TOLERANCE:.0e}; nothing was written"
        )
        self.graph = graph
        self.items = items
        self.difference = difference


class StatesModule(nn.Module):
    """A tower's token states of its full depth, from its inputs in their order."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *given: Tensor) -> Tensor:
        """(n, t, d) float32."""
        inputs = dict(zip(self.tower.input_names, given, strict=True))
        state = self.tower.advance(self.tower.begin(inputs), inputs, 0, self.tower.depth)
        return self.tower.sequence(state, inputs)


class PairsModule(nn.Module):
    """Probabilities of pairs; a copy whose texts look at pictures in fewer steps: `FewQueries`."""

    def __init__(self, cross: CrossModalEncoder) -> None:
        super().__init__()
        self.cross = copy.deepcopy(cross)
        for block in self.cross.blocks:
            block.add_module("cross", FewQueries(block.get_submodule("cross")))

    def forward(self, *given: Tensor) -> Tensor:
        """(n,) float32, from the texts' states and mask, and the pictures' states."""
        text, mask, image = given
        return self.cross.probability(text, mask, image)


def check_fits(model: DualEncoder, cross: CrossModalEncoder) -> tuple[Tensor, Tensor]:
    """States of a small text and picture batch, as the cross-modal encoder will be given them.

    Raises TrainingError where a tower has no token states, or of another width than it reads.
    """
    found = []
    for side, exits in (("text", model.text), ("image", model.image)):
        tower = exits.tower
        with torch.no_grad():
            states = StatesModule(tower).eval()(*_ordered(tower, sample_inputs(tower)))
        wanted = getattr(cross.shape, side)
        if states.dim() != 3 or states.shape[2] != wanted:
            raise TrainingError(
                f"the {side} tower's states are {tuple(states.shape)}, the cross-modal encoder "
                f"reads (n, t, {wanted})"
            )
        found.append(states)
    return found[0], found[1]


def write_reranker(
    model: DualEncoder, cross: CrossModalEncoder, folder: Path, step: Callable[[], None]
) -> RerankerRecord:
    """Write the graphs below `folder`; `step` is told of each. Raises TrainingError."""
    text, image = model.text.tower, model.image.tower
    modules = [StatesModule(tower).eval() for tower in (text, image)]
    samples = [sample_inputs(tower) for tower in (text, image)]
    states = check_fits(model, cross)
    record = RerankerRecord(
        layers=cross.shape.depth,
        text_width=states[0].shape[2],
        image_tokens=states[1].shape[1],
        image_width=states[1].shape[2],
        states_space=_states_space(image),
    )
    (folder / record.cross).parent.mkdir(parents=True)
    open_text = _open_axes(text)
    for module, sample, name, axes, file in (
        (modules[0], samples[0], TEXT, open_text, record.text_states),
        (modules[1], samples[1], IMAGE, {}, record.image_states),
    ):
        ports = Ports(module.tower.input_names, (name,), axes)
        write_graph(module, _ordered(module.tower, sample), ports, folder / file)
        step()
    axes = {TEXT: 1, MASK: 1} if open_text else {}
    ports = Ports((TEXT, MASK, IMAGE), (PROBABILITY,), axes)
    arguments = (states[0], samples[0][MASK], states[1])
    write_graph(PairsModule(cross), arguments, ports, folder / record.cross)
    step()
    return record


def check_reranker(
    model: DualEncoder, cross: CrossModalEncoder, folder: Path, record: RerankerRecord
) -> float:
    """Largest difference of any state or probability. Raises RerankerParityError."""
    runners = {
        name: GraphRunner(folder / file, threads=1)
        for name, file in (
            (TEXT, record.text_states),
            (IMAGE, record.image_states),
            (PROBABILITY, record.cross),
        )
    }
    worst = 0.0
    for items in BATCHES:
        inputs = {**probe_inputs(model.text.tower, items), **probe_inputs(model.image.tower, items)}
        expected = _expected(model, cross, inputs)
        tensors = {name: value.numpy() for name, value in inputs.items()}
        for name, runner in runners.items():
            tensors |= runner(tensors)
            difference = float(np.abs(tensors[name] - expected[name].numpy()).max())
            if not difference <= TOLERANCE:
                raise RerankerParityError(graph=name, items=items, difference=difference)
            worst = max(worst, difference)
    return worst


def _expected(
    model: DualEncoder, cross: CrossModalEncoder, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What torch says of a batch, from the towers to the probabilities."""
    with torch.no_grad():
        text, image = (
            StatesModule(exits.tower).eval()(*_ordered(exits.tower, inputs))
            for exits in (model.text, model.image)
        )
        found = cross.eval().probability(text, inputs[MASK], image)
    return {TEXT: text, IMAGE: image, PROBABILITY: found}


def _ordered(tower: Tower, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(inputs[name] for name in tower.input_names)


def _open_axes(text: Tower) -> dict[str, int]:
    """The token axis of each input, where texts are of any length."""
    spec = text.preparation
    assert isinstance(spec, TextPreparation)
    return {} if spec.pad_to_max else dict.fromkeys(text.input_names, 1)


def _states_space(image: Tower) -> str:
    """What states of pictures belong to: the tower as it is, and how pictures are prepared."""
    return fingerprint({**image.identity(), "weights": weights_hash(image)})

"""A fitted tower as its stage graphs' modules: what goes in, what comes out, under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hivlp.models.artifact import EMBEDDING_NAME
from hivlp.models.network.exits import TowerExits
from hivlp.models.training.graphs import Ports, sample_inputs


class StageModule(nn.Module):
    """One stage with named tensors as positional ones, which is what the exporter understands."""

    def __init__(self, exits: TowerExits, index: int, ports: Ports, state: tuple[str, ...]) -> None:
        super().__init__()
        self.exits, self.index, self.ports = exits, index, ports
        self.state = state  # plain names of the state that is read, without the layer

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of `ports.inputs`; the embedding, then the states left."""
        named = dict(zip(self.ports.inputs, given, strict=True))
        before = {plain: given[i] for i, plain in enumerate(self.state)}
        embedding, after = self.exits.run_stage(self.index, before, named)
        left = len(self.ports.outputs) - 1
        return (embedding, *([after[name] for name in sorted(after)] if left else []))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage ready to be written: its module, sample arguments and names."""

    module: StageModule
    arguments: tuple[Tensor, ...]
    ports: Ports


def plan_stages(exits: TowerExits) -> list[StagePlan]:
    """Every stage of a tower, coarse first, with the sample tensors that flow through them.

    A state is named after the layer that left it (`hidden_2`), since a graph may not read and
    write one name. Which of its axes are open is told by what changes with the number of tokens.
    """
    tower = exits.tower
    inputs, plans = sample_inputs(tower), []
    open_inputs = dict.fromkeys(inputs, 1) if tower.modality == "text" else {}
    state: Mapping[str, Tensor] = {}
    for index, layer in enumerate(exits.exits):
        plain = tuple(sorted(state))
        before = exits.exits[index - 1]
        read = tuple(f"{name}_{before}" for name in plain)
        own = tower.carried_inputs if index else tower.input_names
        with torch.no_grad():
            _, after = exits.run_stage(index, state, inputs)
        last = index == len(exits.exits) - 1
        left = () if last else tuple(f"{name}_{layer}" for name in sorted(after))
        axes = {name: axis for name, axis in open_inputs.items() if name in own}
        if tower.modality == "text":
            axes |= _open_states([state[name] for name in plain], read)
        ports = Ports((*read, *own), (EMBEDDING_NAME, *left), axes)
        arguments = (*(state[name] for name in plain), *(inputs[name] for name in own))
        plans.append(StagePlan(StageModule(exits, index, ports, plain), arguments, ports))
        state = after
    return plans


def _open_states(states: Sequence[Tensor], names: Sequence[str]) -> dict[str, int]:
    """Token axis of each state of a text tower that has one: (n, t, d), not (n, d)."""
    return {name: 1 for state, name in zip(states, names, strict=True) if state.dim() == 3}

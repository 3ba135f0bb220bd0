"""Torch modules to ONNX graphs, and graphs to runners. What is exported is what is measured.

One opset, float32, item axis and token axis open; picture sides are fixed. The exporter's chatter
is kept off the terminal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation, TextPreparation
from hivlp.models.errors import MissingExtra
from hivlp.models.network.tower import Tower
from hivlp.models.runtime.providers import choose_providers, open_session

OPSET = 18
SAMPLE_ITEMS, SAMPLE_TOKENS = 2, 7
_OUTSIDE = "outside_"
Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Ports:
    """A graph's inputs and outputs by name, and which axes are open besides the items'."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    open_axes: Mapping[str, int]
    """Name of an input -> its token axis."""


def sample_inputs(tower: Tower) -> dict[str, Tensor]:
    """A small valid input of a tower: texts with padding, or grey pictures."""
    spec = tower.preparation
    if isinstance(spec, ImagePreparation):
        shape = (SAMPLE_ITEMS, 3, spec.height, spec.width)
        return {"pixel_values": torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape)}
    assert isinstance(spec, TextPreparation)
    tokens = spec.max_tokens if spec.pad_to_max else min(SAMPLE_TOKENS, spec.max_tokens)
    mask = torch.ones(SAMPLE_ITEMS, tokens, dtype=torch.int64)
    mask[-1, -1] = 0
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def write_graph(module: nn.Module, arguments: Sequence[Tensor], ports: Ports, path: Path) -> None:
    """Export `module`, called with `arguments` in the order of `ports.inputs`, to `path`."""
    try:
        import onnx  # noqa: F401 - the exporter needs both, and says so in a less helpful way
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "onnx", "train") from error
    items = torch.export.Dim.DYNAMIC
    shapes = tuple(
        {0: items} | ({ports.open_axes[name]: items} if name in ports.open_axes else {})
        for name in ports.inputs
    )
    with _quietly():
        torch.onnx.export(
            module.eval(),
            tuple(arguments),
            path,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(ports.inputs),
            output_names=[f"{_OUTSIDE}{name}" for name in ports.outputs],
            dynamic_shapes=(shapes,),
            external_data=False,
            verbose=False,
        )
    _name_outputs(path, ports)


def _name_outputs(path: Path, ports: Ports) -> None:
    """Give the outputs their names, which the exporter may have given to something inside."""
    import onnx

    model = onnx.load(path)
    renamed = {name: f"{name}_inside" for name in ports.outputs}
    renamed |= {f"{_OUTSIDE}{name}": name for name in ports.outputs}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for value in (*model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.name = renamed.get(value.name, value.name)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's progress, warnings and log lines; errors still come out."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class GraphRunner:
    """An opened graph: named arrays in, named arrays out."""

    def __init__(self, path: Path, *, threads: int) -> None:
        self._session: Any = open_session(
            path.parent, path.name, threads=threads, providers=choose_providers("cpu")
        )
        self.inputs = tuple(value.name for value in self._session.get_inputs())
        self.outputs = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, arrays: Arrays) -> dict[str, npt.NDArray[np.float32]]:
        """Run on the arrays that the graph reads; others are ignored."""
        found = self._session.run(None, {name: arrays[name] for name in self.inputs})
        return dict(zip(self.outputs, found, strict=True))

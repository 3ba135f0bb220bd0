"""How `encoder_precision.py` makes its variants: fp32 stage graphs to low-precision ones.

Names: `w8` is MatMulNBits with 8-bit weights (`-b` the block size, `-a` the accuracy level: 0 and 1
compute in fp32, 4 in int8); `-heads` also turns the heads' Gemm nodes into it. `dynamic` and
`static` are onnxruntime's own int8; `fp16-stored` keeps weights as fp16 and computes in fp32.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hivlp.models.artifact import Artifact, TowerRecord
from hivlp.models.training.graphs import GraphRunner
from hivlp.models.training.precision import write_reduced

Feeds = Sequence[dict[str, np.ndarray]]
MIN_STORED = 4096
UNFOLDED = "demo-unfolded"


def make_variant(
    artifact: Artifact, tower: TowerRecord, name: str, folder: Path, calibrating: Feeds
) -> list[Path]:
    """The variant's graphs in `folder`, made where they are not there yet."""
    sources = [artifact.path / stage.file for stage in tower.stages]
    if name == "fp32":
        return sources
    targets = [folder / tower.modality / source.name for source in sources]
    (folder / tower.modality).mkdir(parents=True, exist_ok=True)
    feeds = [dict(feed) for feed in calibrating]
    for source, target in zip(sources, targets, strict=True):
        if not target.is_file():
            logging.disable(logging.WARNING)  # the quantizers talk to the root logger
            with contextlib.redirect_stdout(io.StringIO()):
                VARIANTS[tower.modality][name](source, target, feeds)
        if name.startswith("static"):  # the next stage is calibrated with fp32 states
            runner = GraphRunner(source, threads=1)
            for feed in feeds:
                feed |= runner(feed)
    return targets


def dynamic(source: Path, target: Path, _: Feeds) -> None:
    """Scales of activations taken from each batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(_plain(source), target, weight_type=QuantType.QInt8, per_channel=True)


def static(
    source: Path,
    target: Path,
    feeds: Feeds,
    *,
    skip: str = "^$",
    ops: Sequence[str] | None = None,
    method: str = "MinMax",
) -> None:
    """QDQ with fixed scales, per channel; nodes whose name or kind matches `skip` stay fp32."""
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static

    model = _plain(source)
    kept = [n.name for n in model.graph.node if re.search(skip, f"{n.op_type} {n.name}")]
    read = [value.name for value in model.graph.input]
    quantize_static(
        model,
        target,
        _Reader([{name: feed[name] for name in read} for feed in feeds]),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=kept,
        op_types_to_quantize=list(ops) if ops else None,
        calibrate_method=getattr(CalibrationMethod, method),
    )


class _Reader:
    def __init__(self, feeds: Feeds) -> None:
        self._left = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def weights8(
    source: Path, target: Path, _: Feeds, *, block: int, level: int, heads: bool, symmetric: bool
) -> None:
    """MatMulNBits: 8-bit weights, a scale for each block of a column."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = _plain(source)
    if heads:
        gemm_to_matmul(model)
    quantizer = MatMulNBitsQuantizer(
        model, bits=8, block_size=block, is_symmetric=symmetric, accuracy_level=level
    )
    quantizer.process()
    onnx.save(quantizer.model.model, target)


def heads8(level: int) -> Callable[..., None]:
    """What `hivlp export --precision w8-heads` writes, at an accuracy level."""

    def make(source: Path, target: Path, _: Feeds) -> None:
        if source.name == "stage3.onnx":
            target.write_bytes(source.read_bytes())
            return
        write_reduced(source, target)
        model = onnx.load(target)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = level
        onnx.save(model, target)

    return make


def unfolded(source: Path, target: Path, _: Feeds) -> None:
    """Graphs of an export from before bases were folded, where one is kept beside the artifact."""
    older = source.parents[2] / UNFOLDED / source.parent.name / source.name
    target.write_bytes(older.read_bytes())


def stored16(source: Path, target: Path, _: Feeds) -> None:
    """Weights as fp16, cast back when the graph is loaded."""
    model = _plain(source)
    casts = []
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT and np.prod(weight.dims) >= MIN_STORED:
            name, half = weight.name, numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(half, f"{name}_half"))
            casts.append(helper.make_node("Cast", [f"{name}_half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target)


def _plain(source: Path) -> Any:
    model = onnx.load(source)
    del model.graph.value_info[:]
    return model


def gemm_to_matmul(model: Any) -> None:
    """Gemm with a constant matrix as MatMul and Add, which is what MatMulNBits replaces."""
    constants = {weight.name: weight for weight in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA")
        if node.op_type != "Gemm" or not plain or node.input[1] not in constants:
            nodes.append(node)
            continue
        matrix = numpy_helper.to_array(constants[node.input[1]])
        name = f"{node.input[1]}_turned"
        turned = np.ascontiguousarray(matrix.T if given.get("transB") else matrix)
        model.graph.initializer.append(numpy_helper.from_array(turned, name))
        bias = list(node.input[2:])
        product = f"{node.output[0]}_product" if bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], name], [product], f"{node.name}_m"))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], list(node.output)))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    kept = [weight for weight in model.graph.initializer if weight.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _w8(block: int, level: int, *, heads: bool, symmetric: bool = False) -> Callable[..., None]:
    def make(source: Path, target: Path, feeds: Feeds) -> None:
        weights8(source, target, feeds, block=block, level=level, heads=heads, symmetric=symmetric)

    return make


def _static(**options: Any) -> Callable[..., None]:
    return lambda source, target, feeds: static(source, target, feeds, **options)


VARIANTS: dict[str, dict[str, Callable[..., None]]] = {
    "text": {
        "fp32": stored16,
        "unfolded": unfolded,
        "w8-early-heads": heads8(4),
        "w8-early-heads-a0": heads8(0),
        "fp16-stored": stored16,
        "dynamic": dynamic,
        "static": _static(),
        "static-matmul": _static(ops=("MatMul", "Gemm")),
        "w8-b32-a0": _w8(32, 0, heads=False),
        "w8-b128-a0": _w8(128, 0, heads=False),
        "w8-b16-a4": _w8(16, 4, heads=False),
        "w8-b32-a4": _w8(32, 4, heads=False),
        "w8-b128-a4": _w8(128, 4, heads=False),
        "w8-heads-b32-a4": _w8(32, 4, heads=True),
        "w8-heads-b128-a4": _w8(128, 4, heads=True),
        "w8-heads-b64-a4-sym": _w8(64, 4, heads=True, symmetric=True),
    },
    "image": {
        "fp32": stored16,
        "unfolded": unfolded,
        "w8-early-heads": heads8(4),
        "fp16-stored": stored16,
        "dynamic": dynamic,
        "static": _static(),
        "static-conv": _static(ops=("Conv", "Clip", "Add")),
        "static-conv-last": _static(ops=("Conv", "Clip", "Add"), skip="Gemm|MatMul"),
        "w8-heads-b32-a4": _w8(32, 4, heads=True),
        "w8-heads-b128-a4": _w8(128, 4, heads=True),
    },
}
"""Tower -> name -> what makes it (fp32 is the artifact's own and made by nothing)."""

"""Low precision where it can't move an answer: the text tower's early heads with 8-bit weights.

One short query spends most of its time reading weights, and the early heads hold half of those that
it reads. They only choose candidates: the layers that later stages read, and the finest head, stay
fp32, so that the finest level and with it every gallery vector are the same to the last bit.
Weights are stored as onnxruntime's MatMulNBits, a scale and a zero for every 32 numbers of a row;
its int8 arithmetic takes its scales from 32 numbers of one query, never from the batch as
onnxruntime's dynamic int8 does. What was tried is in `bench/LOG.md`, experiment 2.

Notable: the gate. Whether a model tolerates this is measured on given texts before it is written:
does each early level keep fp32's best ten, and does a query's score stay when it is not alone?
The finest level's does to 1e-5. An early level's moves a little, since fp32 sums of another batch
differ in their last bit and a rounding to int8 may then fall the other way.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hivlp.models.artifact import EMBEDDING_NAME, TextPreparation, TowerRecord
from hivlp.models.errors import TextError, TrainingError
from hivlp.models.levels import FloatArray, nested_prefix
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training.graphs import Arrays, GraphRunner

BLOCK = 32
INT8_ARITHMETIC = 4
"""MatMulNBits' accuracy level: activations in int8 by blocks of a row."""
TOP, LEAST_OVERLAP = 10, 0.97
MOST_APART, MOST_APART_EARLY = 1e-5, 2e-3
"""Of a query's score in another batch: at the finest level, and at the others."""
QUERIES, LEAST_TEXTS, MOST_TEXTS = 200, 100, 500
TOGETHER, LONGER = 8, 8
_HEAD = re.compile(r"(^|\.)heads\.\d+\.")


class PrecisionError(TrainingError):
    """A model that doesn't rank alike in low precision, or can't be checked; nothing is written."""


@dataclass(frozen=True, slots=True)
class PrecisionCheck:
    """What the gate measured, by level.

    `overlap`: the share of fp32's best ten. `apart`: the largest difference of a score between a
    query alone and the same one among others, or padded.
    """

    overlap: Mapping[int, float]
    apart: Mapping[int, float]


def reduce_heads(folder: Path, tower: TowerRecord, texts: Sequence[str]) -> PrecisionCheck:
    """Give the early stages of a text tower in `folder` 8-bit heads, if they rank as before.

    `texts` are real queries, at least 100: the first 200 search the finest vectors of up to 500.
    Raises PrecisionError naming the level, with the graphs left as they were.
    """
    before = [folder / stage.file for stage in tower.stages]
    made = [path.with_suffix(".w8") for path in before[:-1]]
    try:
        for source, target in zip(before, made, strict=False):
            write_reduced(source, target)
        checked = check_ranking(folder, tower, [*made, before[-1]], texts[:MOST_TEXTS])
        for target, source in zip(made, before, strict=False):
            target.replace(source)
    finally:
        for target in made:
            target.unlink(missing_ok=True)
    return checked


def write_reduced(source: Path, target: Path) -> None:
    """Write the graph in `source` to `target` with its head's weights in 8 bits."""
    import onnx

    model = onnx.load(source)
    constants = {weight.name: weight for weight in model.graph.initializer}
    nodes = [_reduced(node, constants, model.graph) for node in model.graph.node]
    if all(new is old for new, old in zip(nodes, model.graph.node, strict=True)):
        raise PrecisionError(f"{source.name}: no head's weights were found in the graph")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    kept = [weight for weight in model.graph.initializer if weight.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString(deterministic=True))


def _reduced(node: Any, constants: Mapping[str, Any], graph: Any) -> Any:
    """A head's linear layer as MatMulNBits; any other node as it is."""
    from onnx import helper, numpy_helper

    if node.op_type != "Gemm" or node.input[1] not in constants or not _HEAD.search(node.input[1]):
        return node
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert given.get("transB") == 1, f"{node.name}: a linear layer, as torch exports it"
    assert given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0, node.name
    weight = numpy_helper.to_array(constants[node.input[1]])  # (n, k)
    names = [f"{node.input[1]}_{part}" for part in ("codes", "scales", "zeros")]
    codes, scales, zeros = pack8(weight)
    graph.initializer.append(numpy_helper.from_array(codes, names[0]))
    graph.initializer.append(numpy_helper.from_array(scales, names[1]))
    graph.initializer.append(numpy_helper.from_array(zeros, names[2]))
    bias = ["", node.input[2]] if len(node.input) > 2 else []
    return helper.make_node(
        "MatMulNBits",
        [node.input[0], *names, *bias],
        list(node.output),
        node.name,
        domain="com.microsoft",
        K=weight.shape[1],
        N=weight.shape[0],
        bits=8,
        block_size=BLOCK,
        accuracy_level=INT8_ARITHMETIC,
    )


def pack8(weight: FloatArray) -> tuple[npt.NDArray[np.uint8], FloatArray, npt.NDArray[np.uint8]]:
    """An (n, k) matrix in 8 bits: codes (n, b, 32) uint8, scales (n, b) float32, zeros uint8.

    b blocks of 32 numbers of a row, the last one padded; a number is (code - zero) x scale, with
    the (n, b) scale and zero of its block.
    """
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :columns] = weight
    cut = padded.reshape(rows, blocks, BLOCK)
    least, most = np.minimum(cut.min(2), 0.0), np.maximum(cut.max(2), 0.0)
    scales = np.maximum(most - least, 1e-12) / 255.0
    zeros = np.clip(np.round(-least / scales), 0, 255)
    codes = np.clip(np.round(cut / scales[:, :, None]) + zeros[:, :, None], 0, 255)
    return codes.astype(np.uint8), scales.astype(np.float32), zeros.astype(np.uint8)


def check_ranking(
    folder: Path, tower: TowerRecord, files: Sequence[Path], texts: Sequence[str]
) -> PrecisionCheck:
    """Does each early level of `files` rank as the tower's own graphs, whatever its batch?

    Texts are ranked among texts: what pictures they find is not asked, since an export has none.
    Raises PrecisionError naming the level.
    """
    assert tower.text is not None, "only texts are checked"
    feeds = _feeds(Tokenizer(folder, tower.text), texts)
    own = [GraphRunner(folder / stage.file, threads=1) for stage in tower.stages]
    gallery = np.concatenate([_levels(own, feed)[-1] for feed in feeds])
    asked = feeds[:QUERIES]
    exact = _all_levels(own, asked)
    runners = [GraphRunner(file, threads=1) for file in files]
    alone = _all_levels(runners, asked)
    groups = [asked[i : i + TOGETHER] for i in range(0, len(asked), TOGETHER)]
    others = [
        _all_levels(runners, [_join(group, tower.text, more) for group in groups])
        for more in (0, LONGER)
    ]
    overlap, apart = {}, {}
    for index, stage in enumerate(tower.stages):
        rows, level = nested_prefix(gallery, stage.dim), stage.level
        scores = alone[index] @ rows.T
        # numpy's maximum keeps NaN, Python's may lose it
        apart[level] = float(np.max([np.abs(o[index] @ rows.T - scores).max() for o in others]))
        overlap[level] = _overlap(scores, exact[index] @ rows.T)
        allowed = MOST_APART if stage is tower.stages[-1] else MOST_APART_EARLY
        _judge(level, overlap[level], apart[level], allowed)
    return PrecisionCheck(overlap, apart)


def _judge(level: int, overlap: float, apart: float, allowed: float) -> None:
    if not overlap >= LEAST_OVERLAP:
        raise PrecisionError(
            f"level {level}: 8-bit heads keep {overlap:.3f} of fp32's best {TOP}, less than "
            f"{LEAST_OVERLAP}; export with --precision fp32"
        )
    if not apart <= allowed:
        raise PrecisionError(
            f"level {level}: a query's scores change by {apart:.1e} with its batch, more than "
            f"{allowed:.0e}; export with --precision fp32"
        )


def _overlap(scores: FloatArray, exact: FloatArray) -> float:
    """Share of each row's best ten that is the same; query i is row i, and never finds itself."""
    found = []
    for array in (scores, exact):
        hidden = array.copy()
        np.fill_diagonal(hidden, -np.inf)
        found.append(np.argsort(-hidden, axis=1, kind="stable")[:, :TOP])
    pairs = zip(*found, strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / TOP for a, b in pairs]))


def _feeds(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Arrays]:
    """Every text as a batch of one.

    A text that says nothing to the tower is left out, and so is one that says what another did: of
    equals nothing can be told apart.
    """
    found: dict[bytes, Arrays] = {}
    for text in texts:
        with contextlib.suppress(TextError):
            inputs = tokenizer.encode([text]).inputs
            found.setdefault(inputs["input_ids"].tobytes(), inputs)
    if len(found) < LEAST_TEXTS:
        raise PrecisionError(
            f"{len(found)} different texts to check the ranking with: at least {LEAST_TEXTS} are "
            "needed (--check-texts)"
        )
    return list(found.values())


def _levels(runners: Sequence[GraphRunner], feed: Arrays) -> list[FloatArray]:
    """Every level's (n, dim) of one batch."""
    tensors, levels = dict(feed), []
    for runner in runners:
        answer = runner(tensors)
        tensors |= answer
        levels.append(answer[EMBEDDING_NAME])
    return levels


def _all_levels(runners: Sequence[GraphRunner], feeds: Sequence[Arrays]) -> list[FloatArray]:
    """Every level's (n, dim) of many batches."""
    found = [_levels(runners, feed) for feed in feeds]
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _join(feeds: Sequence[Arrays], spec: TextPreparation, longer: int) -> Arrays:
    """Batches of one text as one, padded to the longest text and up to `longer` tokens more."""
    longest = max(feed["input_ids"].shape[1] for feed in feeds)
    width = min(longest + longer, spec.max_tokens)

    def padded(rows: npt.NDArray[np.generic], value: int) -> npt.NDArray[np.generic]:
        return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)

    return {
        "input_ids": np.concatenate([padded(feed["input_ids"], spec.pad_id) for feed in feeds]),
        "attention_mask": np.concatenate([padded(feed["attention_mask"], 0) for feed in feeds]),
    }

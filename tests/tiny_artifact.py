"""A real, tiny artifact, built in milliseconds: two towers, three exits, no torch.

Both towers share one hidden space, so that a colour word lands beside pictures of that colour at
every level: a search for "red" finds red pictures.
Early exits only nearly agree with the prefixes of the finest vector, as in a trained model.
A re-ranker, where one is asked for, compares the colour that a text names with the mean colour of
the picture: `agreement` says what it answers. It can be told to like what is unlike instead.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from hivlp.models.artifact import (
    ArtifactManifest,
    ImagePreparation,
    RerankerRecord,
    SourceRecord,
    StageRecord,
    TextPreparation,
    TowerRecord,
    file_record,
    fingerprint,
    read_manifest,
    write_manifest,
)
from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, GalleryKind, Modality

Shape = Sequence[str | int]
Constants = Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "orange": (255, 128, 0),
    "purple": (128, 0, 255),
}
FILLERS = ("a", "an", "the", "of", "is", "picture", "photo", "square", "something")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz0123456789")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

SIDE = 16
"""Height and width of the image tower's input, in pixels."""
MAX_TOKENS = 16
CELLS = 4
STATES_SPACE = "7" * 64
"""Of the re-ranker's pictures."""
Likes = Literal["same", "unlike"]
WIDTH = 3 * CELLS * CELLS
OPSET = 18


def solid(colour: str | tuple[int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> RgbImage:
    """A picture of one colour: (height, width, 3) uint8, `size` being (height, width)."""
    value = COLOURS[colour] if isinstance(colour, str) else colour
    return np.full((*size, 3), value, dtype=np.uint8)


def png(picture: RgbImage) -> bytes:
    """A PNG file of (height, width, 3) uint8 pixels."""
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, format="PNG")
    return stream.getvalue()


def make_tiny_artifact(
    folder: Path,
    *,
    dims: Sequence[int] = (8, 16, 32),
    gallery: GalleryKind = "nested",
    seed: int = 0,
    towers: Sequence[Modality] = ("text", "image"),
    words: Sequence[str] = (),
    name: str = "tiny",
    reranker: Likes | None = None,
) -> Path:
    """Write a small artifact into `folder` and return it; the same arguments write the same bytes.

    `reranker` likes pictures of the text's colour best, or those of it least. `dims` sets the
    number of stages (1 to 3 or more), `words` adds whole words to the vocabulary (each a direction
    of its own), `seed` changes every weight and so the `gallery_space`.
    """
    rng = np.random.default_rng(seed)
    vocabulary = _vocabulary(words)
    table = _token_table(vocabulary, rng)
    weights = _Weights([_near_identity(rng) for _ in dims], _heads(dims, rng))
    records: list[TowerRecord] = []
    if "text" in towers:
        records.append(_write_text_tower(folder, vocabulary, table, weights))
    if "image" in towers:
        records.append(_write_image_tower(folder, weights))
    pairs = None if reranker is None else _write_reranker(folder, vocabulary, reranker)
    _write_manifest(folder, records, pairs, gallery=gallery, seed=seed, name=name)
    return folder


def agreement(text: str, colour: tuple[int, int, int]) -> float:
    """What the re-ranker that likes the same answers for a text and a picture of one colour."""
    named = [_scaled(COLOURS[word]) for word in text.split() if word in COLOURS]
    wanted = np.mean(named, axis=0) if named else np.zeros(3)
    return float(np.exp(-np.sum((wanted - _scaled(colour)) ** 2)))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Overwrite one file of an artifact and make its manifest vouch for the new content."""
    (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: file_record(folder / name)}
    write_manifest(folder, manifest.model_copy(update={"files": files}))


def fail_beyond_one_pair(folder: Path) -> Path:
    """Make an artifact's re-ranker one that loads and warms up, and fails on two pairs or more."""
    file = "rerank/cross.onnx"
    model = onnx.load(folder / file)
    model.graph.node[-1].output[0] = "answered"
    single = numpy_helper.from_array(np.array([1], np.int64), "single")
    model.graph.initializer.append(single)
    model.graph.node.append(helper.make_node("Reshape", ["answered", "single"], ["probability"]))
    replace_file(folder, file, model.SerializeToString(deterministic=True))
    return folder


def replace_weights(folder: Path, stage_file: str, name: str, value: float) -> None:
    """Set every number of one weight of a stage (`layer` or `head`) to `value`, NaN included."""
    model = onnx.load(folder / stage_file)
    for weight in model.graph.initializer:
        if weight.name == name:
            shape = numpy_helper.to_array(weight).shape
            weight.CopyFrom(numpy_helper.from_array(np.full(shape, value, np.float32), name))
    replace_file(folder, stage_file, model.SerializeToString(deterministic=True))


def _vocabulary(words: Sequence[str]) -> list[str]:
    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return list(dict.fromkeys([*SPECIAL, *COLOURS, *FILLERS, *words, *pieces]))


def _features(colour: tuple[int, int, int]) -> FloatArray:
    """What the image tower's first step makes of a picture of one colour: (WIDTH,) float32."""
    scaled = np.asarray(colour, dtype=np.float32) / 127.5 - 1.0
    return np.repeat(scaled, CELLS * CELLS) + _bias()


def _bias() -> FloatArray:
    """Keeps mid-grey from being the zero vector: (WIDTH,) float32."""
    return np.tile(np.array([0.2, -0.2], dtype=np.float32), WIDTH // 2)


def _token_table(vocabulary: list[str], rng: np.random.Generator) -> FloatArray:
    """One row per token, (len(vocabulary), WIDTH) float32: colours loud, filler words quiet."""
    table = rng.normal(0.0, 0.5, (len(vocabulary), WIDTH))
    for row, token in enumerate(vocabulary):
        if token in COLOURS:
            table[row] = _features(COLOURS[token]) + 0.2 * table[row]
        elif token in SPECIAL or token in FILLERS:
            table[row] *= 0.05
    return table.astype(np.float32)


def _near_identity(rng: np.random.Generator) -> FloatArray:
    noise = rng.normal(0.0, 0.2 / np.sqrt(WIDTH), (WIDTH, WIDTH))
    return (np.eye(WIDTH) + noise).astype(np.float32)


def _heads(dims: Sequence[int], rng: np.random.Generator) -> list[FloatArray]:
    """One (WIDTH, dim) projection per level: the finest one's first columns, slightly disturbed."""
    finest = rng.normal(0.0, 1.0, (WIDTH, dims[-1]))
    noise = rng.normal(0.0, 0.1, (len(dims), WIDTH, dims[-1]))
    noise[-1] = 0.0
    return [(finest + noise[i])[:, :dim].astype(np.float32) for i, dim in enumerate(dims)]


@dataclass(frozen=True)
class _Weights:
    layers: list[FloatArray]
    heads: list[FloatArray]


@dataclass(frozen=True)
class _Opening:
    """How a stage begins: what it reads, and the nodes that make `below` of it."""

    inputs: list[onnx.ValueInfoProto]
    nodes: list[onnx.NodeProto]
    constants: Constants


@dataclass(frozen=True)
class _Body:
    """What a tower's stages share: the state's shape, and the nodes that make `pooled` of it."""

    tower: Modality
    hidden: Shape
    pool: list[onnx.NodeProto]
    constants: Constants


def _write_text_tower(
    folder: Path, vocabulary: list[str], table: FloatArray, weights: _Weights
) -> TowerRecord:
    (folder / "text").mkdir(parents=True, exist_ok=True)
    _tokenizer(vocabulary).save(str(folder / "text" / "tokenizer.json"))
    body = _text_body()
    mask = _value("attention_mask", ["n", "t"], TensorProto.INT64)
    stages = []
    for i in range(len(weights.heads)):
        if i == 0:
            ids = _value("input_ids", ["n", "t"], TensorProto.INT64)
            gather = helper.make_node("Gather", ["table", "input_ids"], ["below"])
            opening = _Opening([ids, mask], [gather], {"table": table})
        else:
            opening = _continue(i, body.hidden, mask)
        stages.append(_write_stage(folder, body, i, opening, weights))
    preparation = TextPreparation(
        tokenizer_file="text/tokenizer.json", max_tokens=MAX_TOKENS, pad_id=0
    )
    return TowerRecord(
        modality="text", family="tiny", pooling="mean", stages=tuple(stages), text=preparation
    )


def _text_body() -> _Body:
    """The mean over the tokens that the mask keeps."""
    pool = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["hidden", "mask3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axis_t"], ["summed"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "axis_t"], ["count"], keepdims=1),
        helper.make_node("Div", ["summed", "count"], ["pooled"]),
    ]
    constants: Constants = {"last": np.array([2], np.int64), "axis_t": np.array([1], np.int64)}
    return _Body("text", ["n", "t", WIDTH], pool, constants)


def _write_image_tower(folder: Path, weights: _Weights) -> TowerRecord:
    (folder / "image").mkdir(parents=True, exist_ok=True)
    pool = [helper.make_node("Identity", ["hidden"], ["pooled"])]
    body = _Body("image", ["n", WIDTH], pool, {})
    stages = []
    for i in range(len(weights.heads)):
        opening = _image_opening() if i == 0 else _continue(i, body.hidden)
        stages.append(_write_stage(folder, body, i, opening, weights))
    preparation = ImagePreparation(
        height=SIDE, width=SIDE, fit="stretch", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    return TowerRecord(
        modality="image", family="tiny", pooling="mean", stages=tuple(stages), image=preparation
    )


def _image_opening() -> _Opening:
    """The mean colour of each of CELLS x CELLS cells."""
    cell = [SIDE // CELLS] * 2
    nodes = [
        helper.make_node(
            "AveragePool", ["pixel_values"], ["cells"], kernel_shape=cell, strides=cell
        ),
        helper.make_node("Flatten", ["cells"], ["flat"], axis=1),
        helper.make_node("Add", ["flat", "bias"], ["below"]),
    ]
    return _Opening([_value("pixel_values", ["n", 3, SIDE, SIDE])], nodes, {"bias": _bias()})


def _continue(stage: int, hidden: Shape, *others: onnx.ValueInfoProto) -> _Opening:
    state = f"hidden_{stage}"
    node = helper.make_node("Identity", [state], ["below"])
    return _Opening([_value(state, hidden), *others], [node], {})


def _scaled(colour: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    return np.asarray(colour) / 127.5 - 1.0


def _write_reranker(folder: Path, vocabulary: list[str], likes: Likes) -> RerankerRecord:
    """Tokens become (colour, 1) or zeros, pictures the colours of their cells; pairs compare."""
    (folder / "rerank").mkdir()
    table = np.zeros((len(vocabulary), 4), np.float32)
    for row, token in enumerate(vocabulary):
        if token in COLOURS:
            table[row] = [*_scaled(COLOURS[token]), 1.0]
    ids, mask = (_value(n, ["n", "t"], TensorProto.INT64) for n in ("input_ids", "attention_mask"))
    # The mask is read only since the names of the inputs are fixed.
    texts = [
        helper.make_node("Gather", ["table", "input_ids"], ["all"]),
        helper.make_node("Cast", ["attention_mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["kept", "last"], ["kept3"]),
        helper.make_node("Mul", ["all", "kept3"], ["text_states"]),
    ]
    constants: Constants = {"table": table, "last": np.array([2], np.int64)}
    text_states = _value("text_states", ["n", "t", 4])
    _write_graph(folder / "rerank/text_states.onnx", texts, [ids, mask], text_states, constants)
    cell = [SIDE // CELLS] * 2
    images = [
        helper.make_node(
            "AveragePool", ["pixel_values"], ["cells"], kernel_shape=cell, strides=cell
        ),
        helper.make_node("Reshape", ["cells", "flat"], ["by_channel"]),
        helper.make_node("Transpose", ["by_channel"], ["image_states"], perm=[0, 2, 1]),
    ]
    pixels = _value("pixel_values", ["n", 3, SIDE, SIDE])
    image_states = _value("image_states", ["n", CELLS * CELLS, 3])
    constants = {"flat": np.array([0, 3, CELLS * CELLS], np.int64)}
    _write_graph(folder / "rerank/image_states.onnx", images, [pixels], image_states, constants)
    _write_pairs(folder / "rerank/cross.onnx", [text_states, mask, image_states], likes)
    return RerankerRecord(
        layers=1,
        text_width=4,
        image_tokens=CELLS * CELLS,
        image_width=3,
        states_space=STATES_SPACE,
    )


def _write_pairs(path: Path, inputs: list[onnx.ValueInfoProto], likes: Likes) -> None:
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["text_states", "mask3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axis_t"], ["sums"], keepdims=0),
        helper.make_node("Split", ["sums", "parts"], ["colours", "count"], axis=1),
        helper.make_node("Max", ["count", "one"], ["safe"]),
        helper.make_node("Div", ["colours", "safe"], ["wanted"]),
        helper.make_node("ReduceMean", ["image_states", "axis_t"], ["shown"], keepdims=0),
        helper.make_node("Sub", ["wanted", "shown"], ["apart"]),
        helper.make_node("ReduceSumSquare", ["apart", "axis_t"], ["distance"], keepdims=0),
        helper.make_node("Neg", ["distance"], ["negated"]),
        helper.make_node("Exp", ["negated"], ["same"]),
        helper.make_node("Sub", ["one", "same"], ["unlike"]),
        helper.make_node("Identity", [likes], ["probability"]),
    ]
    constants: Constants = {
        "last": np.array([2], np.int64),
        "axis_t": np.array([1], np.int64),
        "parts": np.array([3, 1], np.int64),
        "one": np.array(1.0, np.float32),
    }
    _write_graph(path, nodes, inputs, _value("probability", ["n"]), constants)


def _write_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    output: onnx.ValueInfoProto,
    constants: Constants,
) -> None:
    initialisers = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, [output], initialisers)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10, producer_name="hivlp"
    )
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _write_stage(
    folder: Path, body: _Body, i: int, opening: _Opening, weights: _Weights
) -> StageRecord:
    """Write stage i+1: from `below` a layer makes `hidden`, pooled and projected."""
    dim = weights.heads[i].shape[1]
    states = (f"hidden_{i + 1}",) if i + 1 < len(weights.heads) else ()
    nodes = [
        *opening.nodes,
        helper.make_node("MatMul", ["below", "layer"], ["mixed"]),
        helper.make_node("Tanh", ["mixed"], ["hidden"]),
        *body.pool,
        helper.make_node("MatMul", ["pooled", "head"], ["projected"]),
        helper.make_node("ReduceL2", ["projected", "axis_d"], ["length"], keepdims=1),
        helper.make_node("Max", ["length", "epsilon"], ["safe"]),
        helper.make_node("Div", ["projected", "safe"], ["embedding"]),
        *(helper.make_node("Identity", ["hidden"], [state]) for state in states),
    ]
    outputs = [_value("embedding", ["n", dim]), *(_value(state, body.hidden) for state in states)]
    constants = {
        **opening.constants,
        **body.constants,
        "layer": weights.layers[i],
        "head": weights.heads[i],
        "axis_d": np.array([1], np.int64),
        "epsilon": np.array(1e-12, np.float32),
    }
    initialisers = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    name = f"{body.tower}_stage{i + 1}"
    graph = helper.make_graph(nodes, name, opening.inputs, outputs, initialisers)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10, producer_name="hivlp"
    )
    onnx.checker.check_model(model)
    file = f"{body.tower}/stage{i + 1}.onnx"
    (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    inputs = tuple(value.name for value in opening.inputs)
    return StageRecord(
        level=i + 1, exit_layer=i + 1, dim=dim, file=file, inputs=inputs, states=states
    )


def _value(name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def _tokenizer(vocabulary: list[str]) -> Tokenizer:
    """Lower-cased whole words where known, else letters: `[CLS] words [SEP]`."""
    ids = {token: row for row, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return tokenizer


def _write_manifest(
    folder: Path,
    towers: list[TowerRecord],
    reranker: RerankerRecord | None,
    *,
    gallery: GalleryKind,
    seed: int,
    name: str,
) -> None:
    dims = ",".join(str(stage.dim) for stage in towers[0].stages)
    space = fingerprint({"model": "tiny", "seed": str(seed), "dims": dims, "gallery": gallery})
    files = sorted(path for path in folder.rglob("*") if path.suffix in {".onnx", ".json"})
    manifest = ArtifactManifest(
        name=name,
        created_at="2026-01-01T00:00:00Z",
        gallery=gallery,
        gallery_space=space,
        query_encoder=fingerprint({"gallery_space": space, "precision": "fp32"}),
        towers=tuple(towers),
        reranker=reranker,
        sources=(SourceRecord(name="tests/tiny_artifact.py", licence="Apache-2.0"),),
        files={
            path.relative_to(folder).as_posix(): file_record(path)
            for path in files
            if path.parent != folder
        },
    )
    write_manifest(folder, manifest)

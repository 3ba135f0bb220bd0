"""Encoders for timing: HiVLP's own towers of base size, random weights, synthetic answers.

Text: 6 layers, exits after 2, 4 and 6. Pictures: a ViT-B/16 at 224 pixels, 12 layers, exits after
4, 8 and 12. Both are 768 wide, with the heads of the recipe `hivlp`. Their graphs are run for the
time that they take; what they answer are the early answers of `synthetic.make_queries`, so that a
search finds what a trained model's search would. The text "q17" is query 17, whatever follows, and
counts as so many tokens; a picture says its query in its first pixel, see `picture_of`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hivlp.models.encoder import EncoderBatch
from hivlp.models.levels import EarlyOutput, FloatArray, LevelSpec, Modality

if TYPE_CHECKING:
    from hivlp.models.network.stack import StackTower

DIMS = (128, 300, 768)
HEAD_HIDDEN = 1536
VOCABULARY = 30_522
EXITS: Mapping[Modality, tuple[int, ...]] = {"text": (2, 4, 6), "image": (4, 8, 12)}
PICTURE_SIDE = 320
SEED_SIDE = 12


@dataclass(frozen=True)
class Space:
    """The hashes that an encoder and what it is asked over must agree on."""

    gallery: str
    encoder: str = "e" * 64


class TimedEncoder:
    """Implements `hivlp.models.encoder.Encoder`; `answers` are (n, dim) per level, normalised."""

    gallery = "nested"

    def __init__(
        self,
        modality: Modality,
        stages: Sequence[Path],
        answers: Sequence[FloatArray],
        space: Space,
        tokens: int = 16,
    ) -> None:
        from hivlp.models.runtime.providers import choose_providers, open_session

        self.modality: Modality = modality
        self.gallery_space, self.query_encoder = space.gallery, space.encoder
        exits = EXITS[modality][-len(stages) :]
        self.levels = tuple(
            LevelSpec(level, layer, vectors.shape[1])
            for level, (layer, vectors) in enumerate(zip(exits, answers, strict=True), 1)
        )
        self._answers, self._tokens = answers, tokens
        providers = choose_providers("cpu")
        self._sessions: list[Any] = [
            open_session(path.parent, path.name, threads=1, providers=providers) for path in stages
        ]

    def prepare(self, items: Sequence[Any]) -> EncoderBatch:
        rows = np.array([query_of(item) for item in items]) % len(self._answers[0])
        inputs = self._ids(rows) if self.modality == "text" else _pixels(items)
        return EncoderBatch({**inputs, "rows": rows}, len(items), (False,) * len(items))

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        tensors = dict(batch.inputs)
        rows = tensors.pop("rows")
        for session, spec, answers in zip(self._sessions, self.levels, self._answers, strict=True):
            if session is not None:
                names = [value.name for value in session.get_outputs()]
                feed = {value.name: tensors[value.name] for value in session.get_inputs()}
                tensors |= dict(zip(names, session.run(names, feed), strict=True))
            yield EarlyOutput(spec.level, np.ascontiguousarray(answers[rows], np.float32))

    def skip_graphs(self) -> None:
        """Answer at once from now on: what is left is everything but the encoder."""
        self._sessions = [None] * len(self.levels)

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        raise NotImplementedError("what is searched was not made by it")

    def _ids(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(rows).integers(0, VOCABULARY, (len(rows), self._tokens))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def query_of(item: str | np.ndarray) -> int:
    """The number of the query that a text, or a picture's pixels (height, width, 3), stands for."""
    if isinstance(item, str):
        number = item.split()[0].removeprefix("q")
        return int(number) if number.isdecimal() else 0  # what warms a server is no query
    red, green, blue = (int(value) for value in item[0, 0])
    return (red << 16) + (green << 8) + blue


def picture_of(number: int, side: int = PICTURE_SIDE) -> bytes:
    """A PNG that stands for a query: smooth colours of its own, and its number in one pixel."""
    from PIL import Image

    rng = np.random.default_rng(number)
    seed = rng.integers(0, 256, (SEED_SIDE, SEED_SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(seed).resize((side, side), Image.Resampling.BILINEAR)
    image.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _pixels(items: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    from hivlp.models.artifact import ImagePreparation
    from hivlp.models.runtime.preprocess import preprocess

    half = (0.5, 0.5, 0.5)
    spec = ImagePreparation(height=224, width=224, fit="stretch", mean=half, std=half)
    return {"pixel_values": preprocess(items, spec)}


def write_stages(folder: Path, modality: Modality, *, staged: bool = True) -> list[Path]:
    """The graphs of a tower, coarse first; kept once made. Not `staged`: one, the finest answer."""
    exits = EXITS[modality] if staged else EXITS[modality][-1:]
    files = [folder / f"{modality}-{len(exits)}-stage{i}.onnx" for i in range(len(exits))]
    if not files[-1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(files, modality, exits)
    return files


def _write(files: Sequence[Path], modality: Modality, exits: Sequence[int]) -> None:
    import torch

    from hivlp.models.network.exits import TowerExits
    from hivlp.models.network.heads import MlpHead
    from hivlp.models.training.graphs import write_graph
    from hivlp.models.training.stages import plan_stages

    torch.manual_seed(0)
    tower = _tower(modality)
    dims = DIMS[-len(exits) :]
    heads = [MlpHead(tower.width(n), dim, HEAD_HIDDEN) for n, dim in zip(exits, dims, strict=True)]
    stages = plan_stages(TowerExits(tower, exits, heads).folded().eval())
    for path, stage in zip(files, stages, strict=True):
        part = path.with_suffix(".part")
        write_graph(stage.module, stage.arguments, stage.ports, part)
        part.replace(path)


def _tower(modality: Modality) -> StackTower:
    from hivlp.models.network.text_tower import TextShape, TextTower, TokenizerFile
    from hivlp.models.network.vision import VisionShape, VisionTower

    if modality == "image":
        return VisionTower(VisionShape())
    return TextTower(TextShape(), TokenizerFile(Path("tokenizer.json"), VOCABULARY, 0))

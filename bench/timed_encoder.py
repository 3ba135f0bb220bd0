"""A text encoder for timing: a BERT 768 wide with random weights, whose answers are synthetic.

Its graphs are run for the time that they take; what it answers are the early answers of
`synthetic.make_queries`, so that a search finds what a trained model's search would. The text
"q17" is query 17, whatever follows. Every text counts as so many tokens. Nothing is tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hivlp.models.encoder import EncoderBatch
from hivlp.models.levels import EarlyOutput, FloatArray, LevelSpec

DEPTH, EXITS, DIMS = 6, (2, 4, 6), (128, 300, 768)
VOCABULARY = 30_522


class TimedEncoder:
    """Implements `hivlp.models.encoder.Encoder`; `answers` are (n, dim) per level, normalised."""

    modality = "text"
    gallery = "nested"

    def __init__(
        self,
        stages: Sequence[Path],
        answers: Sequence[FloatArray],
        *,
        gallery_space: str,
        query_encoder: str,
        tokens: int = 16,
    ) -> None:
        from hivlp.models.runtime.providers import choose_providers, open_session

        self.gallery_space, self.query_encoder = gallery_space, query_encoder
        pairs = zip(EXITS[-len(stages) :], answers, strict=True)
        self.levels = tuple(
            LevelSpec(level, layer, vectors.shape[1])
            for level, (layer, vectors) in enumerate(pairs, 1)
        )
        self._answers, self._tokens = answers, tokens
        providers = choose_providers("cpu")
        self._sessions = [
            open_session(path.parent, path.name, threads=1, providers=providers) for path in stages
        ]

    def prepare(self, items: Sequence[str]) -> EncoderBatch:
        rows = np.array([int(text.split()[0].removeprefix("q")) for text in items])
        rng = np.random.default_rng(rows)
        ids = rng.integers(0, VOCABULARY, (len(items), self._tokens))
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "rows": rows}
        return EncoderBatch(inputs, len(items), (False,) * len(items))

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        tensors = dict(batch.inputs)
        rows = tensors.pop("rows")
        for session, spec, answers in zip(self._sessions, self.levels, self._answers, strict=True):
            names = [value.name for value in session.get_outputs()]
            feed = {value.name: tensors[value.name] for value in session.get_inputs()}
            tensors |= dict(zip(names, session.run(names, feed), strict=True))
            yield EarlyOutput(spec.level, np.ascontiguousarray(answers[rows], np.float32))

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        raise NotImplementedError("what is searched was not made by it")


def write_stages(folder: Path, exits: Sequence[int] = EXITS) -> list[Path]:
    """The graphs of a tower that answers after these layers, coarse first; kept once made."""
    files = [folder / f"{len(exits)}-exits-stage{i}.onnx" for i in range(len(exits))]
    if not files[-1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(files, exits)
    return files


def _write(files: Sequence[Path], exits: Sequence[int]) -> None:
    import torch

    from hivlp.models.network.bert import BERT, BertTower
    from hivlp.models.network.exits import TowerExits
    from hivlp.models.network.heads import ExitHead, HeadShape
    from hivlp.models.training.graphs import write_graph
    from hivlp.models.training.stages import plan_stages

    torch.manual_seed(0)
    shape = replace(BERT, layers=replace(BERT.layers, depth=DEPTH))
    tower = BertTower(shape, files=(), pooling="mean", max_tokens=64)
    dims = DIMS[-len(exits) :]
    heads = [
        ExitHead(HeadShape(tower.width(layer), tower.width(layer), dim, hidden=0))
        for layer, dim in zip(exits, dims, strict=True)
    ]
    stages = plan_stages(TowerExits(tower, exits, heads).eval())
    for path, stage in zip(files, stages, strict=True):
        part = path.with_suffix(".part")
        write_graph(stage.module, stage.arguments, stage.ports, part)
        part.replace(path)

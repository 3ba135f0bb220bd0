"""Do the graphs say what torch says? Asked before an artifact is put in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hivlp.models.artifact import EMBEDDING_NAME, ImagePreparation, TextPreparation
from hivlp.models.errors import TrainingError
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.tower import Tower
from hivlp.models.training.graphs import GraphRunner

TOLERANCE = 1e-4
BATCHES = (1, 3)
FIRST_ID, SEED = 1, 0


class ParityError(TrainingError):
    """A graph that answers otherwise than torch: which tower, level and batch, and by how much."""

    def __init__(self, *, modality: str, level: int, items: int, difference: float) -> None:
        super().__init__(
            f"{modality} level {level}: the graph differs from torch by {difference:.2e} on "
            f"{items} items, more than {TOLERANCE:.0e}; nothing was written"
        )
        self.modality = modality
        self.level = level
        self.items = items
        self.difference = difference


def check_parity(exits: TowerExits, files: Sequence[Path]) -> float:
    """Largest difference of any number of any level's embedding. Raises ParityError."""
    runners = [GraphRunner(path, threads=1) for path in files]
    worst = 0.0
    for items in BATCHES:
        inputs = probe_inputs(exits.tower, items)
        with torch.no_grad():
            expected = [answer.numpy() for answer in exits(inputs)]
        tensors = {name: value.numpy() for name, value in inputs.items()}
        for level, (runner, wanted) in enumerate(zip(runners, expected, strict=True), 1):
            found = runner(tensors)
            tensors |= found
            difference = float(np.abs(found[EMBEDDING_NAME] - wanted).max())
            if not difference <= TOLERANCE:
                raise ParityError(
                    modality=exits.tower.modality, level=level, items=items, difference=difference
                )
            worst = max(worst, difference)
    return worst


def probe_inputs(tower: Tower, items: int) -> Mapping[str, Tensor]:
    """Random but seeded inputs: texts of different lengths, padded, or noisy pictures."""
    generator = torch.Generator().manual_seed(SEED + items)
    spec = tower.preparation
    if isinstance(spec, ImagePreparation):
        shape = (items, 3, spec.height, spec.width)
        return {"pixel_values": torch.rand(shape, generator=generator) * 2 - 1}
    return _texts(spec, items, tower, generator)


def _texts(
    spec: TextPreparation, items: int, tower: Tower, generator: torch.Generator
) -> dict[str, Tensor]:
    tokens = spec.max_tokens if spec.pad_to_max else min(spec.max_tokens, 4 + 3 * items)
    lengths = [max(2, tokens - 3 * i) for i in range(items)]
    mask = torch.zeros(items, tokens, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.randint(FIRST_ID, tower.vocabulary, (items, tokens), generator=generator)
    return {"input_ids": torch.where(mask == 1, ids, spec.pad_id), "attention_mask": mask}

"""Stages of pretrained towers as graphs: the graphs say what torch says, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hivlp.models.levels import Modality
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.families import load_tower
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.training.graphs import write_graph
from hivlp.models.training.parity import TOLERANCE, check_parity
from hivlp.models.training.stages import plan_stages
from tests.unit.models_training import hf_checkpoints as made

pytest.importorskip("transformers", reason="makes the checkpoints; extra [dev]")
Make = Callable[[Path], Any]
CASES: dict[str, tuple[Make, Modality, tuple[int, ...]]] = {
    "clip-text": (lambda path: made.make_clip(path, legacy=True), "text", (1, 3)),
    "clip-image": (made.make_clip, "image", (3,)),
    "siglip-text": (made.make_siglip, "text", (3,)),
    "siglip-image": (made.make_siglip, "image", (1, 3)),
    "deit": (
        lambda path: made.make_vit(path, "DeiTForImageClassificationWithTeacher"),
        "image",
        (3,),
    ),
    "roberta": (made.make_roberta, "text", (3,)),
}


@pytest.mark.parametrize("name", CASES)
def test_parity_of_a_familys_stages_with_torch(tmp_path: Path, name: str) -> None:
    make, modality, layers = CASES[name]
    make(tmp_path / "checkpoint")
    tower = load_tower(tmp_path / "checkpoint", modality)
    torch.manual_seed(0)
    heads = [
        ExitHead(HeadShape(tower.width(layer), tower.width(layer), 4 + layer, hidden=0))
        for layer in layers
    ]
    exits = TowerExits(tower, layers, heads).eval()
    files = []
    for i, plan in enumerate(plan_stages(exits)):
        files.append(tmp_path / f"stage{i}.onnx")
        write_graph(plan.module, plan.arguments, plan.ports, files[-1])
    assert check_parity(exits, files) < TOLERANCE

"""Exported graphs and rebuilt towers against their references."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from hivlp.models.network.bert import load_bert
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.efficientnet import load_efficientnet_lite
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.tower import Tower, freeze
from hivlp.models.training import export as exporting
from hivlp.models.training import parity
from hivlp.models.training.export import ExportNote, export_model
from hivlp.models.training.graphs import OPSET
from hivlp.models.training.parity import ParityError, check_parity
from hivlp.models.training.stages import plan_stages
from tests.unit.models_training.checkpoints import TinyVision, make_bert, tokens
from tests.unit.models_training.test_network_efficientnet import port_weights

DIMS = (4, 6, 8)


def _exits(tower: Tower, exits: tuple[int, ...]) -> TowerExits:
    torch.manual_seed(0)
    heads = [
        ExitHead(HeadShape(tower.width(layer), min(8, tower.width(layer)), dim, hidden=4))
        for layer, dim in zip(exits, DIMS, strict=True)
    ]
    return TowerExits(freeze(tower), exits, heads).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    folder = tmp_path_factory.mktemp("towers")
    (folder / "seed.tiny").write_text("1")
    text = _exits(load_bert(make_bert(folder / "bert")), (1, 2, 3))
    return DualEncoder(text, _exits(TinyVision(folder / "seed.tiny"), (1, 2, 3)), "nested")


def test_parity_every_stage_in_fp32_of_one_opset_with_open_axes(
    tmp_path: Path, model: DualEncoder
) -> None:
    artifact = export_model(model, tmp_path / "artifact", ExportNote("small"))
    for tower in artifact.manifest.towers:
        for before, after in pairwise(tower.stages):
            assert set(before.states) <= set(after.inputs)
        for stage in tower.stages:
            graph = onnx.load(artifact.path / stage.file)
            assert graph.opset_import[0].version == OPSET
            for value in graph.graph.input:
                assert value.type.tensor_type.shape.dim[0].dim_param
    files = [artifact.path / f"text/stage{i}.onnx" for i in (1, 2, 3)]
    assert check_parity(model.text, files) < 1e-5
    changed = copy.deepcopy(model.text)
    with torch.no_grad():
        changed.exit_heads[1].line.bias += 0.1
    with pytest.raises(ParityError, match="text level 2: the graph differs"):
        check_parity(changed, files)


def _no_graphs(*given: object) -> None:
    path = given[-1]
    assert isinstance(path, Path)
    path.write_bytes(b"a graph")


def test_a_model_whose_graphs_differ_is_not_written(
    tmp_path: Path, model: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: object) -> float:
        raise ParityError(modality="text", level=1, items=3, difference=0.5)

    monkeypatch.setattr(exporting, "write_graph", _no_graphs)
    monkeypatch.setattr(exporting, "check_parity", differs)
    with pytest.raises(ParityError, match="text level 1: the graph differs from torch"):
        export_model(model, tmp_path / "artifact", ExportNote("small"))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_what_was_there(
    tmp_path: Path, model: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact/manifest.json").write_text("the one before")

    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "write_graph", _no_graphs)
    monkeypatch.setattr(exporting, "check_parity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_model(model, tmp_path / "artifact", ExportNote("small"))
    assert (tmp_path / "artifact/manifest.json").read_text() == "the one before"
    assert len(list(tmp_path.iterdir())) == 1


def test_parity_of_efficientnet_lites_stages(tmp_path: Path) -> None:
    torch.save(port_weights(), tmp_path / "lite0.pth")
    exits = _exits(load_efficientnet_lite(tmp_path / "lite0.pth"), (6, 7, 8))
    names = [plan.ports.inputs for plan in plan_stages(exits)]
    assert names == [("pixel_values",), ("maps_6", "pooled_6"), ("maps_7", "pooled_7")]
    files = []
    for i, plan in enumerate(plan_stages(exits)):
        files.append(tmp_path / f"stage{i}.onnx")
        exporting.write_graph(plan.module, plan.arguments, plan.ports, files[-1])
    assert check_parity(exits, files) < parity.TOLERANCE


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_parity_of_the_bert_tower_with_transformers(tmp_path: Path, pooling: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference; extra [dev]")
    folder = make_bert(tmp_path / "bert", pooling=pooling)
    config = transformers.BertConfig(**json.loads((folder / "config.json").read_text()))
    reference = transformers.BertModel(config).eval()
    from safetensors.torch import load_file

    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if "ids" not in k}
    reference.load_state_dict(weights, strict=False)
    inputs = tokens([[2, 4, 5, 6, 3], [2, 7, 3]])
    with torch.no_grad():
        states = reference(**inputs, output_hidden_states=True).hidden_states
        tower = load_bert(folder)
        found = tower.features(inputs, (1, 2, 3))
    mask = inputs["attention_mask"].float()[..., None]
    vectors = []
    for hidden in states:
        pooled = hidden[:, 0] if pooling == "cls_token" else (hidden * mask).sum(1) / mask.sum(1)
        vectors.append(pooled / pooled.norm(dim=1, keepdim=True))
    # an early exit says what every layer so far says, the last one what the checkpoint says
    wanted = [torch.cat(vectors[:2], 1), torch.cat(vectors[:3], 1), vectors[3]]
    for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True), 1):
        assert ours.shape == (2, tower.width(layer))
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5)

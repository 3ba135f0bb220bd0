"""The BERT tower: strict loading, padding, pooling, and that an early exit already tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hivlp.models.network.bert import load_bert
from hivlp.models.network.tower import TowerError, freeze
from tests.unit.models_training.checkpoints import LAYERS, make_bert, tokens

POOLINGS = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bert(tmp_path / "bert")


def test_exits_stand_at_equal_distances(folder: Path) -> None:
    tower = load_bert(folder)
    assert tower.exits(LAYERS) == (1, 2, 3)
    assert tower.exits(1) == (LAYERS,)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_two_texts_differ_at_exit_1_and_padding_changes_nothing(
    tmp_path: Path, pooling: str
) -> None:
    tower = freeze(load_bert(make_bert(tmp_path, pooling=pooling)))
    assert tower.pooling == POOLINGS[pooling]
    alone = tower.features(tokens([[2, 4, 3]]), (1, 3))
    padded = tower.features(tokens([[2, 4, 3], [2, 5, 6, 7, 8, 3]]), (1, 3))
    for one, two in zip(alone, padded, strict=True):
        torch.testing.assert_close(one[0], two[0], atol=1e-5, rtol=1e-5)
        assert (two[0] - two[1]).abs().max() > 1e-3


def test_no_pooling_file_means_the_first_token(tmp_path: Path) -> None:
    assert load_bert(make_bert(tmp_path, pooling=None)).pooling == "first"


def test_a_pooling_that_is_not_implemented_is_named(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(TowerError, match="pooling_mode_max_tokens"):
        load_bert(folder)


def _change(folder: Path, name: str, shape: tuple[int, ...] | None) -> None:
    weights = load_file(folder / "model.safetensors")
    if shape is None:
        weights.pop(name)
    else:
        weights[name] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (
            "encoder.layer.1.output.dense.bias",
            None,
            "missing weights: encoder.layer.1.output.dense.bias",
        ),
        (
            "encoder.layer.9.output.dense.bias",
            (16,),
            "unexpected weights: encoder.layer.9.output.dense.bias",
        ),
        (
            "embeddings.LayerNorm.bias",
            (5,),
            r"mis-shaped weights: embeddings.LayerNorm.bias \(5,\)",
        ),
    ],
)
def test_loading_is_strict_and_names_the_weight(
    folder: Path, name: str, shape: tuple[int, ...] | None, told: str
) -> None:
    _change(folder, name, shape)
    with pytest.raises(TowerError, match=told):
        load_bert(folder)


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(TowerError, match=r"not finite weights: embeddings\.LayerNorm\.bias"):
        load_bert(folder)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_act", "swish", "'hidden_act' is 'swish'"),
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("num_attention_heads", 3, "hidden_size"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_named(
    folder: Path, field: str, value: object, told: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(TowerError, match=told):
        load_bert(folder)


def test_a_missing_field_of_the_configuration_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("intermediate_size")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TowerError, match="'intermediate_size' is missing"):
        load_bert(folder)


def test_a_cut_weights_file_is_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(TowerError, match=r"model\.safetensors: not a readable"):
        load_bert(folder)

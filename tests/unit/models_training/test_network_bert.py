"""The BERT tower: strict loading, padding, pooling, and that an early exit already tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hivlp.models.network.bert import BERT, ROBERTA, BertShape, _shape, load_bert
from hivlp.models.network.fields import Fields
from hivlp.models.network.tower import TowerError, freeze
from tests.unit.models_training.checkpoints import LAYERS, make_bert, tokens, write_modules
from tests.unit.models_training.hf_checkpoints import change_json, write_json

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


@pytest.mark.parametrize(
    ("mode", "pooling"), [("cls", "first"), ("mean", "mean"), ("lasttoken", "last")]
)
def test_the_pooling_file_of_newer_sentence_transformers_is_read(
    folder: Path, mode: str, pooling: str
) -> None:
    told = {"embedding_dimension": 16, "pooling_mode": mode, "include_prompt": True}
    # a flag beside it doesn't count there
    write_json(folder / "1_Pooling/config.json", told | {"pooling_mode_max_tokens": True})
    assert load_bert(folder).pooling == pooling


@pytest.mark.parametrize("mode", ["max", ["cls", "mean"], 3])
def test_a_pooling_mode_that_is_not_implemented_is_named_by_its_field(
    folder: Path, mode: object
) -> None:
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": mode})
    with pytest.raises(TowerError, match=r"'pooling_mode' is .*: one of cls, mean, lasttoken is"):
        load_bert(folder)


@pytest.mark.parametrize(
    ("kinds", "pooled", "told"),
    [
        (("Transformer", "Pooling"), "other", r"'1\.path' is of a Pooling, .* other/config\.json"),
        (("Transformer", "Pooling"), "../bert/1_Pooling", r"'1\.path' leaves the folder"),
        (("Transformer", "Pooling"), "/1_Pooling", r"'1\.path' leaves the folder"),
        (("Transformer", "Normalize"), "1_Pooling", "lists no Pooling"),
    ],
)
def test_a_list_of_modules_whose_pooling_is_not_there_is_refused(
    folder: Path, kinds: tuple[str, ...], pooled: str, told: str
) -> None:
    write_modules(folder, *kinds, pooled=pooled)
    with pytest.raises(TowerError, match=told) as error:
        load_bert(folder)
    assert error.value.path == folder / "modules.json"


@pytest.mark.parametrize(
    ("tokenizer", "sentences", "most"),
    [
        (9, {}, 9),
        (512, {}, 32),
        (int(1e30), {}, 32),
        (1e30, {"max_seq_length": None}, 32),
        (None, {}, 32),
        (9, {"max_seq_length": 20}, 20),
        (9, {"max_seq_length": 512}, 32),
    ],
)
def test_the_token_limit_is_sentence_transformers_own_else_the_tokenizers(
    folder: Path, tokenizer: float | None, sentences: dict[str, object], most: int
) -> None:
    write_json(folder / "tokenizer_config.json", {"model_max_length": tokenizer})
    write_json(folder / "sentence_bert_config.json", sentences)
    assert load_bert(folder).preparation.max_tokens == most
    write_json(folder / "tokenizer_config.json", {"model_max_length": "many"})
    write_json(folder / "sentence_bert_config.json", {})
    with pytest.raises(TowerError, match="'model_max_length' must be a number above 1"):
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
        ("is_decoder", True, "'is_decoder' is True: only False"),
        ("layer_norm_eps", 0, "'layer_norm_eps' must be a number above 0"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_named(
    folder: Path, field: str, value: object, told: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(TowerError, match=told):
        load_bert(folder)


def test_a_size_that_the_configuration_leaves_out_is_the_base_models(folder: Path) -> None:
    change_json(folder / "config.json", intermediate_size=...)
    with pytest.raises(TowerError, match=r"mis-shaped .*intermediate.* instead of \(3072, 16\)"):
        load_bert(folder)


@pytest.mark.parametrize(("family", "base"), [("Bert", BERT), ("Roberta", ROBERTA)])
def test_what_a_configuration_leaves_out_is_as_in_transformers(
    family: str, base: BertShape
) -> None:
    transformers = pytest.importorskip("transformers", reason="whose defaults they are")
    theirs = getattr(transformers, f"{family}Config")()
    ours = _shape(Fields({}, Path("config.json")), base)
    block = ours.layers.block
    assert (block.width, block.heads, block.inner, ours.layers.depth) == (
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
    )
    assert (block.activation, block.eps) == (theirs.hidden_act, theirs.layer_norm_eps)
    assert block.norm == "post"
    assert (ours.vocabulary, ours.positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.types, ours.pad_id) == (theirs.type_vocab_size, theirs.pad_token_id)


def test_a_cut_weights_file_is_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(TowerError, match=r"model\.safetensors: not a readable"):
        load_bert(folder)

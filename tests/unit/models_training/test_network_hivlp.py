"""HiVLP as a whole: text tower, MLM head, configuration, one row against a batch, export."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.errors import TrainingError
from hivlp.models.network.blocks import NormPlacement
from hivlp.models.network.heads import MlpHead
from hivlp.models.network.hivlp import (
    CrossConfig,
    Hivlp,
    HivlpConfig,
    make_hivlp,
    paper_literal,
)
from hivlp.models.network.mlm import MlmHead
from hivlp.models.network.stack import StackPooling
from hivlp.models.network.text_tower import TextShape, TextTower, TokenizerFile
from hivlp.models.network.tower import TowerError
from hivlp.models.runtime.loading import load_encoders
from hivlp.models.training.export import ExportNote, export_model
from tests.unit.models_training.tiny_hivlp import TINY, WORDS, make_batch, make_tiny, save_tokenizer

FORMS = [(n, p) for n in ("pre", "post") for p in ("first", "mean")]


def _with(**text: Any) -> HivlpConfig:
    return replace(TINY, text=replace(TINY.text, **text))


@pytest.mark.parametrize(("norm", "pooling"), FORMS)
def test_a_batch_of_texts_equals_its_rows_without_their_padding(
    tmp_path: Path, norm: NormPlacement, pooling: StackPooling
) -> None:
    text, batch = make_tiny(tmp_path, _with(norm=norm, pooling=pooling)).dual.text, make_batch()
    together = text(batch.texts)
    for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
        alone = text({n: x[row : row + 1, :length] for n, x in batch.texts.items()})
        for all_of_them, one in zip(together, alone, strict=True):
            torch.testing.assert_close(all_of_them[row], one[0])
        assert (together[0][row] - together[0][row - 1]).abs().max() > 1e-3


@pytest.mark.parametrize(("norm", "pooling"), FORMS)
def test_an_early_text_exit_is_what_the_whole_run_passes_by(
    tmp_path: Path, norm: NormPlacement, pooling: StackPooling
) -> None:
    exits, batch = make_tiny(tmp_path, _with(norm=norm, pooling=pooling)).dual.text, make_batch()
    tower, mask = exits.tower, batch.attention_mask
    hidden = tower.words(batch.input_ids) + tower.positions[: mask.shape[1]]  # type: ignore[operator, index]
    hidden = tower.norm(hidden) if norm == "post" else hidden  # type: ignore[operator]
    reading = exits.read(batch.texts)
    for block, found in zip(tower.blocks, reading.features, strict=True):  # type: ignore[arg-type]
        hidden = block(hidden, mask.bool()[:, None, None, :])
        normed = tower.norm(hidden) if norm == "pre" else hidden  # type: ignore[operator]
        kept = mask[..., None].double()
        wanted = normed[:, 0] if pooling == "first" else (normed * kept).sum(1) / kept.sum(1)
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(tower.sequence(reading.state, batch.texts), normed)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_attention_maps_of_texts_look_at_no_padding_and_equal_those_of_each_text_alone(
    tmp_path: Path, norm: NormPlacement
) -> None:
    tower, batch = make_tiny(tmp_path, _with(norm=norm)).dual.text.tower, make_batch()
    assert isinstance(tower, TextTower)
    together = tower.attention_maps(batch.texts)
    assert [each.shape for each in together] == [(4, 2, 7, 7)] * 3
    for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
        alone = tower.attention_maps({n: x[row : row + 1, :length] for n, x in batch.texts.items()})
        for all_of_them, one in zip(together, alone, strict=True):
            torch.testing.assert_close(one.sum(3), torch.ones_like(one[..., 0]))
            torch.testing.assert_close(all_of_them[row, :, :length, :length], one[0])
            assert (all_of_them[row, :, :, length:] == 0).all()


def test_answers_one_by_one_equal_one_reading_with_its_heads(tmp_path: Path) -> None:
    image, batch = make_tiny(tmp_path).dual.image, make_batch()
    reading = image.read(batch.pictures)
    for answer, head, features in zip(
        image.answers(batch.pictures), image.exit_heads, reading.features, strict=True
    ):
        torch.testing.assert_close(answer, F.normalize(head(features), dim=1))


def test_the_mlm_head_is_berts_and_shares_the_word_embeddings() -> None:
    torch.manual_seed(0)
    head, words = MlmHead(6, 9, image=6).double(), torch.randn(9, 6).double()
    states, image = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    with torch.no_grad():
        head.bias.normal_()
    x = (states + image) @ head.dense.weight.T + head.dense.bias
    x = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-12).sqrt()
    torch.testing.assert_close(head(states, image, words), x @ words.T + head.bias)


@pytest.mark.parametrize(("fusion", "changes"), [("add", 1), ("multiply", 1), ("none", 0)])
def test_another_picture_changes_the_words_told_unless_fusion_is_none(
    fusion: Any, changes: int
) -> None:
    torch.manual_seed(0)
    head, words, states = MlmHead(6, 9, image=4, fusion=fusion), torch.randn(9, 6), torch.ones(2, 6)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    found = head(states, torch.tensor([[0.0, 0, 0, 0], [1.0, 2, 3, 4]]), words)
    assert ((found[0] - found[1]).abs().max() > 1e-3) == changes


def test_the_mlp_head_is_the_papers_mlp_and_linear_without_a_hidden_layer() -> None:
    torch.manual_seed(0)
    head = MlpHead(6, 3, hidden=12)
    kinds = (nn.Linear, nn.GELU, nn.LayerNorm, nn.Linear)
    assert [type(step) for step in head.steps] == list(kinds)
    assert (head.features, head.dim, head.folded()) == (6, 3, head)
    linear, x = MlpHead(6, 3, hidden=0), torch.randn(2, 6)
    torch.testing.assert_close(linear(x + x), 2 * linear(x) - linear(0 * x))


def test_the_default_is_the_papers_size() -> None:
    config = HivlpConfig()
    assert [(s.exit_layer, s.dim) for s in config.levels("vision")] == [
        (4, 128), (8, 300), (12, 768),
    ]  # fmt: skip
    assert [s.exit_layer for s in config.levels("text")] == [2, 4, 6]
    assert (config.vision.width, config.vision.heads) == (config.text.width, config.text.heads)
    cross = config.cross_shape()
    assert cross is not None
    assert (cross.depth, cross.width, cross.heads, cross.block.inner) == (6, 768, 12, 3072)
    deep = replace(config, text=TextShape(depth=12))
    assert [s.exit_layer for s in deep.levels("text")] == [4, 8, 12]


def test_the_papers_letter_is_one_call_away(tmp_path: Path) -> None:
    config = paper_literal(TINY)
    assert (config.gallery, config.normalise, config.vision) == ("per_exit", False, TINY.vision)
    model = make_tiny(tmp_path, config)
    assert not any(p.requires_grad for p in model.temperature.parameters())
    assert model.temperature.factor.item() == 1.0
    vectors = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(model.compared(vectors), vectors)


def test_parts_that_are_left_out_are_not_there(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, replace(TINY, cross=None, mlm=False))
    assert model.cross is None
    assert model.mlm is None
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith(("cross", "mlm")) for name in names)


def test_no_weight_is_held_twice_so_a_checkpoint_can_be_safetensors(tmp_path: Path) -> None:
    state = make_tiny(tmp_path).state_dict()
    places = [value.data_ptr() for value in state.values() if value.numel()]
    assert len(set(places)) == len(places)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    path, hashes = save_tokenizer(tmp_path / "tokenizer.json"), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        hashes.append(make_hivlp(TINY, path).dual.text.tower.identity())
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gallery": "flat"}, "gallery: 'flat' is none of nested, per_exit"),
        ({"fusion": "concat"}, "fusion: 'concat' is none of add, multiply, none"),
        ({"normalise": False}, "normalise: a nested gallery"),
        ({"temperature": 101.0}, r"temperature: 101\.0 is not within 0\.01\.\.100"),
        ({"head_hidden": -1}, "head_hidden: -1 is less than 0"),
        ({"dims": (3, 5)}, None),
        ({"dims": ()}, "dims: 0 levels of a tower with depth 3"),
        ({"dims": (1, 2, 3, 4)}, "dims: 4 levels of a tower with depth 3"),
        ({"dims": (3, 3, 8)}, r"dims \[3, 3, 8\]: levels: dim must grow"),
        ({"dims": (0, 3, 8)}, r"dims \[0, 3, 8\]: levels: dim must grow"),
        ({"text_exits": (1, 3)}, "text_exits: 2 exits, but dims has 3 levels"),
        ({"text_exits": (2, 1, 3)}, r"text_exits \[2, 1, 3\].*: levels: exit_layer must grow"),
        ({"vision_exits": (1, 2, 4)}, "vision_exits: the last, 4, must be the tower's depth, 3"),
        ({"cross": CrossConfig(heads=5)}, r"cross\.width: 12 is not a multiple of heads, 5"),
        ({"cross": CrossConfig(heads=2, depth=0)}, r"cross\.depth: 0 is less than 1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(
    changes: dict[str, Any], told: str | None
) -> None:
    if told is None:
        assert [s.exit_layer for s in replace(TINY, **changes).levels("text")] == [2, 3]
        return
    with pytest.raises(TrainingError, match=told):
        replace(TINY, **changes)


def test_a_tokenizer_that_a_text_tower_cannot_be_built_on_is_refused(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json")
    assert TokenizerFile.read(path, "[PAD]") == TokenizerFile(path, len(WORDS), 0)
    with pytest.raises(TowerError, match=r"no token '<pad>', named by pad_token"):
        TokenizerFile.read(path, "<pad>")
    with pytest.raises(TowerError, match="no such file"):
        TokenizerFile.read(tmp_path / "nowhere.json", "[PAD]")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(TowerError, match=r"broken\.json: not a tokenizer"):
        TokenizerFile.read(tmp_path / "broken.json", "[PAD]")
    bare = save_tokenizer(tmp_path / "bare.json", template="$A [SEP]")
    with pytest.raises(TowerError, match="no special token at position 0"):
        TokenizerFile.read(bare, "[PAD]")
    with pytest.raises(TrainingError, match="max_tokens: 2 is less than 3"):
        TextShape(max_tokens=2)


def test_an_mlm_head_needs_a_text_tower_with_words(tmp_path: Path) -> None:
    model = make_tiny(tmp_path)
    del model.dual.text.tower.words
    with pytest.raises(TrainingError, match="mlm: a text tower of family hivlp-text has no word"):
        Hivlp(model.dual, mlm=MlmHead(12, 4, image=12))


def _states(model: Hivlp, batch_row: slice) -> Tensor:
    batch, dual = make_batch(), model.dual
    texts = {n: x[batch_row] for n, x in batch.texts.items()}
    pictures = {n: x[batch_row] for n, x in batch.pictures.items()}
    text, image = dual.text.read(texts), dual.image.read(pictures)
    assert model.cross is not None
    return model.cross(
        dual.text.tower.sequence(text.state, texts),
        texts["attention_mask"],
        dual.image.tower.sequence(image.state, pictures),
    )


def test_a_batch_of_pairs_is_matched_as_its_pairs_one_by_one(tmp_path: Path) -> None:
    model = make_tiny(tmp_path)
    together = _states(model, slice(None))
    for row in range(4):
        torch.testing.assert_close(together[row : row + 1], _states(model, slice(row, row + 1)))


TWO_LEVELS = replace(TINY, dims=(3, 8))


@pytest.mark.parametrize("config", [TWO_LEVELS, paper_literal(TWO_LEVELS)])
def test_parity_of_the_export_with_torch_through_the_runtime(
    tmp_path: Path, config: HivlpConfig
) -> None:
    dual = make_tiny(tmp_path, config).float().dual
    artifact = export_model(dual, tmp_path / "artifact", ExportNote("tiny"))
    assert artifact.manifest.gallery == config.gallery
    text = artifact.manifest.tower("text")
    assert text is not None
    for before, after in pairwise(text.stages):
        assert set(before.states) <= set(after.inputs)
    encoders = load_encoders(tmp_path / "artifact")
    assert encoders.text is not None
    assert encoders.image is not None
    texts = encoders.text.prepare(["a red square on the left of a small blue circle", "blue"])
    assert texts.truncated == (True, False)
    assert texts.inputs["input_ids"][:, 0].tolist() == [WORDS.index("[TXT]")] * 2
    noise = np.random.default_rng(0).integers(0, 255, (3, 13, 9, 3)).astype(np.uint8)
    pictures = encoders.image.prepare(list(noise))
    for encoder, exits, given in (
        (encoders.text, dual.text, texts),
        (encoders.image, dual.image, pictures),
    ):
        inputs = {name: torch.from_numpy(np.asarray(x)) for name, x in given.inputs.items()}
        for found, wanted in zip(encoder.encode(given), exits(inputs), strict=True):  # type: ignore[arg-type]
            np.testing.assert_allclose(found.vectors, wanted.detach().numpy(), atol=1e-5)

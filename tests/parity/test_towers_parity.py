"""Pretrained towers against transformers' own forward: every layer's vector, and the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hivlp.models.artifact import TextPreparation
from hivlp.models.levels import Modality
from hivlp.models.network.families import load_tower
from hivlp.models.network.image_processors import read_processor
from hivlp.models.network.pretrained import READ, PretrainedTower
from hivlp.models.network.tokenizer_files import BYTE_PAIRS, CLIP_PAIRS, read_tokenizer
from hivlp.models.network.tower import Tensors, Tower
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.texts import Tokenizer
from tests.unit.models_training import hf_checkpoints as made
from tests.unit.models_training.checkpoints import tokens

pytest.importorskip("transformers", reason="the reference; extra [dev]")

CLOSE = 1e-4


def _pictures() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(3, 3, made.SIDE, made.SIDE, generator=generator)}


def _clip_texts() -> dict[str, Tensor]:
    """Three texts of different lengths between start and end token, padded."""
    end = made.clip_end()
    return tokens([[end - 1, 5, 6, 7, 300, end], [end - 1, 9, end], [end - 1, 8, 8, 2, end]])


def _siglip_texts() -> dict[str, Tensor]:
    ids = torch.zeros(3, made.SIGLIP_TOKENS, dtype=torch.int64)
    for row, words in enumerate(([3, 4, 7, 1], [3, 5, 1], [6, 1])):
        ids[row, : len(words)] = torch.tensor(words)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@dataclass(frozen=True)
class Case:
    """How a checkpoint is made, what it is fed, and what transformers says a layer's vector is."""

    make: Callable[[Path], Any]
    modality: Modality
    inputs: Callable[[], dict[str, Tensor]]
    vector: Callable[[Any, Tensor, dict[str, Tensor]], Tensor]
    output: Callable[[Any, dict[str, Tensor]], Tensor]
    run: Callable[[Any, dict[str, Tensor]], Any]


def _ends(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["attention_mask"].sum(1) - 1


def _at_end(model: Any, hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.text_model.final_layer_norm(hidden)[torch.arange(3), _ends(inputs)]
    return found


CASES = {
    "clip-text": Case(
        made.make_clip,
        "text",
        _clip_texts,
        _at_end,
        lambda m, x: m.get_text_features(**x).pooler_output,
        lambda m, x: m.text_model(**x, output_hidden_states=True),
    ),
    "clip-text-legacy": Case(
        lambda folder: made.make_clip(folder, legacy=True),
        "text",
        _clip_texts,
        _at_end,
        lambda m, x: m.get_text_features(**x).pooler_output,
        lambda m, x: m.text_model(**x, output_hidden_states=True),
    ),
    "clip-image": Case(
        made.make_clip,
        "image",
        _pictures,
        lambda m, h, x: m.vision_model.post_layernorm(h[:, 0]),
        lambda m, x: m.get_image_features(**x).pooler_output,
        lambda m, x: m.vision_model(**x, output_hidden_states=True),
    ),
    "siglip-text": Case(
        made.make_siglip,
        "text",
        _siglip_texts,
        lambda m, h, x: m.text_model.final_layer_norm(h)[:, -1],
        lambda m, x: m.get_text_features(x["input_ids"]).pooler_output,
        lambda m, x: m.text_model(x["input_ids"], output_hidden_states=True),
    ),
    "siglip-image": Case(
        made.make_siglip,
        "image",
        _pictures,
        lambda m, h, x: m.vision_model.head(m.vision_model.post_layernorm(h)),
        lambda m, x: m.get_image_features(**x).pooler_output,
        lambda m, x: m.vision_model(**x, output_hidden_states=True),
    ),
    "vit": Case(
        made.make_vit,
        "image",
        _pictures,
        lambda m, h, x: m.layernorm(h)[:, 0],
        lambda m, x: m(**x).pooler_output,
        lambda m, x: m(**x, output_hidden_states=True),
    ),
    "vit-classifier": Case(
        lambda folder: made.make_vit(folder, "ViTForImageClassification", qkv_bias=False),
        "image",
        _pictures,
        lambda m, h, x: m.vit.layernorm(h)[:, 0],
        lambda m, x: m.vit(**x).last_hidden_state[:, 0],
        lambda m, x: m.vit(**x, output_hidden_states=True),
    ),
    "deit": Case(
        lambda folder: made.make_vit(folder, "DeiTModel"),
        "image",
        _pictures,
        lambda m, h, x: m.layernorm(h)[:, 0],
        lambda m, x: m(**x).pooler_output,
        lambda m, x: m(**x, output_hidden_states=True),
    ),
    "deit-of-two": Case(
        lambda folder: made.make_vit(folder, "DeiTForImageClassificationWithTeacher"),
        "image",
        _pictures,
        lambda m, h, x: m.deit.layernorm(h)[:, :2].flatten(1),
        lambda m, x: m.deit(**x).last_hidden_state[:, :2].flatten(1),
        lambda m, x: m.deit(**x, output_hidden_states=True),
    ),
}


def _states(tower: Tower, inputs: Tensors) -> list[Tensors]:
    state, found = tower.begin(inputs), []
    for layer in range(tower.depth):
        state = tower.advance(state, inputs, layer, layer + 1)
        found.append(state)
    return found


@pytest.mark.parametrize("name", CASES)
def test_parity_of_every_layer_and_of_the_output(tmp_path: Path, name: str) -> None:
    case, inputs = CASES[name], CASES[name].inputs()
    model = case.make(tmp_path)
    tower = load_tower(tmp_path, case.modality)
    assert isinstance(tower, PretrainedTower)
    with torch.no_grad():
        theirs = case.run(model, inputs).hidden_states
        wanted = [case.vector(model, hidden, inputs) for hidden in theirs[1:]]
        states = _states(tower, inputs)
        for ours, vector in zip(states, wanted, strict=True):
            np.testing.assert_allclose(tower.vector(ours), vector, atol=CLOSE, rtol=0)
        output = case.output(model, inputs)
        np.testing.assert_allclose(tower.output(states[-1]), output, atol=CLOSE, rtol=0)
        features = tower.features(inputs, range(1, tower.depth + 1))
    # an early exit reads the layers up to it, the last one the checkpoint's own answer
    vectors = [vector / vector.norm(dim=1, keepdim=True) for vector in wanted]
    early = [torch.cat(vectors[: i + 1], 1) for i in range(tower.depth - 1)]
    last = output / output.norm(dim=1, keepdim=True)
    for layer, (found, told) in enumerate(zip(features, [*early, last], strict=True), 1):
        assert found.shape == (3, tower.width(layer))
        np.testing.assert_allclose(found, told, atol=CLOSE, rtol=0)
    assert tower.depth <= READ
    if case.modality == "text":
        assert (features[0][0] - features[0][1]).abs().max() > 1e-3


def test_parity_of_roberta_whose_positions_begin_behind_the_padding(tmp_path: Path) -> None:
    model = made.make_roberta(tmp_path)
    tower = load_tower(tmp_path, "text")
    ids = torch.tensor([[0, 9, 8, 7, 2], [0, 30, 2, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    with torch.no_grad():
        theirs = model(**inputs, output_hidden_states=True).hidden_states
        states = [tower.begin(inputs), *_states(tower, inputs)]
    for ours, wanted in zip(states, theirs, strict=True):
        kept = inputs["attention_mask"].bool()
        np.testing.assert_allclose(ours["hidden"][kept], wanted[kept], atol=CLOSE, rtol=0)
    assert isinstance(tower.preparation, TextPreparation)
    assert tower.preparation.max_tokens == made.ROBERTA_PLACES - 2
    assert tower.preparation.pad_id == 1
    assert (tower.features(inputs, (1,))[0][0] - tower.features(inputs, (1,))[0][1]).abs().max() > 0


@pytest.mark.parametrize("pickled", [True, False])
def test_parity_of_open_clip_with_the_clip_that_it_was_made_of(
    tmp_path: Path, pickled: bool
) -> None:
    made.make_clip(tmp_path / "clip", legacy=True)
    made.make_open_clip(tmp_path / "open", tmp_path / "clip", pickled=pickled)
    sides: tuple[tuple[Modality, Any], ...] = (("text", _clip_texts()), ("image", _pictures()))
    for modality, inputs in sides:
        clip, opened = (load_tower(tmp_path / name, modality) for name in ("clip", "open"))
        assert opened.family == "openclip"
        assert opened.joint_space
        layers = range(1, clip.depth + 1)
        pairs = zip(clip.features(inputs, layers), opened.features(inputs, layers), strict=True)
        for one, two in pairs:
            np.testing.assert_allclose(one, two, atol=1e-6, rtol=0)


def test_clips_padding_changes_nothing_wherever_it_ends(tmp_path: Path) -> None:
    made.make_clip(tmp_path)
    tower, inputs = load_tower(tmp_path, "text"), _clip_texts()
    more = made.CLIP_TOKENS - inputs["input_ids"].shape[1]
    padded = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (0, more), value=made.clip_end()),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, more)),
    }
    layers = range(1, tower.depth + 1)
    pairs = zip(tower.features(inputs, layers), tower.features(padded, layers), strict=True)
    for cut, whole in pairs:
        np.testing.assert_allclose(cut, whole, atol=1e-6, rtol=0)


def test_siglips_padding_is_attended_to(tmp_path: Path) -> None:
    made.make_siglip(tmp_path)
    tower, inputs = load_tower(tmp_path, "text"), _siglip_texts()
    other = {"input_ids": torch.where(inputs["input_ids"] == 0, 2, inputs["input_ids"])}
    one, two = (tower.features(x, (1, 3))[1] for x in (inputs, other))
    assert (one - two).abs().max() > 1e-3
    assert isinstance(tower.preparation, TextPreparation)
    assert tower.preparation.pad_to_max
    assert tower.preparation.max_tokens == made.SIGLIP_TOKENS
    assert tower.preparation.pad_id == 0


TEXTS = ("A red square", "of   GREEN, it's 42 a", "Blue\u00e9 picture; of-a SQUARE!")


@pytest.mark.parametrize("ready", [True, False])
def test_clips_tokens_are_transformers_own(tmp_path: Path, ready: bool) -> None:
    transformers = pytest.importorskip("transformers")
    made.make_clip(tmp_path)
    own = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    if not ready:
        (tmp_path / "tokenizer.json").unlink()
        read_tokenizer(tmp_path, CLIP_PAIRS).save(str(tmp_path / "tokenizer.json"))
    _same_tokens(tmp_path, load_tower(tmp_path, "text"), own, padding=True)


@pytest.mark.parametrize("ready", [True, False])
def test_robertas_tokens_are_transformers_own(tmp_path: Path, ready: bool) -> None:
    transformers = pytest.importorskip("transformers")
    made.make_roberta(tmp_path)
    own = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    if not ready:
        (tmp_path / "tokenizer.json").unlink()
        read_tokenizer(tmp_path, BYTE_PAIRS).save(str(tmp_path / "tokenizer.json"))
    _same_tokens(tmp_path, load_tower(tmp_path, "text"), own, padding=True)


def _same_tokens(folder: Path, tower: Tower, own: Any, *, padding: Any) -> None:
    spec = tower.preparation
    assert isinstance(spec, TextPreparation)
    found = Tokenizer(folder, spec).encode(TEXTS).inputs
    cleaned = [" ".join(text.split()) for text in TEXTS]
    wanted = own(cleaned, padding=padding, truncation=True, max_length=spec.max_tokens)
    mask = np.array(wanted["attention_mask"])
    np.testing.assert_array_equal(found["attention_mask"], mask)
    ids = np.array(wanted["input_ids"])
    np.testing.assert_array_equal(found["input_ids"][mask == 1], ids[mask == 1])


@pytest.mark.parametrize(
    ("kind", "changes", "size"),
    [
        ("CLIP", {}, made.SIDE),
        ("CLIP", {"size": made.SIDE, "crop_size": made.SIDE}, made.SIDE),
        ("CLIP", {"size": {"shortest_edge": 16}, "resample": 2}, made.SIDE),
        ("Siglip", {"rescale_factor": 1 / 127.5}, made.SIDE),
        ("ViT", {"do_normalize": False}, made.SIDE),
        ("ViT", {"size": made.SIDE, "resample": 2}, made.SIDE),
        (
            "DeiT",
            {
                "size": {"height": 16, "width": 16},
                "crop_size": {"height": 12, "width": 12},
                "do_center_crop": True,
            },
            made.SIDE,
        ),
    ],
)
def test_pictures_are_prepared_as_by_transformers_own_processor(
    tmp_path: Path, kind: str, changes: dict[str, Any], size: int
) -> None:
    transformers = pytest.importorskip("transformers")
    made.write_processor(tmp_path, kind, **changes)
    spec = read_processor(tmp_path / "preprocessor_config.json", (size, size))
    own = getattr(transformers, f"{kind}ImageProcessorPil").from_pretrained(tmp_path)
    # smooth, as a cut at the border sees a pixel less than a cut after resizing does
    rows, columns = np.mgrid[0:31, 0:57]
    picture = np.stack([rows * 4, columns * 3, 200 - rows * 2], 2).astype(np.uint8)
    wanted = np.array(own(Image.fromarray(picture))["pixel_values"][0])
    found = preprocess([picture], spec)[0]
    assert found.shape == wanted.shape
    scale = np.array(spec.std).reshape(3, 1, 1) * 255
    difference = np.abs(found - wanted) * scale  # in steps of a byte
    assert difference[:, 1:-1, 1:-1].max() <= 1.01
    assert difference.max() <= 4

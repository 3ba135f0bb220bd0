"""Folders of every family: strict weights, whatever form they lie in, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library

from hivlp.models.levels import Modality
from hivlp.models.network.blocks import BlockShape
from hivlp.models.network.families import FAMILIES, families_at, load_tower
from hivlp.models.network.fields import Fields
from hivlp.models.network.image_processors import read_open_clip, read_processor
from hivlp.models.network.pictures import Probe
from hivlp.models.network.pretrained import READ
from hivlp.models.network.tokenizer_files import (
    CLIP_PAIRS,
    PIECES,
    WORD_PIECES,
    pad_id,
    read_tokenizer,
)
from hivlp.models.network.tower import TowerError
from tests.unit.models_training import hf_checkpoints as made
from tests.unit.models_training.checkpoints import make_bert

pytest.importorskip("transformers", reason="makes the checkpoints; extra [dev]")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    made.make_clip(folder / "clip")
    made.make_siglip(folder / "siglip")
    made.make_vit(folder / "vit")
    made.make_vit(folder / "deit", "DeiTModel")
    made.make_roberta(folder / "roberta")
    made.make_open_clip(folder / "open", folder / "clip")
    make_bert(folder / "bert")
    return folder


@pytest.fixture
def copy(tmp_path: Path, originals: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


def change(folder: Path, name: str, value: Any, file: str = WEIGHTS) -> None:
    """Put another tensor in a weight's place; None takes it away."""
    weights = load_file(folder / file)
    weights.pop(name, None)
    save_file(weights | ({} if value is None else {name: value}), folder / file)


@pytest.mark.parametrize(
    ("name", "modality", "weight"),
    [
        ("clip", "text", "text_model.encoder.layers.1.mlp.fc2.bias"),
        ("clip", "text", "text_projection.weight"),
        ("clip", "image", "vision_model.pre_layrnorm.weight"),
        ("clip", "image", "vision_model.embeddings.class_embedding"),
        ("siglip", "text", "text_model.head.bias"),
        ("siglip", "image", "vision_model.head.probe"),
        ("vit", "image", "embeddings.cls_token"),
        ("vit", "image", "encoder.layer.0.attention.attention.key.bias"),
        ("deit", "image", "layernorm.bias"),
        ("roberta", "text", "embeddings.LayerNorm.bias"),
    ],
)
def test_a_weight_that_is_missing_or_misshaped_is_named_as_the_file_names_it(
    copy: Callable[[str], Path], name: str, modality: Modality, weight: str
) -> None:
    folder = copy(name)
    change(folder, weight, None)
    with pytest.raises(TowerError, match=f"missing weights: {weight}") as told:
        load_tower(folder, modality)
    assert told.value.path == folder / WEIGHTS
    change(folder, weight, torch.zeros(5, 5))
    with pytest.raises(TowerError, match=rf"mis-shaped weights: {weight} \(5, 5\) instead of"):
        load_tower(folder, modality)


def test_a_fused_weight_of_another_shape_is_named(copy: Callable[[str], Path]) -> None:
    folder, name = copy("siglip"), "vision_model.head.attention.in_proj_weight"
    change(folder, name, torch.zeros(made.WIDTH * 3, 5))
    with pytest.raises(TowerError, match=r"in_proj_weight\[query\] \(16, 5\) instead of \(16, 16"):
        load_tower(folder, "image")
    change(folder, name, None)
    with pytest.raises(TowerError, match=r"missing weights: .*in_proj_weight\[query\]"):
        load_tower(folder, "image")


@pytest.mark.parametrize("name", ["clip", "siglip", "vit", "deit", "roberta", "open"])
def test_a_weight_that_belongs_nowhere_is_unexpected_in_every_tower(
    copy: Callable[[str], Path], name: str
) -> None:
    folder = copy(name)
    if name == "open":
        file = folder / "open_clip_pytorch_model.bin"
        torch.save(torch.load(file, weights_only=True) | {"adapter.weight": torch.ones(2)}, file)
    else:
        change(folder, "adapter.weight", torch.ones(2))
    towers = families_at(folder).values()
    # of OpenCLIP's names only those of pictures have a prefix; all others are the text tower's
    for family in [each for each in towers if name != "open" or each.modality == "text"]:
        with pytest.raises(TowerError, match=r"unexpected weights: adapter\.weight"):
            family.load(folder)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("clip", {"clip-text", "clip-image"}),
        ("siglip", {"siglip-text", "siglip-image"}),
        ("open", {"openclip-text", "openclip-image"}),
        ("vit", {"vit"}),
        ("deit", {"deit"}),
        ("roberta", {"roberta"}),
        ("bert", {"bert"}),
    ],
)
def test_a_folder_is_known_as_its_family_alone(
    originals: Path, name: str, wanted: set[str]
) -> None:
    found = families_at(originals / name)
    assert set(found) == wanted
    towers = [load_tower(originals / name, family.modality) for family in found.values()]
    spaces = {tower.joint_space for tower in towers}
    # two towers of one checkpoint meet in one space, any other stands alone
    assert len(spaces) == 1
    assert (None in spaces) == (len(wanted) == 1)
    for tower in towers:
        assert not any(weight.requires_grad for weight in tower.parameters())
        assert all(source.is_file() for source in tower.sources)


def test_two_checkpoints_share_no_space(tmp_path: Path, originals: Path) -> None:
    shutil.copytree(originals / "clip", tmp_path / "clip")
    change(tmp_path / "clip", "logit_scale", torch.tensor(3.0))
    one, two = (load_tower(folder / "clip", "text") for folder in (tmp_path, originals))
    assert one.joint_space != two.joint_space


def _same(one: Path, two: Path, modality: Modality) -> bool:
    states = [load_tower(path, modality).state_dict() for path in (one, two)]
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_weights_lie_in_shards_pickles_and_half_precision(
    copy: Callable[[str], Path], originals: Path
) -> None:
    folder = copy("clip")
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:40], "model-2.safetensors": names[40:]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file)
    index = folder / f"{WEIGHTS}.index.json"
    listed = {name: file for file, own in parts.items() for name in own}
    made.write_json(index, {"weight_map": listed})
    assert _same(folder, originals / "clip", "text")
    assert {path.name for path in load_tower(folder, "image").sources} >= set(parts)
    made.write_json(index, {"weight_map": listed | {"extra": "model-2.safetensors"}})
    with pytest.raises(TowerError, match="missing weights: extra"):
        load_tower(folder, "text")
    made.write_json(index, {"weight_map": listed | {"extra": "../model-2.safetensors"}})
    with pytest.raises(TowerError, match=r"'weight_map': .* leaves the folder"):
        load_tower(folder, "text")
    index.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert _same(folder, originals / "clip", "image")
    halves = {name: value.half() for name, value in weights.items()}
    save_file(halves, folder / WEIGHTS)
    tower = load_tower(folder, "text")
    assert {value.dtype for value in tower.state_dict().values()} == {torch.float32}
    assert torch.equal(
        tower.state_dict()["norm.bias"], halves["text_model.final_layer_norm.bias"].float()
    )


def test_a_pickle_that_holds_more_than_tensors_is_never_run(copy: Callable[[str], Path]) -> None:
    folder = copy("clip")
    (folder / WEIGHTS).unlink()
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(TowerError, match=r"pytorch_model\.bin: not a state dict"):
        load_tower(folder, "text")


def test_no_weights_at_all_names_what_was_looked_for(copy: Callable[[str], Path]) -> None:
    folder = copy("vit")
    (folder / WEIGHTS).unlink()
    with pytest.raises(TowerError, match=r"no weights: one of model\.safetensors, "):
        load_tower(folder, "image")


def test_an_unknown_family_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    made.write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    with pytest.raises(TowerError, match="no text tower of a known family") as told:
        load_tower(tmp_path, "text")
    for name, family in FAMILIES.items():
        assert (f"{name}: " in told.value.reason) == (family.modality == "text")


@pytest.mark.parametrize(
    ("name", "modality", "part", "field", "value", "told"),
    [
        ("clip", "text", "text_config", "hidden_size", "16", "'text_config.hidden_size' must be a"),
        ("clip", "text", "text_config", "num_attention_heads", 3, "'text_config.hidden_size' must"),
        ("clip", "text", "text_config", "hidden_act", "swish", "'text_config.hidden_act' is"),
        ("clip", "text", None, "text_config", [], "'text_config' is not an object"),
        ("clip", "image", "vision_config", "patch_size", [4], "'vision_config.patch_size' must"),
        ("clip", "image", "vision_config", "num_channels", 1, "'vision_config.num_channels' is 1"),
        ("clip", "image", None, "projection_dim", 0, "'projection_dim' must be a whole number"),
        ("siglip", "image", "vision_config", "vision_use_head", False, "vision_use_head"),
        ("siglip", "image", "vision_config", "layer_norm_eps", "x", "layer_norm_eps' must be a nu"),
        ("siglip", "text", None, "model_type", "siglip2", "NaFlex"),
        ("vit", "image", None, "pooler_act", "relu", "'pooler_act' is 'relu'"),
        ("vit", "image", None, "qkv_bias", 1, "'qkv_bias' must be true or false"),
        ("roberta", "text", None, "max_position_embeddings", 2, "'max_position_embeddings' must"),
        ("roberta", "text", None, "hidden_size", "16", "'hidden_size' must be a whole number"),
        ("roberta", "text", None, "is_decoder", True, "'is_decoder' is True"),
    ],
)
def test_a_broken_configuration_names_field_and_file(
    copy: Callable[[str], Path],
    name: str,
    modality: Modality,
    part: str | None,
    field: str,
    value: object,
    told: str,
) -> None:
    folder = copy(name)
    config = folder / "config.json"
    found = json.loads(config.read_text())
    (found if part is None else found[part])[field] = value
    made.write_json(config, found)
    with pytest.raises(TowerError, match=told) as error:
        load_tower(folder, modality)
    assert error.value.path == config


def test_a_configuration_of_defaults_alone_is_transformers_own_base_size(tmp_path: Path) -> None:
    import transformers

    made.write_json(tmp_path / "config.json", {"model_type": "siglip", "vision_config": {}})
    save_file({"x": torch.zeros(1)}, tmp_path / WEIGHTS)
    made.write_processor(tmp_path, "Siglip", size={"height": 224, "width": 224})
    with pytest.raises(TowerError, match=r"missing weights: .* and (\d+) more") as told:
        load_tower(tmp_path, "image")
    with torch.device("meta"):
        model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig())
    # our missing weights are theirs, the fused one in three
    count = len(model.state_dict()) + 2 * 2
    assert f"and {count - 4} more" in told.value.reason


@pytest.mark.parametrize("named", [5, "DeiTForImageClassificationWithTeacher", None])
def test_a_deit_whose_architectures_are_no_list_is_read_at_its_class_token(
    copy: Callable[[str], Path], named: object
) -> None:
    folder = copy("deit")
    made.change_json(folder / "config.json", architectures=named)
    assert load_tower(folder, "image").pooling == "first"


def test_an_older_configuration_beside_the_newer_goes_before(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("clip")
    found = json.loads((folder / "config.json").read_text())
    found["text_config_dict"] = {"hidden_act": "gelu"}
    made.write_json(folder / "config.json", found)
    tower = load_tower(folder, "text")
    assert tower.layers.block.activation == "gelu"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vision_cfg", "timm_model_name", "vit_base_patch16_siglip_224"),
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "head_width", 5),
        ("text_cfg", "hf_model_name", "roberta-base"),
        ("text_cfg", "pool_type", "last"),
        ("text_cfg", "heads", 3),
    ],
)
def test_what_open_clip_can_build_besides_is_refused_by_its_field(
    copy: Callable[[str], Path], part: str, field: str, value: object
) -> None:
    folder = copy("open")
    config = folder / "open_clip_config.json"
    found = json.loads(config.read_text())
    found["model_cfg"][part][field] = value
    made.write_json(config, found)
    with pytest.raises(TowerError, match=f"'model_cfg.{part}.{field}'"):
        load_tower(folder, "text" if part == "text_cfg" else "image")


def test_open_clips_weights_beside_a_clip_configuration_are_read_as_open_clips(
    copy: Callable[[str], Path], originals: Path
) -> None:
    folder = copy("open")
    shutil.copyfile(originals / "clip/config.json", folder / "config.json")
    assert set(families_at(folder)) == {"openclip-text", "openclip-image"}
    shutil.copyfile(originals / "clip" / WEIGHTS, folder / WEIGHTS)
    assert set(families_at(folder)) == {"clip-text", "clip-image"}


def test_open_clips_ways_of_resizing(tmp_path: Path) -> None:
    def fit(**told: object) -> tuple[str, tuple[int, int, int], str]:
        spec = read_open_clip(Fields(told, tmp_path), (12, 12))
        return spec.fit, spec.background, spec.interpolation

    assert fit() == ("crop", (0, 0, 0), "bicubic")
    assert fit(resize_mode="squash", interpolation="bilinear")[::2] == ("stretch", "bilinear")
    assert fit(resize_mode="longest", fill_color=7)[:2] == ("pad", (7, 7, 7))
    for told in ({"resize_mode": "random"}, {"size": 24}, {"std": [0, 1, 1]}):
        with pytest.raises(TowerError, match=f"'{next(iter(told))}'"):
            fit(**told)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("ConvNext", {}, "'image_processor_type' is 'ConvNextImageProcessor'"),
        ("CLIP", {"resample": 1}, "'resample' is 1"),
        ("CLIP", {"do_resize": False}, "'do_resize' is false"),
        ("CLIP", {"do_pad": True}, "'do_pad' is True"),
        ("CLIP", {"crop_size": 24}, "'crop_size' .* is larger"),
        ("CLIP", {"crop_size": {"height": 12, "width": 6}}, "'size' ends at"),
        ("CLIP", {"size": {"shortest_edge": 8, "longest_edge": 9}}, "shortest_edge alone"),
        ("Siglip", {"size": {"height": 24, "width": 24}}, r"ends at \(24, 24\), but the tower"),
        ("ViT", {"image_std": [0.5, 0.5, 0]}, "'image_std' must be above 0"),
        ("ViT", {"image_mean": 0.5}, "'image_mean' must be three numbers"),
    ],
)
def test_an_image_processor_that_is_not_followed_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], told: str
) -> None:
    made.write_processor(tmp_path, kind, **changes)
    with pytest.raises(TowerError, match=told):
        read_processor(tmp_path / "preprocessor_config.json", (12, 12))


def test_an_image_processor_within_a_processors_file_is_read(tmp_path: Path) -> None:
    made.write_processor(tmp_path, "Siglip")
    told = json.loads((tmp_path / "preprocessor_config.json").read_text())
    made.write_json(tmp_path / "processor_config.json", {"image_processor": told})
    specs = {
        read_processor(tmp_path / f"{name}_config.json", (12, 12)).model_dump_json()
        for name in ("preprocessor", "processor")
    }
    assert len(specs) == 1


def test_a_tokenizer_that_leaves_out_the_lower_casing_needs_an_import(tmp_path: Path) -> None:
    made.make_siglip(tmp_path, lowers=False)
    with pytest.raises(TowerError, match=r"leaves out the lower-casing .* hivlp import"):
        load_tower(tmp_path, "text")
    read_tokenizer(tmp_path, PIECES).save(str(tmp_path / "tokenizer.json"))
    load_tower(tmp_path, "text")
    own = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert own.encode("A RED").ids == own.encode("a red").ids == [3, 4, 1]


@pytest.mark.parametrize("kind", ["GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer"])
def test_siglip_2_is_lower_cased_unless_its_folder_says_otherwise(
    tmp_path: Path, kind: str
) -> None:
    made.make_siglip(tmp_path, lowers=False)
    config = tmp_path / "tokenizer_config.json"
    made.change_json(config, tokenizer_class=kind, do_lower_case=...)
    assert read_tokenizer(tmp_path, PIECES).encode("A RED").ids == [3, 4, 1]
    with pytest.raises(TowerError, match=r"leaves out the lower-casing .* hivlp import"):
        load_tower(tmp_path, "text")
    # Gemma's tokenizer of another family says what it does
    assert read_tokenizer(tmp_path, CLIP_PAIRS).encode("A RED").ids == [2, 2, 1]
    made.change_json(config, do_lower_case=False)
    assert read_tokenizer(tmp_path, PIECES).encode("A RED").ids == [2, 2, 1]
    load_tower(tmp_path, "text")


def test_siglips_own_tokenizer_takes_punctuation_out(tmp_path: Path) -> None:
    made.make_siglip(tmp_path, lowers=False)
    made.change_json(tmp_path / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    own = read_tokenizer(tmp_path, PIECES)
    assert own.encode(" A (red)  [square]! ").ids == [3, 4, 7, 1]
    made.change_json(tmp_path / "tokenizer_config.json", do_lower_case=False)
    assert read_tokenizer(tmp_path, PIECES).encode("RED, red").ids == [2, 4, 1]


def test_padding_on_the_left_is_refused_where_padding_is_attended_to(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("siglip")
    made.change_json(folder / "tokenizer_config.json", padding_side="left")
    with pytest.raises(TowerError, match="'padding_side' is 'left'"):
        load_tower(folder, "text")


def test_the_padding_token_is_the_tokenizers_own(copy: Callable[[str], Path]) -> None:
    folder = copy("siglip")
    own = Library.from_file(str(folder / "tokenizer.json"))
    made.change_json(folder / "tokenizer_config.json", pad_token={"content": "</s>"})
    assert pad_id(folder, own, 7) == 1
    made.change_json(folder / "tokenizer_config.json", pad_token=...)
    assert pad_id(folder, own, 7) == 7
    made.write_json(folder / "special_tokens_map.json", {"pad_token": "<none>"})
    with pytest.raises(TowerError, match="'pad_token' is '<none>'"):
        pad_id(folder, own, 7)


def test_a_folder_without_tokenizer_json_says_what_makes_it(copy: Callable[[str], Path]) -> None:
    folder = copy("clip")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TowerError, match=r"hivlp import .* makes it of the vocabulary"):
        load_tower(folder, "text")
    (folder / "merges.txt").unlink()
    with pytest.raises(TowerError, match=r"no such file, nor vocab\.json and merges\.txt"):
        load_tower(folder, "text")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TowerError, match=r"tokenizer\.json: not a tokenizer"):
        load_tower(folder, "text")


def test_a_tokenizer_that_knows_more_than_the_tower_is_refused(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("siglip")
    own = Library.from_file(str(folder / "tokenizer.json"))
    own.add_tokens(["unheard"])
    own.save(str(folder / "tokenizer.json"))
    with pytest.raises(TowerError, match="knows id 10, but the tower's vocabulary ends at 9"):
        load_tower(folder, "text")


def test_berts_vocabulary_makes_its_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "##der", "R"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    assert read_tokenizer(tmp_path, WORD_PIECES).encode("Redder").ids == [2, 5, 6, 3]
    made.write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": False})
    assert read_tokenizer(tmp_path, WORD_PIECES).encode("R red").ids == [2, 7, 5, 3]
    (tmp_path / "vocab.txt").write_text("red\n")
    with pytest.raises(TowerError, match=r"vocab\.txt: no vocabulary: the special token"):
        read_tokenizer(tmp_path, WORD_PIECES)
    with pytest.raises(TowerError, match=r"nor vocab\.json and merges\.txt"):
        read_tokenizer(tmp_path, CLIP_PAIRS)


def test_sentence_transformers_list_of_modules_says_where_the_pooling_is(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "bert")
    (folder / "1_Pooling").rename(folder / "pooled")
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "pooled"},
    ]
    made.write_json(folder / "modules.json", modules)
    assert load_tower(folder, "text").pooling == "mean"
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    made.write_json(folder / "modules.json", [*modules, dense])
    with pytest.raises(TowerError, match=r"'2\.type' is a Dense"):
        load_tower(folder, "text")


def test_attention_pooling_without_keys_and_values_is_torchs_own_attention() -> None:
    torch.manual_seed(0)
    probe = Probe(BlockShape(12, 3, 16)).eval()
    hidden = torch.randn(2, 7, 12)
    with torch.no_grad():
        for value in probe.parameters():
            value.normal_(std=0.5)
        slow = probe.attention(probe.query.expand(2, 1, -1), hidden)[:, 0]
        slow = slow + probe.feed(probe.norm(slow))
        torch.testing.assert_close(probe(hidden), slow, atol=1e-5, rtol=1e-5)


def test_an_early_exit_reads_the_last_few_layers_and_no_more(tmp_path: Path) -> None:
    made.make_vit(tmp_path, num_hidden_layers=READ + 3)
    tower = load_tower(tmp_path, "image")
    assert [tower.width(i) // made.WIDTH for i in (1, READ, READ + 2)] == [1, READ, READ]
    inputs = {"pixel_values": torch.randn(1, 3, made.SIDE, made.SIDE)}
    with torch.no_grad():
        before, now, last = tower.features(inputs, (READ + 1, READ + 2, READ + 3))
    assert torch.equal(before[:, made.WIDTH :], now[:, : -made.WIDTH])
    assert last.shape == (1, made.WIDTH)

"""`hivlp import`: folders and names taken in, converted, compared, and put in their place whole."""

from __future__ import annotations

import builtins
import fnmatch
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from hivlp.models import cli_import
from hivlp.models.errors import HivlpError, MissingExtra, TrainingError
from hivlp.models.network.families import load_tower
from hivlp.models.network.tower import TowerError
from hivlp.models.training import reference
from hivlp.models.training.hub import HubError, HuggingFaceHub, Named, fetch
from hivlp.models.training.importing import MARK, describe, next_command
from hivlp.models.training.run_import import run_import
from tests.unit.models_training import hf_checkpoints as made
from tests.unit.models_training.checkpoints import make_bert, write_modules

pytest.importorskip("transformers", reason="makes the checkpoints; extra [dev]")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    made.make_clip(folder / "clip")
    made.make_clip(folder / "legacy", legacy=True)
    made.make_siglip(folder / "siglip", lowers=False)
    made.make_vit(folder / "vit")
    made.make_vit(folder / "classifier", "ViTForImageClassification")
    made.make_vit(folder / "deit", "DeiTForImageClassificationWithTeacher")
    made.make_roberta(folder / "roberta", tokenizer=False)
    made.make_open_clip(folder / "open", folder / "clip")
    made.make_clip_vision(folder / "vision")
    make_bert(folder / "bert")
    return folder


@pytest.fixture
def copy(tmp_path: Path, originals: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["clip", "legacy", "siglip", "vit", "classifier", "deit", "roberta", "bert", "vision"],
)
def test_a_folder_is_taken_in_and_is_what_transformers_makes_of_it(
    tmp_path: Path, originals: Path, name: str
) -> None:
    imported = run_import(str(originals / name), None, tmp_path)
    assert imported.path == tmp_path / "checkpoints" / name
    assert imported.difference is not None
    assert imported.difference < 1e-5
    told = json.loads((imported.path / MARK).read_text())
    assert told["source"] == str(originals / name)
    assert WEIGHTS in told["files"]
    for modality in imported.towers:
        assert load_tower(imported.path, modality).depth == made.LAYERS
    assert not list(imported.path.glob("*.bin"))
    assert list((tmp_path / "checkpoints").iterdir()) == [imported.path]


def test_norms_under_tensorflows_names_are_what_transformers_makes_of_them(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    folder = copy("bert")
    weights = {f"bert.{name}": value for name, value in load_file(folder / WEIGHTS).items()}
    weights["cls.predictions.transform.LayerNorm.weight"] = torch.ones(16)
    old = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    for new, name in old:
        weights = {known.replace(new, name): value for known, value in weights.items()}
    assert sum(name.endswith(("gamma", "beta")) for name in weights) == 2 * (1 + 2 * 3) + 1
    save_file(weights, folder / WEIGHTS)
    imported = run_import(str(folder), None, tmp_path / "home")
    assert imported.difference is not None
    assert imported.difference < 1e-5


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_configuration_that_leaves_out_fields_is_what_transformers_makes_of_it(
    tmp_path: Path, copy: Callable[[str], Path], name: str
) -> None:
    folder = copy(name)
    fields = ("layer_norm_eps", "hidden_act", "pad_token_id", "position_embedding_type")
    made.change_json(folder / "config.json", **dict.fromkeys(fields, ...))
    imported = run_import(str(folder), None, tmp_path / "home")
    assert imported.difference is not None
    assert imported.difference < 1e-5


@pytest.mark.parametrize(
    "named", [["pipeline"], [5], ["PreTrainedModel"], ["GPT2Model"], ["NoSuchModel"], [], None]
)
def test_an_architecture_that_is_no_model_of_the_configuration_is_passed_over(
    tmp_path: Path, copy: Callable[[str], Path], named: object
) -> None:
    folder = copy("bert")
    made.change_json(folder / "config.json", architectures=named)
    imported = run_import(str(folder), None, tmp_path / "home")
    assert imported.difference is not None
    assert imported.difference < 1e-5


@pytest.mark.parametrize("place", ["pooled", "deep/1_Pooling"])
def test_the_pooling_that_the_list_of_modules_names_is_kept(
    tmp_path: Path, copy: Callable[[str], Path], place: str
) -> None:
    folder = copy("bert")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / "1_Pooling").rename(folder / place)
    write_modules(folder, "Transformer", "Pooling", "Normalize", pooled=place)
    imported = run_import(str(folder), None, tmp_path / "home")
    assert imported.towers["text"].pooling == "mean"
    assert load_tower(imported.path, "text").pooling == "mean"
    shutil.rmtree(folder / place)
    with pytest.raises(TowerError, match=r"'1\.path' is of a Pooling, but there is no") as told:
        run_import(str(folder), None, tmp_path / "home")
    assert told.value.path == folder / "modules.json"


def test_a_siglip_2_that_names_gemmas_tokenizer_is_imported_with_lower_casing(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    folder = copy("siglip")
    made.change_json(folder / "tokenizer_config.json", do_lower_case=...)
    imported = run_import(str(folder), None, tmp_path / "home")
    kept = Tokenizer.from_file(str(imported.path / "tokenizer.json"))
    assert kept.encode("A RED").ids == kept.encode("a red").ids == [3, 4, 1]


def test_what_is_imported_is_described_with_the_next_command(
    tmp_path: Path, originals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(originals / "siglip"), "--home", str(tmp_path), "--name", "mine"]
    assert cli_import.import_model(given) == 0
    shown = capsys.readouterr().out
    assert "text: siglip, 3 layers, ends 16 wide, read at last, exits 1,2,3" in shown
    assert "at most 12 tokens, always padded to that" in shown
    assert "12 x 12, stretch, bicubic, mean 0.48, 0.45, 0.4" in shown
    assert "the same as transformers: at most " in shown
    assert f"next: hivlp fit-exits --towers {tmp_path}/checkpoints/mine --images" in shown
    one = run_import(str(originals / "vit"), None, tmp_path)
    assert "--image-tower" in next_command(one)
    assert "--pairs" in next_command(one)


def test_pickled_and_fused_weights_become_one_safetensors(tmp_path: Path, originals: Path) -> None:
    imported = run_import(str(originals / "open"), None, tmp_path)
    assert imported.difference is None
    assert "OpenCLIP" in describe(imported)[-1]
    assert sorted(path.suffix for path in imported.path.glob("open_clip_*")) == [
        ".json",
        ".safetensors",
    ]
    kept = load_file(imported.path / "open_clip_model.safetensors")
    before = torch.load(originals / "open/open_clip_pytorch_model.bin", weights_only=True)
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[name], before[name]) for name in kept)


def put_timms_files(folder: Path) -> None:
    """What timm keeps beside OpenCLIP's files: a configuration and weights of another form."""
    told = {"architecture": "vit_base_patch16_clip_224", "num_classes": 512}
    made.write_json(folder / "config.json", told)
    save_file({"cls_token": torch.zeros(1, 1, 16)}, folder / WEIGHTS)


def test_open_clips_weights_are_read_where_timms_own_lie_beside_them(
    tmp_path: Path, copy: Callable[[str], Path], originals: Path
) -> None:
    folder = copy("open")
    put_timms_files(folder)
    imported = run_import(str(folder), None, tmp_path / "home")
    assert {tower.family for tower in imported.towers.values()} == {"openclip"}
    assert not (imported.path / WEIGHTS).exists()
    alone = run_import(str(originals / "open"), "alone", tmp_path / "home")
    assert imported.towers["text"].joint_space == alone.towers["text"].joint_space


def test_a_checkpoint_in_the_way_is_replaced_and_anything_else_is_not(
    tmp_path: Path, originals: Path
) -> None:
    first = run_import(str(originals / "vit"), "model", tmp_path)
    again = run_import(str(originals / "clip"), "model", tmp_path)
    assert first.path == again.path
    assert set(again.towers) == {"text", "image"}
    (tmp_path / "checkpoints/notes").mkdir()
    (tmp_path / "checkpoints/notes/a.txt").write_text("keep me")
    with pytest.raises(HivlpError, match="folder of something else"):
        run_import(str(originals / "clip"), "notes", tmp_path)


def test_a_broken_checkpoint_leaves_nothing_and_is_named_by_its_own_path(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    folder = copy("clip")
    weights = load_file(folder / WEIGHTS)
    weights.pop("text_projection.weight")
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(TowerError, match="missing weights: text_projection") as told:
        run_import(str(folder), None, tmp_path / "home")
    assert told.value.path == folder / WEIGHTS
    assert not list((tmp_path / "home/checkpoints").iterdir())


def test_a_tower_that_differs_from_transformers_is_not_taken_in(
    tmp_path: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = reference._open

    def changed(*given: Any) -> Any:
        model = opened(*given)
        with torch.no_grad():
            model.text_projection.weight += 0.01
        return model

    monkeypatch.setattr(reference, "_open", changed)
    with pytest.raises(reference.ReferenceDiffers, match="text tower, output: differs"):
        run_import(str(originals / "clip"), None, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def imports(name: str, *rest: Any, **named: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", imports)


def test_without_transformers_it_says_that_nothing_was_compared(
    tmp_path: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "transformers")
    imported = run_import(str(originals / "vit"), None, tmp_path)
    assert imported.difference is None
    assert "not compared with transformers: transformers is not installed" in "\n".join(
        describe(imported)
    )


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        ("no/such/folder", None, "no such folder, and no name of the form owner/name"),
        ("../elsewhere", None, "no such folder, and no name"),
        ("{originals}/clip/config.json", None, "is a file"),
        ("{originals}/clip", "../up", "--name '../up'"),
        ("{originals}", None, "no checkpoint of a known family. Known are bert: "),
    ],
)
def test_a_source_that_is_none_is_refused(
    tmp_path: Path, originals: Path, source: str, name: str | None, told: str
) -> None:
    with pytest.raises(TrainingError, match=told):
        run_import(source.format(originals=originals), name, tmp_path)


class FolderHub:
    """A hub whose checkpoints are folders; it hands out what matches, and notes what was asked."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache = root, cache
        self.asked: list[tuple[str, str | None]] = []

    def files(self, name: str, revision: str | None) -> Sequence[str]:
        self.asked.append((name, revision))
        folder = self.root / name
        if not folder.is_dir():
            raise RuntimeError(f"404: {name}\nmore of it")
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        for file in self.files(name, revision):
            wanted = any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
            if wanted and (self.root / name / file).is_file():
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.root / name / file, self.cache / file)
        return self.cache


def test_a_name_on_the_hub_is_fetched_without_what_is_not_read(
    tmp_path: Path, originals: Path
) -> None:
    shutil.copytree(originals / "bert", tmp_path / "hub/someone/bert")
    for unread in ("pytorch_model.bin", "tf_model.h5"):
        (tmp_path / "hub/someone/bert" / unread).write_bytes(b"never fetched")
    hub = FolderHub(tmp_path / "hub", tmp_path / "cache")
    imported = run_import("someone/bert@v1", None, tmp_path, hub)
    assert imported.path.name == "bert"
    assert imported.towers["text"].pooling == "mean"
    assert set(hub.asked) == {("someone/bert", "v1")}
    fetched = {path.name for path in (tmp_path / "cache").rglob("*")}
    assert WEIGHTS in fetched
    assert not fetched & {"pytorch_model.bin", "tf_model.h5"}
    told = json.loads((imported.path / MARK).read_text())
    assert (told["source"], told["revision"]) == ("someone/bert", "v1")


def test_open_clips_weights_are_fetched_where_timms_own_lie_beside_them(
    tmp_path: Path, originals: Path
) -> None:
    folder = shutil.copytree(originals / "open", tmp_path / "hub/timm/clip")
    put_timms_files(folder)
    hub = FolderHub(tmp_path / "hub", tmp_path / "cache")
    imported = run_import("timm/clip", None, tmp_path, hub)
    assert {tower.family for tower in imported.towers.values()} == {"openclip"}
    assert not (tmp_path / "cache" / WEIGHTS).exists()


def test_a_clips_own_weights_are_fetched_before_open_clips(tmp_path: Path, originals: Path) -> None:
    folder = shutil.copytree(originals / "clip", tmp_path / "hub/clip")
    for path in (originals / "open").glob("open_clip_*"):
        shutil.copyfile(path, folder / path.name)
    hub = FolderHub(tmp_path / "hub", tmp_path / "cache")
    imported = run_import("clip", None, tmp_path, hub)
    assert {tower.family for tower in imported.towers.values()} == {"clip"}
    assert not (tmp_path / "cache/open_clip_pytorch_model.bin").exists()


def test_shards_are_fetched_by_their_index(tmp_path: Path, originals: Path) -> None:
    folder = tmp_path / "hub/vit"
    shutil.copytree(originals / "vit", folder)
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "part-1.safetensors")
    listed = dict.fromkeys(weights, "part-1.safetensors")
    made.write_json(folder / f"{WEIGHTS}.index.json", {"weight_map": listed})
    imported = run_import("vit", None, tmp_path, FolderHub(tmp_path / "hub", tmp_path / "cache"))
    assert (imported.path / WEIGHTS).is_file()
    assert not (imported.path / f"{WEIGHTS}.index.json").exists()


def test_a_name_that_is_not_there_is_an_error_of_one_line(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path, tmp_path / "cache")
    with pytest.raises(HubError, match=r"^someone/nothing: no such .* not fetched: 404: someone/n"):
        fetch(Named("someone/nothing"), hub)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"^empty: holds no weights: one of model\.safetensors"):
        fetch(Named("empty"), hub)


def test_without_huggingface_hub_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "huggingface_hub")
    with pytest.raises(MissingExtra, match=r"hivlp\[hub\]"):
        run_import("someone/bert", None, tmp_path)


def test_huggingface_hub_is_called_as_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra [hub]")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"^someone/bert: no such folder here, and not fetched"):
        fetch(Named("someone/bert"), HuggingFaceHub())

"""Early layers trained with their heads: what moves, what stays, and a run that was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hivlp.models import cli
from hivlp.models.artifact import Artifact
from hivlp.models.errors import HivlpError
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.families import load_tower
from hivlp.models.network.tower import Tower
from hivlp.models.runtime.loading import load_encoders
from hivlp.models.training import features
from hivlp.models.training.checkpoint import dual_encoder, load_fit
from hivlp.models.training.loop.checkpoints import Checkpoints
from tests.integration.clip_cascade import TEXTS, features_in_torch, fit, make_root
from tests.unit.models_training.checkpoints import COLOURS, make_bert, make_pairs
from tests.unit.models_training.test_network_efficientnet import port_weights

pytest.importorskip("transformers", reason="makes the checkpoint; extra [dev]")
UNFROZEN = (
    *("--unfreeze-text", "1", "--unfreeze-image", "2"),
    *("--set", "unfreeze.text_epochs=30", "--set", "unfreeze.image_epochs=15"),
    *("--set", "unfreeze.learning_rate=0.003", "--set", "unfreeze.head_rate=0.003"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with features_in_torch():
        yield make_root(tmp_path_factory.mktemp("unfrozen"))


@pytest.fixture(scope="module")
def clip(root: Path) -> Path:
    assert fit(root, *UNFROZEN, out="both") == 0
    return root / "both"


def _layers(tower: Tower) -> list[dict[str, torch.Tensor]]:
    return [dict(layer.state_dict()) for layer in tower.layer_modules]


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("modality", "count"), [("text", 1), ("image", 2)])
def test_only_the_first_layers_and_early_heads_move(
    root: Path, clip: Path, modality: Any, count: int
) -> None:
    exits: TowerExits = dual_encoder(load_fit(clip)).tower(modality)
    before = load_tower(root / "clip", modality)
    same = [_same(*both) for both in zip(_layers(before), _layers(exits.tower), strict=True)]
    assert same == [False] * count + [True] * (3 - count)
    rest = {n for n in before.state_dict() if not n.startswith("blocks.")}
    for name in rest:
        assert torch.equal(before.state_dict()[name], exits.tower.state_dict()[name]), name
    assert exits.tower.identity()["retrained"]
    assert exits.tower.identity() != before.identity()
    assert not any(weight.requires_grad for weight in exits.parameters())


def test_early_levels_come_nearer_and_the_finest_stays(clip: Path) -> None:
    measured = load_fit(clip).measured
    for way in ("text_to_image", "image_to_text"):
        assert measured[f"frozen_overlap@10_{way}"] == 1.0
        assert measured[f"overlap@10_{way}"] >= 0.9
    early = "overlap@10_{}_level1"
    gained = [
        measured[early.format(way)] - measured[f"frozen_{early.format(way)}"]
        for way in ("text_to_image", "image_to_text")
    ]
    assert sum(gained) > 0.02


def test_the_artifact_answers_as_the_trained_tower_does(clip: Path, tmp_path: Path) -> None:
    assert cli.export([str(clip), "--out", str(tmp_path / "artifact")]) == 0
    artifact = Artifact.open(tmp_path / "artifact")
    assert artifact.manifest.measured["frozen_overlap@10_text_to_image"] == 1.0
    encoder = load_encoders(artifact.path).text
    prepared = encoder.prepare(TEXTS[:5])
    model = dual_encoder(load_fit(clip))
    read = features.input_reader(model.text.tower)(TEXTS[:5])
    with torch.no_grad():
        wanted = model.text({name: torch.from_numpy(value) for name, value in read.items()})
    found = [output.vectors for output in encoder.encode(prepared)]
    assert len(found) == len(wanted) == 2
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two.numpy(), atol=1e-4)
    assert np.abs(found[0][0] - found[0][4]).max() > 1e-3, "two texts differ at exit 1"


def test_a_killed_run_ends_with_the_weights_of_one_that_never_stopped(
    root: Path, clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ("--set", "unfreeze.checkpoint_seconds=0")
    save, saved = Checkpoints.save, []

    def stop_at_the_seventh(self: Checkpoints, *given: Any) -> Path:
        saved.append(given)
        path = save(self, *given)
        if len(saved) == 7:
            raise KeyboardInterrupt
        return path

    monkeypatch.setattr(Checkpoints, "save", stop_at_the_seventh)
    with pytest.raises(KeyboardInterrupt):
        fit(root, *UNFROZEN, *every, out="killed")
    assert not (root / "killed/fit.json").exists()
    newest = next((root / "killed/phases").rglob("step-00000007"))
    (newest / "model.safetensors").write_bytes(b"spoilt")
    capsys.readouterr()
    assert fit(root, *UNFROZEN, *every, out="killed") == 0
    told = capsys.readouterr().err
    assert "passed over a checkpoint" in told
    assert "unfrozen text layers: going on after step 6" in told
    assert (root / "killed/heads.safetensors").read_bytes() == (
        clip / "heads.safetensors"
    ).read_bytes()
    assert not (root / "killed/phases").exists()


def test_a_siglip_is_unfrozen_alike(root: Path) -> None:
    more = ("--unfreeze-text", "1", "--set", "unfreeze.text_epochs=1")
    assert fit(root, *more, towers="siglip", out="siglip-fit", dims="5,16") == 0
    found = load_fit(root / "siglip-fit")
    assert found.text.layers == 1
    assert found.image.layers == 0
    assert set(found.layers) == {"text"}
    assert found.measured["overlap@10_text_to_image"] >= 0.9


@pytest.mark.usefixtures("root")
def test_towers_that_share_no_space_are_unfrozen(tmp_path: Path) -> None:
    torch.save(port_weights(), tmp_path / "lite0.pth")
    make_bert(tmp_path / "bert")
    make_pairs(tmp_path / "pairs", of_each=1)
    texts = [f"{a} {b}" for a in ("a", "picture", "of") for b in COLOURS]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    place = {"--pairs": "pairs", "--texts": "texts.txt", "--text-tower": "bert"}
    place |= {"--image-tower": "lite0.pth", "--cache": "cache", "--out": "fit"}
    given = [part for flag, name in place.items() for part in (flag, str(tmp_path / name))]
    quick = ["finest.epochs=2", "distil.text_epochs=2", "distil.image_epochs=2", "distil.hidden=8"]
    quick += ["unfreeze.image_epochs=1", "unfreeze.image_batch=3", "unfreeze.text_epochs=2"]
    given += [part for each in quick for part in ("--set", each)]
    given += ["--dims", "4,8", "--threads", "1", "--unfreeze-text", "2", "--unfreeze-image", "7"]
    assert cli.fit_exits(given) == 0
    told = json.loads((tmp_path / "fit/fit.json").read_text())
    assert told["settings"]["space"] == "pairs"
    assert told["measured"]["frozen_overlap@10_text_to_image"] == 1.0
    model = dual_encoder(load_fit(tmp_path / "fit"))
    before = load_tower(tmp_path / "lite0.pth", "image")
    after = model.image.tower
    same = [_same(*both) for both in zip(_layers(before), _layers(after), strict=True)]
    assert same == [False] * 7 + [True]
    measured = [name for name in before.state_dict() if "running" in name]
    assert measured
    for name in measured:  # statistics of the pretraining, not of a batch
        assert torch.equal(before.state_dict()[name], after.state_dict()[name])


def test_a_fit_whose_trained_layers_are_not_the_towers_is_refused(
    root: Path, clip: Path, tmp_path: Path
) -> None:
    told = json.loads((clip / "fit.json").read_text())
    told["towers"]["text"]["layers"] = 2
    (tmp_path / "fit.json").write_text(json.dumps(told))
    (tmp_path / "heads.safetensors").write_bytes((clip / "heads.safetensors").read_bytes())
    with pytest.raises(HivlpError, match=r"missing weights: 1\."):
        dual_encoder(load_fit(tmp_path))
    with pytest.raises(HivlpError, match="not the text tower"):
        dual_encoder(load_fit(clip), text=root / "siglip")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--unfreeze-text", "4"), r"--unfreeze-text: 4 layers.*0\.\.3, .*text tower \(clip\)"),
        (("--unfreeze-image", "9"), r"--unfreeze-image: 9 layers to unfreeze: must be within"),
        (("--set", "unfreeze.depth=1"), "--set unfreeze: no field 'depth'"),
        (("--set", "unfreeze.text_batch=0"), r"unfreeze.text_batch: 0 .* within 1\.\.1000000000"),
        (("--set", "thaw.layers=1"), "finest.FIELD=VALUE or distil.* or unfreeze.FIELD=VALUE"),
        (
            ("--pairs", "{root}/pictures", "--space", "pairs", "--gallery", "per_exit"),
            "--unfreeze-.*per_exit has no finest level",
        ),
        (("--space", "pairs", "--folds", "2"), "--unfreeze-.*--folds cross-validates frozen"),
    ],
)
def test_what_can_not_be_unfrozen_is_refused(
    root: Path, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    given = [each.format(root=root) for each in more]
    towers = ["--towers", str(root / "clip"), "--texts", str(root / "texts.txt")]
    if "pairs" in given:
        given += ["--pairs", str(root / "pictures")]
    else:
        towers += ["--images", str(root / "pictures")]
    if not any(each.startswith("--unfreeze") for each in given):
        given += ["--unfreeze-text", "1"]
    with pytest.raises(HivlpError, match=told):
        cli.fit_exits([*towers, "--out", str(tmp_path / "fit"), "--dims", "3,8", *given])
    assert not list(tmp_path.iterdir())

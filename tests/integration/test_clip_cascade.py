"""A CLIP becomes a cascade without labels, from a folder to an artifact that ranks as it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hivlp.index.cli import build, search
from hivlp.models import cli
from hivlp.models.artifact import Artifact
from hivlp.models.errors import HivlpError
from hivlp.models.levels import FloatArray
from hivlp.models.runtime.loading import Encoders, load_encoders
from hivlp.models.training.run_import import run_import
from tests.integration.clip_cascade import TEXTS, features_in_torch, fit, make_pictures, make_root
from tests.unit.models_training import hf_checkpoints as made
from tests.unit.models_training.checkpoints import COLOURS, make_pairs

pytest.importorskip("transformers", reason="makes the checkpoint; extra [dev]")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with features_in_torch():
        yield make_root(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def artifact(root: Path) -> Artifact:
    imported = run_import(str(root / "clip"), None, root / "home")
    assert fit(root, "--towers", str(imported.path)) == 0
    assert cli.export([str(root / "fit"), "--out", str(root / "artifact")]) == 0
    return Artifact.open(root / "artifact")


@pytest.fixture(scope="module")
def siglip(root: Path) -> Artifact:
    imported = run_import(str(root / "siglip"), None, root / "home")
    given = {"out": "siglip-fit", "dims": f"5,{made.WIDTH}"}
    assert fit(root, "--towers", str(imported.path), **given) == 0
    assert cli.export([str(root / "siglip-fit"), "--out", str(root / "siglip-artifact")]) == 0
    return Artifact.open(root / "siglip-artifact")


def _finest(encoders: Encoders, modality: str, items: list[Any]) -> FloatArray:
    encoder: Any = encoders.text if modality == "text" else encoders.image
    found: FloatArray = encoder.encode_gallery(encoder.prepare(items))[-1].vectors
    return found


def _theirs(root: Path, texts: list[str], pictures: list[Any]) -> tuple[Any, Any]:
    """What transformers' own model, tokenizer and image processor make of them, of length 1."""
    import transformers

    model = transformers.CLIPModel.from_pretrained(root / "clip").eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(root / "clip")
    processor = transformers.CLIPImageProcessorPil.from_pretrained(root / "clip")
    words = tokenizer(texts, padding=True, truncation=True, max_length=made.CLIP_TOKENS)
    return _theirs_of(model, processor, {n: torch.tensor(v) for n, v in words.items()}, pictures)


def _theirs_of_siglip(root: Path, texts: list[str], pictures: list[Any]) -> tuple[Any, Any]:
    """The same of a SigLIP, whose texts are filled up to the full length."""
    import transformers

    model = transformers.SiglipModel.from_pretrained(root / "siglip").eval()
    processor = transformers.SiglipImageProcessorPil.from_pretrained(root / "siglip")
    ids = torch.zeros(len(texts), made.SIGLIP_TOKENS, dtype=torch.int64)
    for row, text in enumerate(texts):
        known = [made.SIGLIP_WORDS.index(word) for word in text.split()]
        ids[row, : len(known) + 1] = torch.tensor([*known, made.SIGLIP_WORDS.index("</s>")])
    return _theirs_of(model, processor, {"input_ids": ids}, pictures)


def _theirs_of(
    model: Any, processor: Any, words: dict[str, torch.Tensor], pictures: list[Any]
) -> tuple[Any, Any]:
    pixels = np.array(processor([Image.fromarray(p) for p in pictures])["pixel_values"])
    with torch.no_grad():
        said = model.get_text_features(**words)
        seen = model.get_image_features(torch.from_numpy(pixels))
    vectors = [each.pooler_output.numpy() for each in (said, seen)]
    one, two = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors)
    return one, two


def _pictures(root: Path) -> list[Any]:
    return [np.array(Image.open(file)) for file in sorted((root / "pictures").iterdir())]


def _check_ranks(path: Path, root: Path, texts: list[str], theirs: tuple[Any, Any]) -> None:
    """Same cosines to 1e-4, same ten nearest, and two texts that differ at exit 1."""
    encoders = load_encoders(path)
    ours = _finest(encoders, "text", texts) @ _finest(encoders, "image", _pictures(root)).T
    wanted = theirs[0] @ theirs[1].T
    np.testing.assert_allclose(ours, wanted, atol=1e-4)
    best = np.argsort(-wanted, axis=1)[:, :10]
    found = np.argsort(-ours, axis=1)[:, :10]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(best, found, strict=True)]) > 0.97
    prepared = encoders.text.prepare(texts[:2])
    early = next(iter(encoders.text.encode(prepared))).vectors
    assert np.abs(early[0] - early[1]).max() > 1e-3


def test_the_finest_level_ranks_as_transformers_own_clip_does(
    root: Path, artifact: Artifact
) -> None:
    texts = TEXTS[:12]
    _check_ranks(artifact.path, root, texts, _theirs(root, texts, _pictures(root)))


def test_the_finest_level_ranks_as_transformers_own_siglip_does(
    root: Path, siglip: Artifact
) -> None:
    texts = ["red square", "a picture of blue", "green", "a a a", "picture of a red green square"]
    theirs = _theirs_of_siglip(root, texts, _pictures(root))
    _check_ranks(siglip.path, root, texts, theirs)
    assert siglip.manifest.measured["overlap@10_text_to_image"] == 1.0
    text = siglip.manifest.towers[0].text
    assert text is not None
    assert (text.pad_to_max, text.max_tokens) == (True, made.SIGLIP_TOKENS)


def test_what_was_built_is_searched_and_found_as_the_clip_finds_it(
    root: Path,
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(root / "home"))
    assert build([str(root / "pictures"), "--artifact", str(artifact.path)]) == 0
    capsys.readouterr()
    names = [file.name for file in sorted((root / "pictures").iterdir())]
    for plan in ("exact", "auto"):
        said, seen = _theirs(root, TEXTS[:1], _pictures(root))
        best = [names[row] for row in np.argsort(-(said @ seen.T)[0])[:5]]
        assert search([TEXTS[0], "--k", "5", "--plan", plan]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[2] for line in lines[1:6]] == best, plan


def test_the_artifact_says_how_near_it_is_to_the_checkpoint(artifact: Artifact) -> None:
    measured = artifact.manifest.measured
    assert measured["overlap@10_text_to_image"] == 1.0
    assert measured["overlap@10_image_to_text"] == 1.0
    assert 0 < measured["overlap@10_text_to_image_level1"] <= 1
    assert measured["queries_text_to_image"] == len(TEXTS) // 10
    assert measured["gallery_text_to_image"] == 60
    assert artifact.manifest.gallery == "nested"
    for tower in artifact.manifest.towers:
        assert tower.family == "clip"
        assert [stage.dim for stage in tower.stages] == [3, made.PROJECTION]


def test_the_finest_level_is_turned_so_that_its_prefixes_tell_the_most(
    root: Path, artifact: Artifact
) -> None:
    encoders = load_encoders(artifact.path)
    pictures = _pictures(root)
    vectors = _finest(encoders, "image", pictures)
    kept = [float((vectors[:, :dim] ** 2).sum(1).mean()) for dim in (3, 8)]
    _, plain = _theirs(root, ["a"], pictures)
    assert kept[0] > float((plain[:, :3] ** 2).sum(1).mean())
    assert kept[1] == pytest.approx(1, abs=1e-4)


def test_a_siglip_is_fitted_from_its_folder_alone_and_a_second_time_alike(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(root, towers="siglip", out="sfit", dims=f"5,{made.WIDTH}") == 0
    assert "has 1.0000 of the checkpoint's own ten nearest" in capsys.readouterr().err
    assert fit(root, towers="siglip", out="sfit2", dims=f"5,{made.WIDTH}") == 0
    assert "all 60 kept from before" in capsys.readouterr().err
    for name in ("fit.json", "heads.safetensors"):
        assert (root / "sfit" / name).read_bytes() == (root / "sfit2" / name).read_bytes()


def test_pairs_join_what_teaches(root: Path, tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs")
    assert fit(root, "--pairs", str(pairs), "--out", str(tmp_path / "fit")) == 0
    told = json.loads((tmp_path / "fit/fit.json").read_text())
    assert told["settings"]["space"] == "checkpoint"
    assert told["measured"]["gallery_text_to_image"] == 60 + 2 * len(COLOURS)
    assert told["measured"]["overlap@10_text_to_image"] == 1.0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--dims", "2,7"), "the checkpoint's own space has 8 numbers.*--dims 2,8"),
        (("--dims", "4,12"), "--dims 4,8, or --space pairs"),
        (("--gallery", "per_exit"), "--gallery per_exit: --space checkpoint"),
        (("--folds", "2"), "--folds: nothing is fitted on pairs"),
        (("--set", "finest.epochs=3"), "--set finest.epochs=3: the finest level"),
        (("--space", "pairs"), "--pairs is needed"),
        (("--image-tower", "{root}/siglip"), "--pairs is needed: these towers share no space"),
        (("--space", "checkpoint", "--text-tower", "{root}/bert"), "end in no space of their own"),
        (("--text-exits", "1,2,3,3"), "the numbers must grow"),
        (("--text-exits", "1,2,3"), "--text-exits: 3 exits for 2 dims"),
        (("--images", "{root}/nowhere"), "nowhere: no such folder"),
        (("--images", "{root}/clip"), "clip: no picture"),
    ],
)
def test_a_contradiction_is_refused_by_its_argument(
    root: Path, tmp_path: Path, more: tuple[str, ...], told: str, capsys: Any
) -> None:
    given = [each.format(root=root) for each in more]
    if "numbers must grow" in told:
        assert fit(root, *given, "--out", str(tmp_path)) == cli.USAGE
        assert told in capsys.readouterr().err
        return
    with pytest.raises(HivlpError, match=told):
        fit(root, *given, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_too_few_pictures_or_texts_are_refused(root: Path, tmp_path: Path) -> None:
    few = make_pictures(tmp_path / "few", 5)
    towers = ("--towers", str(root / "clip"), "--out", str(tmp_path / "fit"))
    with pytest.raises(HivlpError, match="--images: 5 found with --pairs together"):
        cli.fit_exits([*towers, "--images", str(few), "--texts", str(root / "texts.txt")])
    with pytest.raises(HivlpError, match="--texts: 0 found"):
        cli.fit_exits([*towers, "--images", str(root / "pictures")])

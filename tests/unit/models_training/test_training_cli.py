"""`hivlp fit-exits` and `hivlp export` on small towers: the whole way, resumed, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hivlp.models import cli
from hivlp.models.artifact import Artifact
from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import HivlpError, TextError
from hivlp.models.levels import GalleryKind, Modality
from hivlp.models.network import families
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.families import Family
from hivlp.models.network.heads import ExitHead
from hivlp.models.runtime.loading import load_encoders
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training import finest
from hivlp.models.training.checkpoint import PhaseStore, dual_encoder, load_fit
from hivlp.models.training.export import gallery_space, query_encoder
from tests.unit.models_training.checkpoints import COLOURS, TinyVision, make_bert, make_pairs

QUICK = (
    *("--set", "finest.epochs=300", "--set", "finest.text_learning_rate=0.01"),
    *("--set", "finest.negatives=8", "--set", "finest.dropout=0", "--set", "distil.text_epochs=20"),
)
SMALL = ("--dims", "4,8,12", "--text-exits", "1,2,3", "--image-exits", "1,2,3", "--threads", "1")
# As good as unfitted, for what doesn't ask how well it finds.
HASTY = (
    *("--set", "finest.epochs=5", "--set", "distil.text_epochs=2"),
    *("--set", "distil.image_epochs=2", "--set", "distil.hidden=8"),
)


@dataclass(frozen=True)
class Place:
    """Shared towers, pairs, texts and feature cache, and a folder of one's own for the rest."""

    shared: Path
    root: Path

    def fit(self, *more: str, out: str = "fit") -> int:
        given = {
            "--pairs": "pairs",
            "--texts": "texts.txt",
            "--text-tower": "bert",
            "--image-tower": "seed.tiny",
            "--cache": "cache",
        }
        named = [part for flag, name in given.items() for part in (flag, str(self.shared / name))]
        out_named = ("--out", str(self.root / out))
        return cli.fit_exits([*named, *out_named, "--group", "concept", *SMALL, *QUICK, *more])

    def export(self, *more: str, out: str = "artifact", fit: str = "fit") -> int:
        return cli.export([str(self.root / fit), "--out", str(self.root / out), *more])

    def model(self, fit: str) -> DualEncoder:
        return dual_encoder(load_fit(self.root / fit))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_bert(folder / "bert")
    make_pairs(folder / "pairs")
    (folder / "seed.tiny").write_text("1")
    texts = [f"{a} {b}" for a in ("a", "picture", "of") for b in COLOURS]
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


@pytest.fixture(scope="module", autouse=True)
def tiny_vision() -> Iterator[None]:
    family = Family("image", "a .tiny file", lambda p: p.suffix == ".tiny", TinyVision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "tiny-vision", family)
        yield


@pytest.fixture
def place(tmp_path: Path, shared: Path) -> Place:
    return Place(shared, tmp_path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """A hasty fit, to be read only."""
    place = Place(shared, tmp_path_factory.mktemp("fitted"))
    assert place.fit(*HASTY) == 0
    return place.root / "fit"


def _finds_colours(artifact: Path) -> float:
    """Share of colour names whose best picture, at the finest level, has that colour."""
    encoders = load_encoders(artifact)
    assert encoders.text is not None
    assert encoders.image is not None
    pictures = [np.full((8, 8, 3), colour, np.uint8) for colour in COLOURS.values()]
    gallery = encoders.image.encode_gallery(encoders.image.prepare(pictures))[-1].vectors
    queries = list(encoders.text.encode(encoders.text.prepare(list(COLOURS))))[-1].vectors
    return float(((queries @ gallery.T).argmax(1) == np.arange(len(COLOURS))).mean())


@pytest.mark.parametrize(
    ("gallery", "dims", "exits"), [("nested", (4, 8, 12), "1,2,3"), ("per_exit", (4, 12), "1,3")]
)
def test_fits_and_exports_a_model_that_finds_what_it_was_shown(
    place: Place, gallery: str, dims: tuple[int, ...], exits: str
) -> None:
    levels = ("--dims", ",".join(map(str, dims)), "--text-exits", exits, "--image-exits", exits)
    assert place.fit("--gallery", gallery, *levels) == 0
    sources = place.root / "sources.json"
    sources.write_text(json.dumps([{"name": "tower", "licence": "Apache-2.0"}]))
    assert place.export("--name", "small", "--sources", str(sources)) == 0
    manifest = Artifact.open(place.root / "artifact").manifest
    assert manifest.gallery == gallery
    assert manifest.name == "small"
    assert manifest.sources[0].licence == "Apache-2.0"
    assert manifest.measured["known_R@10"] > 0.9
    assert tuple(stage.dim for stage in manifest.towers[0].stages) == dims
    assert _finds_colours(place.root / "artifact") >= 0.8
    assert not (place.root / "fit/phases").exists()


def test_the_same_seed_fits_the_same_heads(place: Place, fitted: Path) -> None:
    for name, seed in (("two", "0"), ("three", "1")):
        place.fit(*HASTY, "--seed", seed, out=name)
    models = [dual_encoder(load_fit(fitted)), place.model("two"), place.model("three")]
    one, two, three = ((space := gallery_space(m), query_encoder(m, space)) for m in models)
    assert one == two != three


def test_new_early_exits_keep_the_gallery_space(place: Place, fitted: Path) -> None:
    place.fit(*HASTY, "--set", "distil.text_epochs=1", out="two")
    one, two = dual_encoder(load_fit(fitted)), place.model("two")
    assert (space := gallery_space(one)) == gallery_space(two)
    assert query_encoder(one, space) != query_encoder(two, space)


def _other_head(model: DualEncoder, modality: Modality, level: int) -> None:
    with torch.no_grad():
        model.tower(modality).exit_heads[level].shift[0] += 1


@pytest.mark.parametrize("gallery", ["nested", "per_exit"])
@pytest.mark.parametrize("modality", ["text", "image"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_gallery_space_hangs_on_just_the_heads_that_shape_it(
    fitted: Path, gallery: GalleryKind, modality: Modality, level: int
) -> None:
    model = dual_encoder(load_fit(fitted))
    model.gallery = gallery
    space = gallery_space(model)
    query = query_encoder(model, space)
    _other_head(model, modality, level)
    shapes = gallery == "per_exit" or level == 2
    assert (gallery_space(model) != space) == shapes
    assert query_encoder(model, space) != query


def test_the_gallery_space_hangs_on_every_file_of_a_tower(place: Place, fitted: Path) -> None:
    fit = load_fit(fitted)
    space = gallery_space(dual_encoder(fit))
    shutil.copytree(place.shared / "bert", place.root / "moved")
    (place.root / "renamed.tiny").write_text("1")
    moved = dual_encoder(fit, text=place.root / "moved", image=place.root / "renamed.tiny")
    assert gallery_space(moved) == space
    config = json.loads((place.root / "moved/config.json").read_text())
    changed = json.dumps(config | {"num_attention_heads": 2})
    (place.root / "moved/config.json").write_text(changed)
    with pytest.raises(HivlpError, match="not the text tower that these heads"):
        dual_encoder(fit, text=place.root / "moved")


@pytest.mark.parametrize("file", ["finest.safetensors", "finest.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_phase_is_run_again(
    tmp_path: Path, fitted: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = load_fit(fitted).heads.text[:2]
    ran: list[int] = []

    def phase() -> list[ExitHead]:
        ran.append(1)
        return heads

    store = PhaseStore(tmp_path, "key")
    store("finest", phase)
    store("finest", phase)
    assert len(ran) == 1
    path = tmp_path / "key" / file
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes(whole[:middle] if damage == "cut" else changed)
    kept = store("finest", phase)
    assert len(ran) == 2
    assert len(kept) == 2
    store("finest", phase)
    assert len(ran) == 2
    never_finished = (file, damage) == ("finest.json", "gone")
    assert ("runs again" in capsys.readouterr().err) is not never_finished


def test_changed_heads_of_a_fit_are_refused(tmp_path: Path, fitted: Path) -> None:
    shutil.copytree(fitted, tmp_path / "fit")
    weights = tmp_path / "fit/heads.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(HivlpError, match=r"heads\.safetensors: differs from what was written"):
        load_fit(tmp_path / "fit")


def test_an_interrupted_fit_goes_on_with_the_next_phase(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivlp.models.training import fitting

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "fit_early_heads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            place.fit(*HASTY)
    with pytest.raises(HivlpError, match="not a finished fit"):
        load_fit(place.root / "fit")
    monkeypatch.setattr(finest, "_train", interrupted)  # finished: must not run again
    assert place.fit(*HASTY) == 0
    assert len(load_fit(place.root / "fit").heads.text) == 3


def test_a_time_limit_ends_the_fit_early_with_a_whole_model_and_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.fit("--max-seconds", "0.001", "--set", "finest.epochs=100000") == 0
    assert len(place.model("fit").image.levels) == 3
    assert "the time limit cuts this short, after 0 of 100000 steps" in capsys.readouterr().err


def test_cross_validation_writes_its_measures_and_is_not_repeated(place: Place) -> None:
    assert place.fit(*HASTY, "--folds", "3", "--only-folds") == 0
    report = json.loads((place.root / "fit/crossval.json").read_text())
    found = report["mean"]["text_to_image"]["never_seen"]
    assert len(found["levels"]) == 3
    assert set(found["plans"]) == {"cascade", "funnel"}
    assert report["folds"] == len(report["of_folds"]) == 3
    assert not (place.root / "fit/fit.json").exists()
    files = {p: p.stat().st_mtime_ns for p in (place.root / "fit/folds").rglob("*.json")}
    assert len(files) == 3
    place.fit(*HASTY, "--folds", "3", "--only-folds")
    assert files == {p: p.stat().st_mtime_ns for p in files}
    damaged = sorted(files)[1]
    measured = json.loads(damaged.read_text())
    damaged.write_text(damaged.read_text()[:99])
    place.fit(*HASTY, "--folds", "3", "--only-folds")
    assert json.loads(damaged.read_text()) == measured
    same = [p for p in files if p.stat().st_mtime_ns == files[p]]
    assert same == [p for p in files if p != damaged]


def test_export_refuses_a_tower_that_the_heads_do_not_belong_to(place: Place, fitted: Path) -> None:
    (place.root / "seed.tiny").write_text("2")
    with pytest.raises(HivlpError, match="not the image tower that these heads"):
        place.export("--image-tower", str(place.root / "seed.tiny"), fit=str(fitted))


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ('[{"name": "tower"}]', r"source 0, field 'licence': Field required"),
        ("{", "not a JSON list of sources"),
        ("3", "not a JSON list of sources"),
    ],
)
def test_bad_sources_are_told_in_one_line(
    place: Place, fitted: Path, sources: str, told: str
) -> None:
    (place.root / "sources.json").write_text(sources)
    with pytest.raises(HivlpError, match=told) as caught:
        place.export("--sources", str(place.root / "sources.json"), fit=str(fitted))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--text-exits", "1,2"), "2 exits for 3 dims"),
        (("--text-exits", "1,2,9"), r"must grow within 1\.\.3"),
        (("--folds", "1"), "--folds must be 0 or at least 2"),
        (("--only-folds",), "needs --folds"),
        (("--folds", "7"), "only 6 different things"),
        (("--set", "finest.epoch=3"), "no field 'epoch'"),
        (("--set", "middle.epochs=3"), r"wanted finest\.FIELD=VALUE"),
        (("--set", "finest.epochs=many"), "'many' is not a number"),
        (
            ("--set", "finest.epochs=2.5"),
            r"finest\.epochs: 2\.5 is not a whole number within 0\.\.",
        ),
        (("--set", "finest.epochs=-1"), r"finest\.epochs: -1 is not a whole number within 0\.\."),
        (("--set", "finest.dropout=1"), r"finest\.dropout: 1 is not a number within 0\.\.0\.99"),
        (("--set", "finest.scale=0"), r"finest\.scale: 0 is not a number within 0\.01\.\.100"),
        (("--set", "finest.ridge=1e999"), r"finest\.ridge: inf is not a number within"),
        (("--set", "distil.batch=0"), r"distil\.batch: 0 is not a whole number within 1\.\."),
        (("--group", "colour"), "field 'colour', asked for as the group, is missing"),
    ],
)
def test_bad_input_is_told_in_one_line(place: Place, more: tuple[str, ...], told: str) -> None:
    with pytest.raises(HivlpError, match=told) as caught:
        place.fit(*more)
    assert "\n" not in str(caught.value)


def test_broken_pictures_are_left_out_up_to_a_share(place: Place) -> None:
    pairs = place.root / "pairs"
    shutil.copytree(place.shared / "pairs", pairs)
    (pairs / "red1.png").write_bytes(b"not a picture")
    with pytest.raises(HivlpError, match=r"red1\.png: not a supported picture.*1 of 12"):
        place.fit("--pairs", str(pairs), "--max-failures", "0.05")
    assert place.fit(*HASTY, "--pairs", str(pairs), "--max-failures", "0.1") == 0


def test_texts_that_leave_no_token_are_left_out_but_a_caption_is_named(
    place: Place,
    fitted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode = Tokenizer.encode

    def strict(self: Tokenizer, texts: list[str], *, param: str = "texts") -> EncoderBatch:
        if "\ue000" in texts:
            raise TextError("empty_text", "nothing is left of the text", param=param)
        return encode(self, texts, param=param)

    monkeypatch.setattr(Tokenizer, "encode", strict)
    (place.root / "more.txt").write_text("\ue000\n")
    assert place.fit(*HASTY, "--texts", str(place.root / "more.txt")) == 0
    assert "1 of 19 texts say nothing to the tower and are left out" in capsys.readouterr().err
    pairs = place.root / "pairs"
    shutil.copytree(place.shared / "pairs", pairs)
    lines = (pairs / "metadata.jsonl").read_text().replace("red square", "\\ue000")
    (pairs / "metadata.jsonl").write_text(lines)
    with pytest.raises(HivlpError, match=r"caption '\\ue000': nothing is left of the text"):
        place.fit(*HASTY, "--pairs", str(pairs))


@pytest.mark.parametrize("command", [cli.fit_exits, cli.export])
def test_help_has_an_example_and_bad_usage_is_2(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--help"]) == 0
    assert "example: hivlp" in capsys.readouterr().out
    assert command(["--no-such-flag"]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        *(("--dims", dims, "") for dims in ("8,4", "0,4", "a", "")),
        ("--text-exits", "1,1", "must grow"),
        ("--image-exits", "x", "not a list such as 2,4,6"),
        ("--seed", "-1", "within 0.."),
        ("--seed", "one", "not a whole number"),
        ("--folds", "-2", "within 0.."),
        ("--folds", "some", "not a whole number"),
        ("--threads", "0", "within 1..1024"),
        ("--max-texts", "many", "not a whole number within 1.."),
        ("--max-failures", "2", "within 0..1"),
        ("--max-failures", "few", "within 0..1"),
        ("--max-seconds", "nan", "of more than 0"),
        ("--max-seconds", "long", "of more than 0"),
        ("--gallery", "flat", "nested"),
    ],
)
def test_a_bad_value_is_bad_usage_that_names_flag_and_limit(
    place: Place, flag: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.fit(f"{flag}={value}") == 2
    told = capsys.readouterr().err
    assert f"argument {flag}" in told
    assert limit in told

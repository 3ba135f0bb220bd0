"""`hivlp fit-exits` and `hivlp export` on small towers: the whole way, resumed, and bad input."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.models import cli
from hivlp.models.artifact import Artifact
from hivlp.models.errors import HivlpError
from hivlp.models.network import families
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.families import Family
from hivlp.models.runtime.loading import load_encoders
from hivlp.models.training import export as exporting
from hivlp.models.training import finest
from hivlp.models.training.checkpoint import dual_encoder, load_fit
from hivlp.models.training.export import gallery_space, query_encoder
from tests.unit.models_training.checkpoints import COLOURS, TinyVision, make_bert, make_pairs

QUICK = (
    *("--set", "finest.epochs=300", "--set", "finest.text_learning_rate=0.01"),
    *("--set", "finest.negatives=8", "--set", "finest.dropout=0", "--set", "distil.text_epochs=20"),
)
SMALL = ("--dims", "4,8,12", "--text-exits", "1,2,3", "--image-exits", "1,2,3", "--threads", "1")


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


@pytest.fixture
def place(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    family = Family("image", "a .tiny file", lambda p: p.suffix == ".tiny", TinyVision)
    monkeypatch.setitem(families.FAMILIES, "tiny-vision", family)
    return Place(shared, tmp_path)


def _finds_colours(artifact: Path) -> float:
    """Share of colour names whose best picture, at the finest level, has that colour."""
    encoders = load_encoders(artifact)
    assert encoders.text is not None
    assert encoders.image is not None
    pictures = [np.full((8, 8, 3), colour, np.uint8) for colour in COLOURS.values()]
    gallery = encoders.image.encode_gallery(encoders.image.prepare(pictures))[-1].vectors
    queries = list(encoders.text.encode(encoders.text.prepare(list(COLOURS))))[-1].vectors
    return float(((queries @ gallery.T).argmax(1) == np.arange(len(COLOURS))).mean())


@pytest.mark.parametrize("gallery", ["nested", "per_exit"])
def test_fits_and_exports_a_model_that_finds_what_it_was_shown(place: Place, gallery: str) -> None:
    assert place.fit("--gallery", gallery) == 0
    sources = place.root / "sources.json"
    sources.write_text(json.dumps([{"name": "tower", "licence": "Apache-2.0"}]))
    assert place.export("--name", "small", "--sources", str(sources)) == 0
    manifest = Artifact.open(place.root / "artifact").manifest
    assert manifest.gallery == gallery
    assert manifest.name == "small"
    assert manifest.sources[0].licence == "Apache-2.0"
    assert manifest.measured["known_R@10"] > 0.9
    assert [stage.dim for stage in manifest.towers[0].stages] == [4, 8, 12]
    assert _finds_colours(place.root / "artifact") >= 0.8
    assert not (place.root / "fit/phases").exists()


def test_the_same_seed_fits_the_same_heads(place: Place) -> None:
    for name, seed in (("one", "0"), ("two", "0"), ("three", "1")):
        place.fit("--seed", seed, out=name)
    one, two, three = (gallery_space(place.model(name)) for name in ("one", "two", "three"))
    assert one == two != three


def test_new_early_exits_keep_the_gallery_space(place: Place) -> None:
    place.fit(out="one")
    place.fit("--set", "distil.text_epochs=1", out="two")
    one, two = (place.model(name) for name in ("one", "two"))
    assert (space := gallery_space(one)) == gallery_space(two)
    assert query_encoder(one, space) != query_encoder(two, space)


def test_an_interrupted_fit_goes_on_with_the_next_phase(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivlp.models.training import fitting

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "fit_early_heads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            place.fit()
    with pytest.raises(HivlpError, match="not a finished fit"):
        load_fit(place.root / "fit")
    monkeypatch.setattr(finest, "_train", interrupted)  # finished: must not run again
    assert place.fit() == 0
    assert len(load_fit(place.root / "fit").heads.text) == 3


def test_a_time_limit_ends_the_fit_early_with_a_whole_model(place: Place) -> None:
    assert place.fit("--max-seconds", "0.001", "--set", "finest.epochs=100000") == 0
    assert len(place.model("fit").image.levels) == 3


def test_cross_validation_writes_its_measures_and_is_not_repeated(place: Place) -> None:
    assert place.fit("--folds", "3", "--only-folds") == 0
    report = json.loads((place.root / "fit/crossval.json").read_text())
    found = report["mean"]["text_to_image"]["never_seen"]
    assert len(found["levels"]) == 3
    assert set(found["plans"]) == {"cascade", "funnel"}
    assert report["folds"] == len(report["of_folds"]) == 3
    assert not (place.root / "fit/fit.json").exists()
    files = {p: p.stat().st_mtime_ns for p in (place.root / "fit/folds").rglob("*.json")}
    assert len(files) == 3
    place.fit("--folds", "3", "--only-folds")
    assert files == {p: p.stat().st_mtime_ns for p in files}


def test_export_replaces_an_artifact_but_nothing_else(tmp_path: Path) -> None:
    made = tmp_path / "hidden"
    made.mkdir()
    (made / "manifest.json").write_text("new")
    target = tmp_path / "artifact"
    target.mkdir()
    (target / "manifest.json").write_text("the one before")
    exporting._check_target(target)
    exporting._put_in_place(made, target, tmp_path / "before")
    assert (target / "manifest.json").read_text() == "new"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("keep me")
    with pytest.raises(HivlpError, match="folder of something else"):
        exporting._check_target(tmp_path / "full")


def test_export_refuses_a_tower_that_the_heads_do_not_belong_to(place: Place) -> None:
    place.fit()
    (place.root / "seed.tiny").write_text("2")
    with pytest.raises(HivlpError, match="not the image tower that these heads"):
        place.export("--image-tower", str(place.root / "seed.tiny"))


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
    assert place.fit("--pairs", str(pairs), "--max-failures", "0.1") == 0


@pytest.mark.parametrize("command", [cli.fit_exits, cli.export])
def test_help_has_an_example_and_bad_usage_is_2(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--help"]) == 0
    assert "example: hivlp" in capsys.readouterr().out
    assert command(["--no-such-flag"]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("dims", ["8,4", "0,4", "a", ""])
def test_dims_that_do_not_grow_are_bad_usage(place: Place, dims: str) -> None:
    assert place.fit("--dims", dims) == 2

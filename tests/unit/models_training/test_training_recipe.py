"""Recipes: strict, whole, extended, changed; the packaged ones and their document."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

from hivlp.models.errors import TrainingError
from hivlp.models.fields import PLAIN, every_field
from hivlp.models.training.recipe import Recipe, as_toml, packaged, read_recipe, recipe_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def recipe(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("colour = 1", "colour: no such field; known are about, augment"),
        ("[train]\nbathc = 3", "train.bathc: no such field; known here are accumulation, batch"),
        ("[train]\nbatch = 3.5", "train.batch: 3.5 is not a whole number within 1..1e+06"),
        ("[train]\nbatch = true", "train.batch: True is not a whole number"),
        ("[train]\nbatch = 0", "train.batch: 0 is not a whole number within 1..1e+06 pictures"),
        ("[train]\nwarm_up = nan", "train.warm_up: nan is not a number within 0..0.99"),
        ("[train]\nprecision = 'fp16'", "train.precision: 'fp16' is none of auto, fp32, bf16"),
        ("[train]\nlearning_rate = 1e-6", "train.last_learning_rate: 1e-05 is more than"),
        ("[masking]\nmasked = 0.95", "masking.random: 0.1 and masked 0.95 are more than 1"),
        ("[tokenizer]\nlowercase = 1", "tokenizer.lowercase: 1 is not true or false"),
        ("[augment]\nflip_unless = 'left'", "augment.flip_unless: 'left' is no list"),
        ("[augment]\nflip_unless = ['left', 3]", "augment.flip_unless[1]: 3 is not a text"),
        ("[augment]\nflip_unless = ['']", "augment.flip_unless: '' is no word"),
        ("[augment]\nflip_unless = ['top-left']", "augment.flip_unless: 'top-left' is no word"),
        ("train = 3", "train: 3 is no table of fields"),
        ("[model]\ngallery = 'nested'", "model.gallery: is set by `form`"),
        ("[model.vision]\npatch = 15", "model.vision.image_size: 224 is not a multiple of patch"),
        ("[model.text]\ndepth = 0", "model.text.depth: 0 is not a whole number within 1..256"),
        ("[model.text]\nmax_tokens = 2", "model.text.max_tokens: 2 is not a whole number within 3"),
        ("[model.vision]\nwidth = 1_000_000_000", "model.vision.width: 1000000000 is not a whole"),
        ("[model.vision]\nimage_size = 100_000", "model.vision.image_size: 100000 is not a whole"),
        ("[model]\ntemperature = nan", "model.temperature: nan is not a number within 0.01..100"),
        ("[model]\ndims = ['a']", "model.dims[0]: 'a' is not a whole number within 1..16384"),
        (
            "[losses]\nmatching = 1e9",
            "losses.matching: 1000000000.0 is not a number within 0..1e+06",
        ),
        ("form = 'nestd'", "form: 'nestd' is none of nested, per_exit"),
        ("[losses]\nmlm = -1", "losses.mlm: -1"),
        ("[model]\nnormalise = false", "model.normalise: a nested gallery's levels"),
        ("not toml", "not readable as TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_by_field_and_limit(tmp_path: Path, text: str, told: str) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(TrainingError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: {told}")


def test_a_recipe_without_a_line_is_the_papers() -> None:
    found = recipe_of({})
    assert found == Recipe()
    train = found.train
    assert (train.beta1, train.beta2, train.weight_decay) == (0.9, 0.98, 0.01)
    assert (train.learning_rate, train.last_learning_rate, train.warm_up) == (1e-4, 1e-5, 0.1)
    assert (train.batch, train.accumulation, train.epochs) == (32, 6, 10)


def test_changes_come_last_and_reach_every_depth(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[train]\nseed = 1\nbatch = 8\n[model.vision]\nwidth = 96")
    changes = ["train.batch=16", "model.vision.heads=4", "model.cross=none", "train.from=a run"]
    found = read_recipe(path, [*changes, "form=per_exit"])
    assert (found.train.seed, found.train.batch, found.train.from_) == (1, 16, "a run")
    assert (found.model.vision.width, found.model.vision.heads) == (96, 4)
    assert found.model.cross is None
    assert (found.form, found.model.gallery) == ("per_exit", "per_exit")


@pytest.mark.parametrize("change", ["train.batch", "=3", "train..batch=3"])
def test_a_change_that_is_none_is_refused(change: str) -> None:
    with pytest.raises(TrainingError, match="wanted PART"):
        read_recipe("hivlp-tiny", [change])


def test_a_recipe_extends_a_packaged_one_or_one_beside_it(tmp_path: Path) -> None:
    recipe(tmp_path, 'extends = "hivlp-tiny"\n[train]\nseed = 5', "below.toml")
    found = read_recipe(recipe(tmp_path, 'extends = "below.toml"\n[train]\nbatch = 3'))
    tiny = read_recipe("hivlp-tiny")
    assert (found.train.seed, found.train.batch) == (5, 3)
    assert found.train.learning_rate == tiny.train.learning_rate
    assert found.model == tiny.model


def test_a_recipe_that_extends_itself_is_refused(tmp_path: Path) -> None:
    recipe(tmp_path, 'extends = "b.toml"', "a.toml")
    recipe(tmp_path, 'extends = "a.toml"', "b.toml")
    with pytest.raises(TrainingError, match="extends itself"):
        read_recipe(str(tmp_path / "a.toml"))


def test_an_unknown_name_lists_the_packaged_recipes() -> None:
    with pytest.raises(TrainingError, match=r"no packaged recipe; these are hivlp, hivlp-finetune"):
        read_recipe("hivlp-smal")


@pytest.mark.parametrize("name", sorted(packaged()))
def test_a_packaged_recipe_written_whole_is_the_same_recipe(name: str) -> None:
    found = read_recipe(name, ["train.max_seconds=inf", 'about="a \\"quoted\\" line, 10 °C"'])
    again = recipe_of(tomllib.loads(as_toml(found)))
    assert again == found
    assert math.isinf(again.train.max_seconds)


def test_the_packaged_recipes_are_what_their_names_say() -> None:
    whole, second = read_recipe("hivlp"), read_recipe("hivlp-finetune")
    assert whole.about
    assert whole.train == Recipe().train
    assert [s.exit_layer for s in whole.model.levels("vision")] == [4, 8, 12]
    assert (second.train.learning_rate, second.train.last_learning_rate) == (1e-5, 1e-6)
    assert second.model == whole.model
    assert (whole.train.needs_from, second.train.needs_from) == (False, True)
    assert read_recipe("hivlp-small").train.max_seconds <= 3600


def test_every_form_is_one_line_away() -> None:
    for name in packaged():
        assert read_recipe(name, ["form=per_exit"]).model.gallery == "per_exit"
        assert read_recipe(name, ["form=nested"]).model.gallery == "nested"


def test_the_document_tells_every_field_with_its_limits() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = {
        line.split("|")[1].strip().strip("`"): line
        for line in text.splitlines()
        if line.startswith("| `")
    }
    for name, value, limit in every_field(Recipe()):
        assert name == "model.gallery" or name in rows, f"docs/training.md lacks {name}"
        if limit.unit:
            assert limit.unit in rows[name], f"docs/training.md: {name} lacks {limit.unit!r}"
        if is_numeric(name, value):
            assert limit is not PLAIN, f"{name} has no limits of its own"
            told = LIMITS.match(rows[name].split("|")[3].strip())
            assert told, f"docs/training.md: {name} lacks its limits"
            assert tuple(map(as_number, told.groups())) == (limit.least, limit.most), name


LIMITS = re.compile(r"([^\s,]+)\.\.([^\s,]+)")


def is_numeric(name: str, value: object) -> bool:
    if isinstance(value, tuple):
        return name != "augment.flip_unless"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_number(text: str) -> float:
    """As the document writes it: 1e6, inf, 2^63-1."""
    return 2**63 - 1 if text == "2^63-1" else float(text)

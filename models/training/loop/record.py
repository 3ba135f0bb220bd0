"""A run's folder: what it was asked to do, so that it goes on as the same run or not at all.

recipe.toml       the whole recipe as run
data.json         which corpora, read how
tokenizer.json
data/pictures.arrow, or data/parts.jsonl of a stream
failures.jsonl, curves.jsonl, tensorboard/, checkpoints/
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivlp.models.errors import TrainingError
from hivlp.models.fields import every_field
from hivlp.models.training.data.sources import DataSource
from hivlp.models.training.loop.holding import LOCK
from hivlp.models.training.recipe import Recipe, as_toml, recipe_of

RECIPE, DATA, TOKENIZER, LISTING = (
    "recipe.toml",
    "data.json",
    "tokenizer.json",
    "data/pictures.arrow",
)
MAY_CHANGE = frozenset(
    {
        "about",
        "train.needs_from",
        "train.checkpoint_seconds",
        "train.keep",
        "train.log_steps",
        "data.workers",
        "data.max_failures",
    }
)
"""Fields that don't decide what a run learns, but how it is told of, kept and fed."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run was asked to do."""

    recipe: Recipe
    source: DataSource


def is_run(folder: Path) -> bool:
    """Whether a folder is one that `hivlp train` wrote."""
    return (folder / RECIPE).is_file() and (folder / DATA).is_file()


def read_record(folder: Path) -> RunRecord:
    """The record in a run's folder. Raises TrainingError."""
    try:
        recipe = recipe_of(tomllib.loads((folder / RECIPE).read_text(encoding="utf-8")))
        source = json.loads((folder / DATA).read_text(encoding="utf-8"))
        return RunRecord(recipe, DataSource.from_dict(source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{folder}: not the folder of a run: {error}") from error


def write_record(folder: Path, record: RunRecord) -> None:
    """Write the record; a folder that has one already must be of the same run.

    Raises TrainingError naming what differs, or for a folder of something else.
    """
    if is_run(folder):
        check_same(read_record(folder), record, folder)
    else:
        check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / RECIPE, as_toml(record.recipe))
    _replace(folder / DATA, json.dumps(record.source.as_dict(), indent=2) + "\n")


def check_place(folder: Path) -> None:
    """Raises TrainingError for a folder of something else. A lock alone is nothing else's."""
    there = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    if there and not (folder / RECIPE).is_file():
        raise TrainingError(f"{folder}: is a folder of something else; choose another place")


def check_same(before: RunRecord, now: RunRecord, folder: Path) -> None:
    """Raises TrainingError naming the first field in which two records differ."""
    old, new = _told(before), _told(now)
    fixed = MAY_CHANGE - {"data.workers"} if now.recipe.data.stream else MAY_CHANGE
    for name in sorted({*old, *new} - fixed):
        if old.get(name) != new.get(name):
            raise TrainingError(
                f"{folder}: holds a run with {name} = {old.get(name)!r}, not {new.get(name)!r}; "
                "choose another --out, or ask for the same"
            )


def _told(record: RunRecord) -> dict[str, Any]:
    recipe = {name: value for name, value, _ in every_field(record.recipe)}
    return recipe | {f"--corpus: {name}": v for name, v in record.source.as_dict().items()}


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)

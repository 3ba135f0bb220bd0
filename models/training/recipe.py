"""Recipes: everything that shapes a training run besides the data, in one TOML file.

`hivlp train` takes a path, or the name of a recipe that comes with the package. A recipe may extend
another (`extends = "hivlp"`, a name or a path beside it); `--set part.field=value` comes last. The
recipe as it was run is written beside the weights, whole, and is a recipe again.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from json import dumps
from pathlib import Path
from typing import Any

from hivlp.models.errors import TrainingError
from hivlp.models.fields import FieldError, plain_values, with_values
from hivlp.models.levels import GalleryKind
from hivlp.models.network.hivlp import HivlpConfig
from hivlp.models.training.data.settings import (
    AugmentSettings,
    DataSettings,
    MaskSettings,
    TokenizerSettings,
)
from hivlp.models.training.hivlp_losses import LossSettings
from hivlp.models.training.loop.settings import TrainSettings

PACKAGED, ENDING = "hivlp.models.recipes", ".toml"
EXTENDS = "extends"
GALLERY = "gallery"
Table = dict[str, Any]


class RecipeError(TrainingError):
    """A recipe that can't be read; names it."""

    def __init__(self, recipe: str, reason: str) -> None:
        super().__init__(f"{recipe}: {reason}")
        self.recipe = recipe
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe. `about` is one line; `form` is the model's gallery and, with it, which losses
    are computed.
    """

    about: str = ""
    form: GalleryKind = "nested"
    model: HivlpConfig = field(default_factory=HivlpConfig)
    losses: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    data: DataSettings = field(default_factory=DataSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    masking: MaskSettings = field(default_factory=MaskSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)


def losses_of(recipe: Recipe) -> LossSettings:
    """Weights of the losses; those that tell early heads nothing are left out where they alone
    are trained.
    """
    if recipe.train.only == "everything":
        return recipe.losses
    retrieval = 0.0 if recipe.form == "nested" else recipe.losses.retrieval
    return replace(recipe.losses, retrieval=retrieval, mlm=0.0, matching=0.0)


def read_recipe(given: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe by path or packaged name, with `part.field=value` changes.

    Raises RecipeError for what is no recipe, TrainingError naming a field that can't be.
    """
    table = _load(given, None, ())
    for change in changes:
        _merge(table, _change(change))
    try:
        return recipe_of(table)
    except TrainingError as error:
        raise RecipeError(given, str(error)) from error


def recipe_of(table: Mapping[str, Any]) -> Recipe:
    """A recipe from the plain values of a TOML file. Raises TrainingError naming a field."""
    table = _copied(table)
    model = table.get("model", {})
    if isinstance(model, dict) and GALLERY in model:
        raise FieldError(f"model.{GALLERY}", "is set by `form`, at the top of a recipe")
    # The form is known before the model's own values are checked against it.
    base = with_values(Recipe(), {name: table[name] for name in ("form",) if name in table})
    return with_values(replace(base, model=HivlpConfig(gallery=base.form)), table)


def as_toml(recipe: Recipe) -> str:
    """The whole recipe as a TOML file."""
    table = plain_values(recipe)
    table["model"].pop(GALLERY)
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(path)}]"
    parts = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name, value in table.items():
        if name not in parts:
            yield f"{name} = {_toml(value)}"
    for name, part in parts.items():
        yield from _lines(part, (*path, name))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return dumps(value, ensure_ascii=False)  # texts, whole numbers, true and false are alike


def packaged() -> dict[str, Traversable]:
    """Recipes that come with the package, by name."""
    found = (entry for entry in files(PACKAGED).iterdir() if entry.name.endswith(ENDING))
    return dict(sorted((entry.name.removesuffix(ENDING), entry) for entry in found))


def _load(given: str, beside: Path | None, seen: tuple[str, ...]) -> Table:
    """A recipe's values, those that it extends below them."""
    if given in seen:
        raise RecipeError(given, f"extends itself: {' -> '.join((*seen, given))}")
    source, folder = _find(given, beside)
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(given, f"not readable as TOML: {error}") from error
    if (below := table.pop(EXTENDS, None)) is None:
        return table
    if not isinstance(below, str):
        raise RecipeError(given, f"{EXTENDS}: {below!r} is not the name or path of a recipe")
    whole = _load(below, folder, (*seen, given))
    _merge(whole, table)
    return whole


def _find(given: str, beside: Path | None) -> tuple[Traversable, Path | None]:
    """The file, and its folder where it has one on disk."""
    known = packaged()
    if given in known:
        return known[given], None
    path = Path(given) if beside is None else beside / given
    if path.is_file():
        return path, path.parent
    listed = ", ".join(known)
    raise RecipeError(given, f"no such file, and no packaged recipe; these are {listed}")


def _change(given: str) -> Table:
    """`part.field=value` as nested tables. Raises TrainingError."""
    path, equals, value = given.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise TrainingError(f"--set {given}: wanted PART.FIELD=VALUE")
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()  # a text without quotes
    for name in reversed(names):
        found = {name: found}
    return dict(found)


def _merge(below: Table, above: Mapping[str, Any]) -> None:
    """Put values over values; tables are merged, anything else is replaced."""
    for name, value in above.items():
        old = below.get(name)
        if isinstance(value, Mapping) and isinstance(old, dict):
            _merge(old, value)
        else:
            below[name] = _copied(value) if isinstance(value, Mapping) else value


def _copied(table: Mapping[str, Any]) -> Table:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in table.items()}

"""Settings of a fit. The defaults are the recipe that was measured; see docs/papers.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

from hivlp.models.errors import TrainingError
from hivlp.models.levels import GalleryKind

DEFAULT_DIMS = (128, 300, 768)
Space = Literal["pairs", "checkpoint"]
"""Where the finest level lies: fitted on pairs, or where a checkpoint's two towers meet."""
MOST = 10**9
LIMITS: Mapping[str, tuple[float, float]] = {
    "batch": (1, MOST),
    "caption_repeats": (1, 1000),
    "dropout": (0, 0.99),
    "gallery_sample": (1, MOST),
    "groups_a_batch": (1, MOST),
    "head_rate": (0, 10),
    "hidden": (0, 100_000),
    "image_batch": (1, MOST),
    "image_dropout": (0, 0.99),
    "image_ridge": (1e-9, MOST),
    "kept_directions": (1, MOST),
    "layers": (1, 100),
    "learning_rate": (1e-9, 10),
    "max_seconds": (0, math.inf),
    "pictures_a_group": (1, MOST),
    "ridge": (1e-9, MOST),
    "same_meaning": (-1, 1),
    "scale": (0.01, 100),
    "seed": (0, 2**63 - 1),
    "text_batch": (1, MOST),
    "text_learning_rate": (0, 10),
}
"""Field -> least and most; any other number is within 0..MOST."""
Part = TypeVar("Part", "FinestSettings", "DistilSettings", "UnfreezeSettings", "FitSettings")


@dataclass(frozen=True, slots=True)
class FinestSettings:
    """Fitting two finest heads on pairs: the contrastive part.

    `kept_directions` of the picture's features are used; `ridge` is the first guess's penalty.
    `groups_a_batch` things, each with all its pictures up to `pictures_a_group`, make a batch;
    `same_thing` weighs the loss by which its pictures find each other.
    `negatives` of the unlabelled texts join it, but not those nearer than `same_meaning` (cosine in
    the text tower's own space) to a caption.
    """

    epochs: int = 40
    groups_a_batch: int = 256
    pictures_a_group: int = 2
    learning_rate: float = 3e-3
    text_learning_rate: float = 0.0
    weight_decay: float = 0.05
    dropout: float = 0.3
    hidden: int = 0
    kept_directions: int = 640
    ridge: float = 1.0
    negatives: int = 1024
    same_meaning: float = 0.6
    scale: float = 20.0
    same_thing: float = 0.5


@dataclass(frozen=True, slots=True)
class DistilSettings:
    """Fitting early heads to what the finest one says, without labels.

    `aim_ridge` is the penalty of the map from finest queries to a level's targets; 0 aims at their
    plain prefixes.
    """

    text_epochs: int = 8
    image_epochs: int = 20
    batch: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    hidden: int = 1024
    layers: int = 2
    dropout: float = 0.0
    image_dropout: float = 0.2
    gallery_sample: int = 512
    score_weight: float = 250.0
    caption_repeats: int = 3
    aim_ridge: float = 0.01
    ridge: float = 1e-3
    image_ridge: float = 0.3


@dataclass(frozen=True, slots=True)
class UnfreezeSettings:
    """Training layers 1..`text_layers` and 1..`image_layers` with the early heads; 0 is frozen.

    `keep` weighs, beside one early level's loss, how much the finest answer stays what the frozen
    tower gave. `learning_rate` is the layers', `head_rate` the early heads'.
    """

    text_layers: int = 0
    image_layers: int = 0
    text_epochs: int = 2
    image_epochs: int = 2
    text_batch: int = 64
    image_batch: int = 16
    learning_rate: float = 5e-5
    head_rate: float = 3e-4
    weight_decay: float = 0.01
    keep: float = 1.0
    checkpoint_seconds: float = 60.0

    @property
    def any(self) -> bool:
        """Whether any layer is trained."""
        return bool(self.text_layers or self.image_layers)


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Everything that shapes fitted heads, besides the data and the towers."""

    dims: tuple[int, ...] = DEFAULT_DIMS
    gallery: GalleryKind = "nested"
    seed: int = 0
    max_seconds: float = 1800.0
    space: Space = "pairs"
    finest: FinestSettings = FinestSettings()
    distil: DistilSettings = DistilSettings()
    unfreeze: UnfreezeSettings = UnfreezeSettings()

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(given: dict[str, Any]) -> FitSettings:
        """The reverse of `as_dict`. Raises TrainingError naming an unknown field."""
        plain = {**given, "dims": tuple(given["dims"])}
        plain["finest"] = with_fields(FinestSettings(), given["finest"], "finest")
        # A fit from before there was such a thing aimed at the prefix.
        before = DistilSettings(aim_ridge=0.0)
        plain["distil"] = with_fields(before, given["distil"], "distil")
        plain["unfreeze"] = with_fields(UnfreezeSettings(), given.get("unfreeze", {}), "unfreeze")
        return with_fields(FitSettings(), plain, "settings")


def with_fields(base: Part, given: Mapping[str, Any], place: str) -> Part:
    """A copy of a settings object with some fields changed. Raises TrainingError."""
    known = {field.name for field in fields(base)}
    if unknown := sorted(set(given) - known):
        raise TrainingError(
            f"{place}: no field {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    checked = {name: _checked(getattr(base, name), given[name], name, place) for name in given}
    return replace(base, **checked)


def _checked(before: object, value: Any, name: str, place: str) -> Any:
    """The value as the field wants it: a whole number or a float, within the field's limits."""
    if not isinstance(before, (int, float)):
        return value
    kind = type(before)
    least, most = LIMITS.get(name, (0, MOST))
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise TrainingError(f"{place}.{name}: {value!r} is not {what} within {least}..{most}")
    return kind(value)

"""What `hivlp fit-exits` reads before it fits: towers, settings, and a corpus's features."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivlp.models.errors import TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.tower import Tower, check_exits, first_layers
from hivlp.models.runtime.images import ImageLimits
from hivlp.models.runtime.progress import say
from hivlp.models.training.features import FeatureReader, TowerExit
from hivlp.models.training.fitting import Corpus, Raw
from hivlp.models.training.pairs import Pair, PairsError, read_pairs, read_pictures, read_texts
from hivlp.models.training.settings import (
    DEFAULT_DIMS,
    FitSettings,
    Space,
    UnfreezeSettings,
    with_fields,
)
from hivlp.models.training.towers import open_tower

SHOWN = 3
LEAST = 20
"""Pictures, and texts, that a fit without pairs needs at least."""


@dataclass(frozen=True, slots=True)
class Towers:
    """Two loaded towers, and where they lie."""

    text: Tower
    image: Tower
    text_path: Path
    image_path: Path

    @property
    def joint_width(self) -> int | None:
        """How many numbers the space has that both end in; None where they share none."""
        spaces = (self.text.joint_space, self.image.joint_space)
        widths = {tower.width(tower.depth) for tower in (self.text, self.image)}
        if spaces[0] is None or spaces[0] != spaces[1] or len(widths) > 1:
            return None
        return widths.pop()


@dataclass(frozen=True, slots=True)
class Readings:
    """Both towers and where they are read."""

    text: TowerExit
    image: TowerExit


def read_towers(given: argparse.Namespace) -> Towers:
    """Load what `--towers`, `--text-tower` and `--image-tower` name. Raises TrainingError."""
    text, image = given.text_tower or given.towers, given.image_tower or given.towers
    for path, name in ((text, "text"), (image, "image")):
        if path is None:
            raise TrainingError(f"--{name}-tower is needed, or --towers for both")
    return Towers(open_tower(text, "text"), open_tower(image, "image"), text, image)


def read_settings(given: argparse.Namespace, towers: Towers) -> FitSettings:
    """Settings from the arguments. Raises TrainingError naming a field that is unknown or wrong."""
    space = _space(given, towers)
    base = FitSettings(
        dims=_dims(given.dims, towers.joint_width if space == "checkpoint" else None),
        gallery=given.gallery,
        seed=given.seed,
        max_seconds=given.max_seconds,
        space=space,
    )
    if given.folds < 0 or given.folds == 1:
        raise TrainingError("--folds must be 0 or at least 2")
    if given.only_folds and not given.folds:
        raise TrainingError("--only-folds needs --folds")
    layers = {"text_layers": given.unfreeze_text, "image_layers": given.unfreeze_image}
    changes: dict[str, dict[str, Any]] = {"finest": {}, "distil": {}, "unfreeze": layers}
    for change in given.set:
        path, _, value = change.partition("=")
        part, _, field = path.partition(".")
        if part not in changes:
            wanted = " or ".join(f"{name}.FIELD=VALUE" for name in changes)
            raise TrainingError(f"--set {change}: wanted {wanted}")
        changes[part][field] = _number(value, change)
    finest = with_fields(base.finest, changes["finest"], "--set finest")
    distil = with_fields(base.distil, changes["distil"], "--set distil")
    unfreeze = with_fields(base.unfreeze, changes["unfreeze"], "--set unfreeze")
    _check_unfrozen(unfreeze, given, towers)
    parts = {"finest": finest, "distil": distil, "unfreeze": unfreeze}
    return with_fields(base, parts, "settings")


def _check_unfrozen(unfreeze: UnfreezeSettings, given: argparse.Namespace, towers: Towers) -> None:
    """That the towers have such layers, and that nothing else asked for contradicts it."""
    if not unfreeze.any:
        return
    if given.gallery == "per_exit":
        raise TrainingError("--unfreeze-*: --gallery per_exit has no finest level to distil from")
    if given.folds:
        raise TrainingError("--unfreeze-*: --folds cross-validates frozen towers only")
    counts = (unfreeze.text_layers, unfreeze.image_layers)
    for tower, count in zip((towers.text, towers.image), counts, strict=True):
        if count:
            try:
                first_layers(tower, count)
            except TrainingError as error:
                raise TrainingError(f"--unfreeze-{tower.modality}: {error}") from error


def _space(given: argparse.Namespace, towers: Towers) -> Space:
    """Where the finest level lies, and that nothing else asked for contradicts it."""
    joint = towers.joint_width is not None
    space: Space = given.space or ("checkpoint" if joint else "pairs")
    if space == "pairs":
        if not given.pairs:
            raise TrainingError("--pairs is needed: these towers share no space of their own")
        if given.images:
            raise TrainingError("--images: without captions they teach --space checkpoint alone")
        return space
    if not joint:
        raise TrainingError(
            "--space checkpoint: the two towers end in no space of their own; --towers with one "
            "checkpoint of both (CLIP, SigLIP, OpenCLIP)"
        )
    if given.gallery == "per_exit":
        raise TrainingError("--gallery per_exit: --space checkpoint has one gallery vector, nested")
    if given.folds:
        raise TrainingError("--folds: nothing is fitted on pairs in --space checkpoint")
    if idle := next((each for each in given.set if each.startswith("finest.")), None):
        raise TrainingError(f"--set {idle}: the finest level of --space checkpoint is not fitted")
    return space


def _dims(given: Sequence[int] | None, width: int | None) -> tuple[int, ...]:
    """Dims as given, or as usual; in a checkpoint's own space of `width` the last is all of it."""
    if width is None:
        return tuple(given or DEFAULT_DIMS)
    if given is None:
        return own_dims(width)
    if given[-1] != width:
        fitting = ",".join(map(str, (*(dim for dim in given[:-1] if dim < width), width)))
        raise TrainingError(
            f"--dims: the last one is {given[-1]}, but the checkpoint's own space has {width} "
            f"numbers, and the finest level is all of it: --dims {fitting}, or --space pairs"
        )
    return tuple(given)


def own_dims(width: int) -> tuple[int, ...]:
    """Dims of a space of `width` numbers: the usual early ones, or shares of a narrow space."""
    if width > DEFAULT_DIMS[-2]:
        return (*DEFAULT_DIMS[:-1], width)
    return tuple(sorted({max(1, width // 4), max(1, width // 2), width}))


def _number(value: str, change: str) -> int | float:
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        found = None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TrainingError(f"--set {change}: {value!r} is not a number")
    return found


def read_exits(given: argparse.Namespace, towers: Towers, levels: int) -> Readings:
    """Where each tower is read, coarse first. Raises TrainingError naming the argument."""
    return Readings(
        _read_exits(towers.text, "text", given.text_exits, levels),
        _read_exits(towers.image, "image", given.image_exits, levels),
    )


def _read_exits(
    tower: Tower, modality: Modality, exits: Sequence[int] | None, levels: int
) -> TowerExit:
    chosen = check_exits(tower, exits or tower.exits(levels))
    if len(chosen) != levels:
        raise TrainingError(f"--{modality}-exits: {len(chosen)} exits for {levels} dims")
    return TowerExit(tower, chosen)


def read_corpus(
    given: argparse.Namespace, readings: Readings, settings: FitSettings, cache: Path, threads: int
) -> Corpus:
    """Features of every picture and text, kept in `cache`. Raises PairsError."""
    pairs = read_pairs(given.pairs, group=given.group) if given.pairs else []
    pairs += read_pictures(given.images)
    texts = read_texts(given.texts, most=given.max_texts, seed=settings.seed)
    say(f"{len(pairs)} pictures, {len(texts)} texts without pictures")
    if settings.space == "checkpoint":
        _check_enough(pairs, texts)
    else:
        _note_width(readings.text, settings)
    reader = FeatureReader(readings.image, cache, threads)
    pictures, broken = reader.pictures([pair.picture for pair in pairs], limits=ImageLimits())
    good = _without(pairs, broken, given.max_failures)
    groups = {name: i for i, name in enumerate(dict.fromkeys(pair.group for pair in good))}
    if settings.space == "pairs" and len(groups) < 2:
        raise PairsError(str(given.pairs), "pictures of at least two different things are needed")
    captions = {(groups[pair.group], text): None for pair in good for text in pair.captions}
    own = np.array([group for group, _ in captions], dtype=np.int64)
    said = [text for _, text in captions]
    features, silent = FeatureReader(readings.text, cache, threads).texts(said + texts)
    count = len(captions)
    for row, reason in silent.items():
        if row < count:
            raise PairsError(str(given.pairs), f"caption {said[row]!r}: {reason}")
    if silent:
        say(f"{len(silent)} of {len(texts)} texts say nothing to the tower and are left out")
    return Corpus(
        captions=[rows[:count] for rows in features],
        pictures=pictures,
        unlabelled=[rows[count:] for rows in features],
        caption_group=own,
        picture_group=np.array([groups[pair.group] for pair in good], dtype=np.int64),
        raw=Raw(
            said,
            [pair.picture for pair in good],
            [text for row, text in enumerate(texts) if count + row not in silent],
        ),
    )


def _check_enough(pairs: Sequence[Pair], texts: Sequence[str]) -> None:
    """Both towers learn, so both need something to learn from. Raises PairsError."""
    said = len(texts) + sum(len(pair.captions) for pair in pairs)
    for name, count in (("--images", len(pairs)), ("--texts", said)):
        if count < LEAST:
            raise PairsError(name, f"{count} found with --pairs together, at least {LEAST} needed")


def _note_width(text: TowerExit, settings: FitSettings) -> None:
    """Say so where a text tower can't fill the finest level."""
    width, wanted = text.tower.width(text.exits[-1]), settings.dims[-1]
    if width < wanted and settings.gallery == "nested" and not settings.finest.text_learning_rate:
        say(
            f"the text tower is {width} wide: of the finest level's {wanted} numbers only {width} "
            f"can carry anything; --dims ...,{width} says the same in less"
        )


def _without(pairs: Sequence[Pair], broken: dict[int, str], allowed: float) -> list[Pair]:
    """Pairs whose picture could be read. Raises PairsError where too many could not."""
    for row in list(broken)[:SHOWN]:
        say(f"left out: {pairs[row].picture}: {broken[row]}")
    if len(broken) > allowed * len(pairs):
        first = next(iter(broken))
        raise PairsError(
            str(pairs[first].picture),
            f"{broken[first]} ({len(broken)} of {len(pairs)} pictures can't be read, more than the "
            f"share of {allowed} that --max-failures allows)",
        )
    if broken:
        say(f"{len(broken)} of {len(pairs)} pictures can't be read and are left out")
    return [pair for row, pair in enumerate(pairs) if row not in broken]

"""What `hivlp fit-exits` and `hivlp export` do with their arguments."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hivlp.models.artifact import fingerprint
from hivlp.models.cli import DONE, default_cache
from hivlp.models.errors import TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.families import load_tower
from hivlp.models.network.tower import check_exits
from hivlp.models.runtime.images import ImageLimits
from hivlp.models.runtime.progress import say
from hivlp.models.training.checkpoint import (
    Fit,
    PhaseStore,
    TowerUse,
    dual_encoder,
    load_fit,
    save_fit,
)
from hivlp.models.training.crossval import cross_validate, measure
from hivlp.models.training.export import ExportNote, export_model, read_sources
from hivlp.models.training.features import FeatureReader, TowerExit
from hivlp.models.training.fitting import Corpus, fit_heads
from hivlp.models.training.pairs import Pair, PairsError, read_pairs, read_texts
from hivlp.models.training.precision import MOST_TEXTS
from hivlp.models.training.settings import FitSettings, with_fields

PHASES, FOLDS, REPORT = "phases", "folds", "crossval.json"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Readings:
    """Both towers and where they are read."""

    text: TowerExit
    image: TowerExit


def run_fit(given: argparse.Namespace) -> int:
    """Features, cross-validation where asked for, the fit on everything."""
    threads = given.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    settings = read_settings(given)
    readings = _read_towers(given, len(settings.dims))
    cache = given.cache or default_cache()
    corpus = _read_corpus(given, readings, settings, cache, threads)
    key = fingerprint(
        {
            "corpus": corpus_hash(corpus),
            "settings": json.dumps(settings.as_dict()),
            "text": readings.text.key,
            "image": readings.image.key,
        }
    )
    if given.folds:
        _cross_validate(corpus, settings, given, key)
    if not given.only_folds:
        _fit_all(corpus, settings, readings, given, key)
    return DONE


def read_settings(given: argparse.Namespace) -> FitSettings:
    """Settings from the arguments. Raises TrainingError naming a field that is unknown or wrong."""
    base = FitSettings(
        dims=given.dims, gallery=given.gallery, seed=given.seed, max_seconds=given.max_seconds
    )
    if given.folds < 0 or given.folds == 1:
        raise TrainingError("--folds must be 0 or at least 2")
    if given.only_folds and not given.folds:
        raise TrainingError("--only-folds needs --folds")
    changes: dict[str, dict[str, Any]] = {"finest": {}, "distil": {}}
    for change in given.set:
        path, _, value = change.partition("=")
        part, _, field = path.partition(".")
        if part not in changes:
            raise TrainingError(f"--set {change}: wanted finest.FIELD=VALUE or distil.FIELD=VALUE")
        changes[part][field] = _number(value, change)
    finest = with_fields(base.finest, changes["finest"], "--set finest")
    distil = with_fields(base.distil, changes["distil"], "--set distil")
    return with_fields(base, {"finest": finest, "distil": distil}, "settings")


def _number(value: str, change: str) -> int | float:
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        found = None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TrainingError(f"--set {change}: {value!r} is not a number")
    return found


def _read_towers(given: argparse.Namespace, levels: int) -> Readings:
    return Readings(
        _read_tower(given.text_tower, "text", given.text_exits, levels),
        _read_tower(given.image_tower, "image", given.image_exits, levels),
    )


def _read_tower(
    path: Path, modality: Modality, exits: Sequence[int] | None, levels: int
) -> TowerExit:
    tower = load_tower(path, modality)
    chosen = check_exits(tower, exits or tower.exits(levels))
    if len(chosen) != levels:
        raise TrainingError(f"--{modality}-exits: {len(chosen)} exits for {levels} dims")
    return TowerExit(tower, chosen)


def _read_corpus(
    given: argparse.Namespace, readings: Readings, settings: FitSettings, cache: Path, threads: int
) -> Corpus:
    pairs = read_pairs(given.pairs, group=given.group)
    texts = read_texts(given.texts, most=given.max_texts, seed=settings.seed)
    say(f"{len(pairs)} pictures, {len(texts)} texts without pictures")
    _note_width(readings.text, settings)
    reader = FeatureReader(readings.image, cache, threads)
    pictures, broken = reader.pictures([pair.picture for pair in pairs], limits=ImageLimits())
    good = _without(pairs, broken, given.max_failures)
    groups = {name: i for i, name in enumerate(dict.fromkeys(pair.group for pair in good))}
    if len(groups) < 2:
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
    )


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


def corpus_hash(corpus: Corpus) -> str:
    """Hash of what a fit reads; equal features and groups in equal order hash alike."""
    finest = {name: getattr(corpus, name)[-1] for name in ("captions", "pictures", "unlabelled")}
    finest |= {name: getattr(corpus, name) for name in ("caption_group", "picture_group")}
    return fingerprint(
        {
            name: f"{rows.shape} {hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()}"
            for name, rows in finest.items()
        }
    )


def _cross_validate(
    corpus: Corpus, settings: FitSettings, given: argparse.Namespace, key: str
) -> None:
    groups = len(np.unique(corpus.picture_group))
    if given.folds > groups:
        raise TrainingError(f"--folds {given.folds}: only {groups} different things")
    folder = given.out / FOLDS / f"{key[:32]}-{given.folds}"
    report = cross_validate(corpus, settings, given.folds, folder)
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": settings.as_dict(), **report}, indent=1) + "\n"
    part = (given.out / REPORT).with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(given.out / REPORT)
    for line in summary(report["mean"]):
        say(line)


def summary(mean: dict[str, Any]) -> list[str]:
    """The few numbers of a report that say whether a fit is good."""
    lines = []
    for direction in ("text_to_image", "image_to_text"):
        for who, found in mean[direction].items():
            if isinstance(found, dict) and "levels" in found:
                finest = found["levels"][-1]
                numbers = "  ".join(f"{name} {value:.3f}" for name, value in finest.items())
                lines.append(f"{direction}, {who}: {numbers}")
    return lines


def _fit_all(
    corpus: Corpus,
    settings: FitSettings,
    readings: Readings,
    given: argparse.Namespace,
    key: str,
) -> None:
    phases = given.out / PHASES
    heads = fit_heads(corpus, settings, PhaseStore(phases, key))
    nothing = np.zeros(0, np.int64)
    found = measure(corpus, heads, settings, left_out=nothing, only=("text_to_image",))
    known = found["text_to_image"]["known"]
    measured = {f"known_{name}": value for name, value in known["levels"][-1].items()}
    fit = Fit(
        heads,
        TowerUse.of(given.text_tower, readings.text),
        TowerUse.of(given.image_tower, readings.image),
        settings,
        measured,
    )
    save_fit(given.out, fit)
    shutil.rmtree(phases, ignore_errors=True)
    numbers = "  ".join(f"{name} {value:.3f}" for name, value in measured.items())
    say(f"fitted, text to image among what was fitted on: {numbers}")


def run_export(given: argparse.Namespace) -> int:
    """A fit's folder to an artifact."""
    fit = load_fit(given.fit)
    model = dual_encoder(fit, text=given.text_tower, image=given.image_tower)
    note = ExportNote(
        given.name or given.out.name,
        read_sources(given.sources),
        fit.measured,
        given.precision,
        tuple(read_texts(given.check_texts, most=MOST_TEXTS, seed=0)),
    )
    artifact = export_model(model, given.out, note)
    say(f"{artifact.path}: gallery space {artifact.manifest.gallery_space[:12]}")
    return DONE

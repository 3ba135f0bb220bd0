"""What `hivlp fit-exits` and `hivlp export` do with their arguments."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hivlp.models.artifact import fingerprint
from hivlp.models.cli import DONE, default_cache
from hivlp.models.errors import TrainingError
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
from hivlp.models.training.fitting import Corpus, FittedHeads, fit_heads
from hivlp.models.training.loop.record import is_run
from hivlp.models.training.loop.trained import load_run
from hivlp.models.training.own_space import compare_with_checkpoint, compared_lines, hold_out
from hivlp.models.training.pairs import read_texts
from hivlp.models.training.precision import MOST_TEXTS
from hivlp.models.training.reading import (
    Readings,
    Towers,
    read_corpus,
    read_exits,
    read_settings,
    read_towers,
)
from hivlp.models.training.settings import FitSettings

PHASES, FOLDS, REPORT = "phases", "folds", "crossval.json"


def run_fit(given: argparse.Namespace) -> int:
    """Features, cross-validation where asked for, the fit on everything."""
    threads = given.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    towers = read_towers(given)
    settings = read_settings(given, towers)
    readings = read_exits(given, towers, len(settings.dims))
    cache = given.cache or default_cache()
    corpus = read_corpus(given, readings, settings, cache, threads)
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
        _fit_all(corpus, settings, readings, towers, given.out, key)
    return DONE


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
    corpus: Corpus, settings: FitSettings, readings: Readings, towers: Towers, out: Path, key: str
) -> None:
    phases = out / PHASES
    store = PhaseStore(phases, key)
    if settings.space == "checkpoint":
        fitted, held = hold_out(corpus, settings.seed)
        heads = fit_heads(fitted, settings, store)
        measured = compare_with_checkpoint(fitted, held, heads, settings.dims)
        lines = compared_lines(measured, len(settings.dims))
    else:
        heads = fit_heads(corpus, settings, store)
        measured = _measure_known(corpus, heads, settings)
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in measured.items())
        lines = [f"fitted, text to image among what was fitted on: {numbers}"]
    fit = Fit(
        heads,
        TowerUse.of(towers.text_path, readings.text),
        TowerUse.of(towers.image_path, readings.image),
        settings,
        measured,
    )
    save_fit(out, fit)
    shutil.rmtree(phases, ignore_errors=True)
    for line in lines:
        say(line)


def _measure_known(corpus: Corpus, heads: FittedHeads, settings: FitSettings) -> dict[str, float]:
    nothing = np.zeros(0, np.int64)
    found = measure(corpus, heads, settings, left_out=nothing, only=("text_to_image",))
    known = found["text_to_image"]["known"]
    return {f"known_{name}": value for name, value in known["levels"][-1].items()}


def run_export(given: argparse.Namespace) -> int:
    """The folder of a fit or of a training run to an artifact."""
    if is_run(given.fit):
        trained = load_run(given.fit)
        model, measured, cross = trained.model.dual, trained.measured, trained.model.cross
    else:
        fit = load_fit(given.fit)
        model = dual_encoder(
            fit, text=given.text_tower or given.towers, image=given.image_tower or given.towers
        )
        measured, cross = fit.measured, None
    note = ExportNote(
        given.name or given.out.name,
        read_sources(given.sources),
        measured,
        given.precision,
        tuple(read_texts(given.check_texts, most=MOST_TEXTS, seed=0)),
    )
    artifact = export_model(model, given.out, note, cross)
    say(f"{artifact.path}: gallery space {artifact.manifest.gallery_space[:12]}")
    return DONE

"""What `hivlp fit-exits` and `hivlp export` do with their arguments."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hivlp.models.artifact import fingerprint
from hivlp.models.cli import DONE, default_cache
from hivlp.models.errors import TrainingError
from hivlp.models.network.tower import first_layers
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
from hivlp.models.training.fitting import Corpus, FittedHeads, fit_heads, make_students
from hivlp.models.training.loop.record import is_run
from hivlp.models.training.loop.trained import load_run
from hivlp.models.training.own_space import (
    Original,
    Parts,
    compare_with_original,
    compared_lines,
    hold_out,
)
from hivlp.models.training.pairs import read_texts
from hivlp.models.training.precision import MOST_TEXTS
from hivlp.models.training.reading import (
    Readings,
    read_corpus,
    read_exits,
    read_settings,
    read_towers,
)
from hivlp.models.training.settings import FitSettings
from hivlp.models.training.unfreeze import Lesson, unfreeze

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
    if given.only_folds:
        return DONE
    text = TowerUse.of(towers.text_path, readings.text, settings.unfreeze.text_layers)
    image = TowerUse.of(towers.image_path, readings.image, settings.unfreeze.image_layers)
    phases = given.out / PHASES

    def read_again() -> Corpus:
        return read_corpus(given, readings, settings, cache, threads)

    made = _Made(corpus, settings, readings, phases, key, read_again)
    found = made.unfrozen() if settings.unfreeze.any else made.frozen()
    fit = Fit(found.heads, text, image, settings, found.measured, found.layers)
    save_fit(given.out, fit)
    shutil.rmtree(phases, ignore_errors=True)
    for line in found.lines:
        say(line)
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


@dataclass(frozen=True, slots=True)
class _Found:
    """A fit's heads and trained layers, what was measured, and that in words."""

    heads: FittedHeads
    measured: dict[str, float]
    lines: list[str]
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Made:
    """The fit on everything: what it reads, and the folder where it keeps what is finished."""

    corpus: Corpus
    settings: FitSettings
    readings: Readings
    phases: Path
    key: str
    read_again: Callable[[], Corpus]

    def frozen(self) -> _Found:
        """Heads on frozen towers."""
        settings, store = self.settings, PhaseStore(self.phases, self.key)
        if settings.space == "checkpoint":
            parts = hold_out(self.corpus, settings.seed)
            heads = fit_heads(parts.fitted, settings, store)
            original = Original.of_checkpoint(parts)
            measured = compare_with_original(parts, heads, settings.dims, original)
            lines = compared_lines(measured, len(settings.dims), "the checkpoint's")
            return _Found(heads, measured, lines)
        heads = fit_heads(self.corpus, settings, store)
        measured = _measure_known(self.corpus, heads, settings)
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in measured.items())
        return _Found(
            heads, measured, [f"fitted, text to image among what was fitted on: {numbers}"]
        )

    def unfrozen(self) -> _Found:
        """The same, then early layers with their heads; both measured on what was held out."""
        settings, store = self.settings, PhaseStore(self.phases, self.key)
        parts = hold_out(self.corpus, settings.seed)
        own = settings.space == "checkpoint"
        # pairs are few: the finest level has them all, early ones learn without what is held out
        whole = parts.fitted if own else self.corpus
        heads = fit_heads(whole, settings, store, taught=parts.fitted)
        original = Original.of_checkpoint(parts) if own else Original.of_heads(parts, heads)
        before = compare_with_original(parts, heads, settings.dims, original)
        layers = self._train(parts, heads)
        again = hold_out(self.read_again(), settings.seed)
        after = compare_with_original(again, heads, settings.dims, original)
        whose = "the checkpoint's" if own else "the frozen model's"
        lines = [f"frozen: {line}" for line in compared_lines(before, len(settings.dims), whose)]
        lines += [f"unfrozen: {line}" for line in compared_lines(after, len(settings.dims), whose)]
        told = {f"frozen_{name}": value for name, value in before.items()}
        return _Found(heads, after | told, lines, layers)

    def _train(self, parts: Parts, heads: FittedHeads) -> dict[str, dict[str, Tensor]]:
        """Train the layers that settings name, in place; their weights by modality."""
        fitted, chosen = parts.fitted, self.settings.unfreeze
        assert fitted.raw is not None, "features alone"
        text, image = make_students(fitted, heads.text[-1], heads.image[-1], self.settings)
        said = [*fitted.raw.captions, *fitted.raw.unlabelled]
        pictures = fitted.raw.pictures
        lessons = [
            Lesson(self.readings.text, chosen.text_layers, text, said,
                   chosen.text_epochs, chosen.text_batch),
            Lesson(self.readings.image, chosen.image_layers, image, pictures,
                   chosen.image_epochs, chosen.image_batch),
        ]  # fmt: skip
        found: dict[str, dict[str, Tensor]] = {}
        for lesson, own in zip(lessons, (heads.text, heads.image), strict=True):
            if lesson.layers:
                tower = lesson.reading.tower
                folder = self.phases / self.key[:32] / f"unfrozen-{tower.modality}"
                unfreeze(lesson, own, self.settings, folder)
                found[tower.modality] = dict(first_layers(tower, lesson.layers).state_dict())
        return found


def _measure_known(corpus: Corpus, heads: FittedHeads, settings: FitSettings) -> dict[str, float]:
    nothing = np.zeros(0, np.int64)
    found = measure(corpus, heads, settings, left_out=nothing, only=("text_to_image",))
    known = found["text_to_image"]["known"]
    return {f"known_{name}": value for name, value in known["levels"][-1].items()}


def run_export(given: argparse.Namespace) -> int:
    """The folder of a fit or of a training run to an artifact."""
    if is_run(given.fit):
        if given.text_tower or given.image_tower or given.towers:
            raise TrainingError(
                "a run's towers are its own: --text-tower, --image-tower and --towers are of a fit"
            )
        trained = load_run(given.fit)
        model, measured, cross = trained.model.dual, trained.measured, trained.reranker
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

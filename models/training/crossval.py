"""Cross-validation over things: what a fit makes of things that it never saw.

Each fold leaves out some groups with all their pictures and captions, fits on the rest, and
searches among all pictures (never seen and known ones) and among the left-out ones alone. A folder
of one JSON per fold makes an interrupted run go on with the next fold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hivlp.models.levels import FloatArray
from hivlp.models.runtime.progress import say
from hivlp.models.training.fitting import Corpus, FittedHeads, fit_heads, level_vectors
from hivlp.models.training.measures import (
    Rows,
    Side,
    Widths,
    ann_recall,
    early_ranks,
    level_recalls,
    plan_recalls,
    unit,
    width_for,
)
from hivlp.models.training.settings import FitSettings

MOST_QUERIES = 1000
DIRECTIONS = ("text_to_image", "image_to_text", "image_to_image")
SMALLEST_GALLERY = 240
FUNNEL_SHARE = 4
"""The funnel's first width is the cascade's, divided by this."""


def cross_validate(
    corpus: Corpus, settings: FitSettings, folds: int, folder: Path
) -> dict[str, Any]:
    """Measures of every fold and their mean; also kept in `folder`, a JSON each."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = np.unique(corpus.picture_group)
    fold_of = np.random.default_rng(settings.seed).permutation(len(groups)) % folds
    found = []
    for fold in range(folds):
        file = folder / f"fold{fold + 1}.json"
        measured = _kept(file)
        if measured is None:
            say(f"fold {fold + 1} of {folds}")
            heads = fit_heads(corpus.of_groups(groups[fold_of != fold]), settings)
            measured = measure(corpus, heads, settings, left_out=groups[fold_of == fold])
            part = file.with_suffix(".part")
            part.write_text(json.dumps(measured, indent=1), encoding="utf-8")
            part.replace(file)
        found.append(measured)
    return {"folds": folds, "mean": mean_of(found), "of_folds": found}


def _kept(file: Path) -> dict[str, Any] | None:
    """A fold's measures from before, or None where there are none or they are damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and set(DIRECTIONS) <= set(found) else None


def mean_of(found: Sequence[Any]) -> Any:
    """The mean of equally shaped nested measures; anything but numbers is taken from the first."""
    first = found[0]
    if isinstance(first, Mapping):
        return {name: mean_of([each[name] for each in found]) for name in first}
    if isinstance(first, list):
        return [mean_of(list(each)) for each in zip(*found, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return round(float(np.mean(found)), 4)
    return first


def measure(
    corpus: Corpus,
    heads: FittedHeads,
    settings: FitSettings,
    *,
    left_out: Rows,
    only: Sequence[str] = DIRECTIONS,
) -> dict[str, Any]:
    """Everything asked of one fit: both directions, pictures to pictures, known and never seen."""
    sides = _sides(corpus, heads, settings)
    rng = np.random.default_rng(settings.seed)
    measured: dict[str, Any] = {"left_out_groups": len(left_out)}
    for name in only:
        queries, gallery = sides[name]
        unseen = np.isin(queries.group, left_out)
        among = np.isin(gallery.group, left_out)
        measured[name] = {}
        if unseen.any():
            measured[name]["never_seen"] = _by_search(_some(queries, unseen, rng), gallery)
        if not unseen.all():
            measured[name]["known"] = _by_search(_some(queries, ~unseen, rng), gallery)
        if unseen.any() and name != "image_to_image":
            inside = queries.rows(unseen)
            measured[name]["never_seen_among_themselves"] = {
                "levels": level_recalls(inside, gallery.rows(among))
            }
    return measured


def _some(side: Side, chosen: Any, rng: np.random.Generator) -> Side:
    rows = np.flatnonzero(chosen)
    if len(rows) > MOST_QUERIES:
        rows = np.sort(rng.choice(rows, MOST_QUERIES, replace=False))
    return side.rows(rows)


def _sides(
    corpus: Corpus, heads: FittedHeads, settings: FitSettings
) -> dict[str, tuple[Side, Side]]:
    """Direction -> queries and gallery."""
    texts = level_vectors(heads.text, corpus.captions)
    pictures = level_vectors(heads.image, corpus.pictures)
    own = np.arange(len(corpus.picture_group))

    def gallery(levels: list[FloatArray]) -> list[FloatArray]:
        if settings.gallery == "per_exit":
            return levels
        return [unit(levels[-1][:, :dim]) for dim in settings.dims]

    all_pictures = Side(gallery(pictures), corpus.picture_group)
    all_captions = Side(gallery(texts), corpus.caption_group)
    return {
        "text_to_image": (Side(texts, corpus.caption_group), all_pictures),
        "image_to_text": (Side(pictures, corpus.picture_group), all_captions),
        "image_to_image": (Side(pictures, corpus.picture_group, own), all_pictures),
    }


def _by_search(queries: Side, gallery: Side) -> dict[str, Any]:
    ranks = early_ranks(queries, gallery)
    widths = plan_widths(len(gallery.group), len(gallery.levels))
    return {
        "queries": len(queries.group),
        "gallery": len(gallery.group),
        "levels": level_recalls(queries, gallery),
        "plan_widths": {"cascade": list(widths.cascade), "funnel": list(widths.funnel)},
        "plans": plan_recalls(queries, gallery, widths),
        "ann_recall_by_k1": ann_recall(ranks),
        "k1_for_99": _growth(queries, gallery),
    }


def plan_widths(gallery: int, levels: int) -> Widths:
    """Widths that the two plans are measured with: a share of the gallery, then a quarter each."""
    first = min(gallery, max(50, gallery // 20))
    widths = tuple(max(10, first // 4**level) for level in range(levels - 1))
    return Widths(widths, tuple(max(10, width // FUNNEL_SHARE) for width in widths))


def _growth(queries: Side, gallery: Side) -> dict[str, int]:
    """K1 for ANN recall .99 by gallery size: random galleries, each half of the next."""
    if queries.itself is not None:
        return {str(len(gallery.group)): width_for(early_ranks(queries, gallery))}
    order = np.random.default_rng(0).permutation(len(gallery.group))
    sizes: list[int] = []
    size = len(order)
    while size >= SMALLEST_GALLERY or not sizes:
        sizes.append(size)
        size //= 2
    return {
        str(size): width_for(early_ranks(queries, gallery.rows(order[:size])))
        for size in reversed(sizes)
    }

"""One fold of the demo for `exit_curve.py`: features, finest vectors, and pools of texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hivlp.index.snapshot.store import default_home
from hivlp.models.network.families import load_tower
from hivlp.models.runtime.images import ImageLimits
from hivlp.models.training.distil import embed_all
from hivlp.models.training.features import FeatureReader, TowerExit
from hivlp.models.training.finest import PairFeatures, fit_finest
from hivlp.models.training.pairs import read_pairs, read_texts
from hivlp.models.training.schedule import Deadline
from hivlp.models.training.settings import FinestSettings
from hivlp.service.demo import sources

DIMS = (128, 300, 384)
FOLDS, SEED = 5, 0
POOLS = {"glosses": 40_000, "short": 20_000, "mixed": 20_000}
"""Texts of each kind; see `_pools`."""
FINEST_TEXTS = 20_000
WIDTH = 384
DEEPEST_READ = 5
"""Features hold one pooled vector for the embeddings and each of layers 1..5, one after another."""
SHORT_WORDS = 3


@dataclass(frozen=True, slots=True)
class FoldData:
    """Everything a trial reads. Features are (n, 384 x 6) float32, `finest` (n, 384) float32."""

    texts: dict[str, list[str]]
    features: dict[str, np.ndarray]
    finest: dict[str, np.ndarray]
    pictures_finest: np.ndarray
    caption_group: np.ndarray
    picture_group: np.ndarray
    caption_left_out: np.ndarray
    picture_left_out: np.ndarray

    @property
    def captions_finest(self) -> np.ndarray:
        return self.finest["captions"]

    def read_at(self, pool: str, layer: int) -> np.ndarray:
        """Features of an exit after `layer`: every layer so far."""
        return self.features[pool][:, : WIDTH * (layer + 1)]

    def prefix(self, pool: str, dim: int) -> np.ndarray:
        """The targets at a level of `dim` numbers, length 1."""
        cut = self.finest[pool][:, :dim]
        return cut / np.linalg.norm(cut, axis=1, keepdims=True)


def fold_data(folder: Path, threads: int) -> FoldData:
    """Read features (kept under HIVLP_HOME), fit the finest heads or read their vectors."""
    home = default_home()
    pairs = read_pairs(home / "demo" / "corpus", group="concept")
    groups = {name: i for i, name in enumerate(dict.fromkeys(pair.group for pair in pairs))}
    picture_group = np.array([groups[pair.group] for pair in pairs])
    captions = {(groups[p.group], text): None for p in pairs for text in p.captions}
    caption_group = np.array([group for group, _ in captions])
    every = np.unique(picture_group)
    fold = np.random.default_rng(SEED).permutation(len(every)) % FOLDS
    left_out = every[fold == 0]
    out = np.isin(caption_group, left_out)
    said = [text for _, text in captions]
    known = [text for text, away in zip(said, out, strict=True) if not away]
    texts = {"captions": said} | _pools(home / "demo" / "texts.txt.gz", known)
    cache = home / "cache" / "features"
    reader = FeatureReader(
        TowerExit(load_tower(sources.text_tower(), "text"), (DEEPEST_READ, 6)), cache, threads
    )
    early, last = {}, {}
    for name, pool in texts.items():
        (early[name], last[name]), broken = reader.texts(pool)
        assert not broken, f"{name}: {broken}"
    images = FeatureReader(
        TowerExit(load_tower(sources.image_tower(), "image"), (6, 7, 8)), cache, threads
    )
    pictures, broken = images.pictures([p.picture for p in pairs], limits=ImageLimits())
    assert not broken, broken
    there = ~np.isin(picture_group, left_out)
    fit_on = PairFeatures(
        last["captions"][~out],
        pictures[-1][there],
        last["glosses"][:FINEST_TEXTS],
        caption_group[~out],
        picture_group[there],
    )
    finest, pictures_finest = _finest(folder / "finest.npz", fit_on, last, pictures[-1])
    return FoldData(
        texts, early, finest, pictures_finest, caption_group, picture_group, out, ~there
    )


def _finest(
    file: Path, fit_on: PairFeatures, last: dict[str, np.ndarray], pictures: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Finest vectors of every text and picture, by the demo's recipe."""
    if not file.is_file():
        deadline = Deadline(1800.0)
        heads = fit_finest(fit_on, DIMS, FinestSettings(), seed=SEED, deadline=deadline)
        found = {name: embed_all(heads[0], rows) for name, rows in last.items()}
        np.savez(file, pictures=embed_all(heads[1], pictures), **found)
    kept = dict(np.load(file))
    assert set(kept) == {"pictures", *last}, f"remove {file}: it is of another run"
    return {name: kept[name] for name in last}, kept["pictures"]


def _pools(file: Path, known: list[str]) -> dict[str, list[str]]:
    """Pools without pictures: a dictionary's texts, its short ones, and captions mixed with it.

    `mixed`: a known thing's caption with one word replaced by a word or two of the dictionary, so
    that texts look like captions and speak of other things. Captions left out are never read.
    """
    rng = np.random.default_rng(SEED)
    lines = read_texts([file], most=10**9, seed=SEED)
    order = [lines[i] for i in rng.permutation(len(lines))]
    short = [text for text in order if len(text.split()) <= SHORT_WORDS and "(" not in text]
    mixed: dict[str, None] = {}
    while len(mixed) < POOLS["mixed"]:
        words = re.findall(r"\S+", known[rng.integers(len(known))])
        words[rng.integers(len(words))] = short[rng.integers(len(short))]
        mixed[" ".join(words)] = None
    return {
        "glosses": order[: POOLS["glosses"]],
        "short": short[: POOLS["short"]],
        "mixed": list(mixed),
    }

"""The trials of `exit_curve.py`: what each changes of the demo's recipe, and how it is fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from exit_curve_data import SEED, FoldData
from torch import Tensor
from torch.nn import functional as F

from hivlp.models.network.heads import ExitHead
from hivlp.models.training.closed_form import score_map
from hivlp.models.training.distil import _reduced, _start, embed_all
from hivlp.models.training.schedule import Deadline, Steps
from hivlp.models.training.settings import DistilSettings

DIM = 128
SCORE_PENALTY = 0.01
BASE_STEPS = 440
"""Those of 8 epochs over 20,000 texts and the known captions, three times."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Changes to the demo's recipe. `pools`: how many texts of each kind, besides captions.

    `loss` is a name of `LOSSES`; `hard` is the share of the sampled gallery that is taken from the
    rows nearest to the batch. `aim`: what it is taught, the finest one's `prefix` or what scores
    level 1 most like the finest one scores `pictures`, `captions` or `both`.
    """

    said: str
    pools: Mapping[str, int] = field(default_factory=lambda: {"glosses": 20_000})
    layer: int = 2
    hidden: int = 1024
    layers: int = 2
    steps: int = BASE_STEPS
    batch: int = 512
    rate: float = 1e-3
    dropout: float = 0.0
    repeats: int = 3
    sample: int = 512
    hard: float = 0.0
    loss: str = "mse"
    weight: float = 250.0
    aim: str = "prefix"
    seed: int = SEED
    exact: bool = False
    """Asks with the targets themselves: what no early exit can be better than."""


TRIALS = {
    "base": Trial("the demo's recipe with 20,000 dictionary texts"),
    "exact-prefix": Trial("the finest query's own first numbers: the floor", exact=True),
    "exact-aim": Trial("the floor of aim-pictures", aim="pictures", exact=True),
    "ridge": Trial("no training: the straight line alone", steps=0),
    "seed-1": Trial("another seed", seed=1),
    "aim-both": Trial("aims at the finest scores, by pictures and captions", aim="both"),
    "aim-pictures": Trial("aims at the finest scores of pictures", aim="pictures"),
    "aim-ridge": Trial("the same, the straight line alone", aim="pictures", steps=0),
    "aim-listwise": Trial("the same, with listwise", aim="pictures", loss="listwise", weight=10.0),
    "aim-layer-3": Trial("the same after layer 3", aim="pictures", layer=3),
    "aim-layer-4": Trial("the same after layer 4", aim="pictures", layer=4),
    "aim-steps-x2": Trial("the same, twice the steps", aim="pictures", steps=2 * BASE_STEPS),
    "aim-40k": Trial(
        "the same, 40,000 texts, twice the steps",
        {"glosses": 40_000},
        aim="pictures",
        steps=2 * BASE_STEPS,
    ),
    "aim-wide-2048": Trial("the same, MLP of 2,048", aim="pictures", hidden=2048),
    "aim-layers-1": Trial("the same, MLP of one hidden layer", aim="pictures", layers=1),
    "texts-5k": Trial("5,000 texts, equal steps", {"glosses": 5_000}),
    "texts-10k": Trial("10,000 texts, equal steps", {"glosses": 10_000}),
    "texts-40k": Trial("40,000 texts, equal steps", {"glosses": 40_000}),
    "short-20k": Trial("20,000 short dictionary texts instead", {"short": 20_000}),
    "mixed-20k": Trial("20,000 captions with a word replaced instead", {"mixed": 20_000}),
    "half-mixed": Trial(
        "10,000 dictionary texts, 10,000 mixed captions", {"glosses": 10_000, "mixed": 10_000}
    ),
    "layer-3": Trial("the exit after layer 3", layer=3),
    "layer-4": Trial("the exit after layer 4", layer=4),
    "steps-x2": Trial("twice the steps", steps=2 * BASE_STEPS),
    "steps-x4": Trial("four times the steps", steps=4 * BASE_STEPS),
    "wide-2048": Trial("MLP of 2,048", hidden=2048),
    "layers-1": Trial("MLP of one hidden layer", layers=1),
    "wide-512": Trial("MLP of 512", hidden=512),
    "weight-1000": Trial("scores weigh four times", weight=1000.0),
    "weight-60": Trial("scores weigh a quarter", weight=60.0),
    "sample-2048": Trial("2,048 gallery rows a step", sample=2048),
    "exact": Trial("all gallery rows, by their second moments", loss="exact"),
    "hard-half": Trial("half of the gallery rows are near ones", hard=0.5),
    "listwise": Trial(
        "KL of the softmax over the gallery, factor 30", loss="listwise", weight=10.0
    ),
    "dropout": Trial("dropout .1", dropout=0.1),
}


def mse(early: Tensor, target: Tensor, gallery: Tensor) -> Tensor:
    """Mean squared difference of scores."""
    return F.mse_loss(early @ gallery.T, target @ gallery.T)


def listwise(early: Tensor, target: Tensor, gallery: Tensor, scale: float = 30.0) -> Tensor:
    """KL divergence of the early query's softmax over gallery rows from the target's."""
    wanted = F.log_softmax(scale * target @ gallery.T, 1)
    found = F.log_softmax(scale * early @ gallery.T, 1)
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def exact(early: Tensor, target: Tensor, moments: Tensor) -> Tensor:
    """`mse` over a whole gallery: (n, d) twice and (d, d), its mean outer product."""
    apart = early - target
    return ((apart @ moments) * apart).sum(1).mean()


LOSSES = {"mse": mse, "listwise": listwise, "exact": exact}


def fit_level1(trial: Trial, data: FoldData) -> Callable[[str], np.ndarray]:
    """Train level 1 as the trial says; returns an encoder of a pool: (n, 128) float32."""
    torch.manual_seed(trial.seed)
    seen = np.flatnonzero(~data.caption_left_out)
    features = [data.read_at("captions", trial.layer)[seen]]
    gallery = (data.pictures_finest[~data.picture_left_out], data.captions_finest[seen])
    if trial.exact:
        return lambda pool: _aimed(trial, data.finest[pool], gallery)
    targets = [_aimed(trial, data.captions_finest[seen], gallery)]
    for pool, count in trial.pools.items():
        features.append(data.read_at(pool, trial.layer)[:count])
        targets.append(_aimed(trial, data.finest[pool][:count], gallery))
    rows, target = np.concatenate(features), np.concatenate(targets)
    weights = np.ones(len(rows))
    weights[: len(seen)] = trial.repeats
    settings = DistilSettings(hidden=trial.hidden, layers=trial.layers)
    head = _start(rows, target, settings, trial.dropout, settings.ridge)
    level = np.concatenate([_cut(each) for each in gallery])
    _train(head, trial, rows, target, weights / weights.sum(), level)
    return lambda pool: embed_all(head, data.read_at(pool, trial.layer))


def _cut(vectors: np.ndarray) -> np.ndarray:
    cut = vectors[:, :DIM]
    return cut / np.linalg.norm(cut, axis=1, keepdims=True)


def _aimed(trial: Trial, finest: np.ndarray, gallery: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """(n, 128) targets of length 1 for (n, 384) finest queries."""
    if trial.aim == "prefix":
        return _cut(finest)
    pictures, captions = gallery
    galleries = {"pictures": [pictures], "both": [pictures, captions], "captions": [captions]}
    found = finest @ score_map(galleries[trial.aim], DIM, SCORE_PENALTY).T
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def _train(
    head: ExitHead,
    trial: Trial,
    features: np.ndarray,
    target: np.ndarray,
    share: np.ndarray,
    gallery: np.ndarray,
) -> None:
    """As `hivlp.models.training.distil` trains a level, with the trial's loss and gallery rows."""
    rng = np.random.default_rng(trial.seed)
    reduced, wanted, there = _reduced(head, features), torch.tensor(target), torch.tensor(gallery)
    moments = there.T @ there / len(there)
    steps = Steps(
        [(head.parameters(), trial.rate)],
        total=trial.steps,
        weight_decay=DistilSettings().weight_decay,
        deadline=Deadline(3600),
    )
    cumulative = np.cumsum(share)
    head.train()
    for _ in steps:
        chosen = np.minimum(np.searchsorted(cumulative, rng.random(trial.batch)), len(share) - 1)
        early = F.normalize(head.answer(reduced[chosen]), dim=1)
        aim = wanted[chosen]
        some = moments if trial.loss == "exact" else there[_sampled(trial, aim, there, rng)]
        direction = 1.0 - (early * aim).sum(1).mean()
        steps.take(direction + trial.weight * LOSSES[trial.loss](early, aim, some))
    head.eval()


def _sampled(trial: Trial, aim: Tensor, gallery: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Gallery rows of a step: at random, or in part those nearest to some of the batch."""
    count = min(trial.sample, len(gallery))
    near = int(count * trial.hard)
    rows = rng.choice(len(gallery), count - near, replace=False)
    if near:
        asked = aim[rng.choice(len(aim), min(len(aim), near // 8), replace=False)]
        rows = np.concatenate([rows, (asked @ gallery.T).topk(8, dim=1).indices.flatten().numpy()])
    return rows

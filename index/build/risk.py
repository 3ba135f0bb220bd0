"""How far early exits may go: gates fitted on a sample, a threshold by conformal risk control.

Conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster, arXiv 2208.02814, theorem 1):
of the thresholds at which (n R + B) / (n + 1) <= alpha, where R is the mean loss of n queries, B
its largest value, the lowest one; the expected loss of the next query like them is at most alpha.
That asks for losses that only grow as the threshold falls. A query may stop earlier, and by luck
better, at a lower one: each query's loss is replaced by its largest at any higher threshold (their
section 2.3).

Gates are logistic models, fitted by Newton's method with a ridge penalty. Confidences that the
threshold is chosen by come from gates that didn't see the query (cross-conformal: the guarantee is
no longer exact, and the held-out loss is reported beside it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.early_exit import SIGNALS, Gate

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
FOLDS = 5
LARGEST_LOSS = 1.0
RIDGE = 1.0
NEWTON_STEPS = 30
CONSTANT = 1e-9
GRID = 512
"""Thresholds tried, at most: quantiles of the confidences."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Gates by level and the threshold; None where no threshold is safe.

    `exits` (n,) is the place of the level at which each query would stop, decided by gates and
    thresholds that didn't see it; the number of levels where it runs through.
    """

    gates: Mapping[int, Gate]
    threshold: float | None
    exits: IntArray


def choose_exits(
    signals: Mapping[int, Array],
    losses: Sequence[Mapping[int, Array]],
    used: Mapping[int, Sequence[str]],
    folds: IntArray,
    alpha: float,
) -> Chosen:
    """Gates and a threshold for which each of `losses` is at most `alpha`.

    `signals[level]` is (n, len(SIGNALS)), NaN where a query can't stop there; `losses` are
    measures, each by level (n,) from 0 to 1, NaN where a query has none of that measure;
    `used[level]` names the signals of its gate; `folds` (n,) from 0 on.
    """
    levels = sorted(signals)
    labels = {level: _harmless([loss[level] for loss in losses]) for level in levels}
    confidence = np.zeros((len(folds), len(levels)))
    for fold in np.unique(folds):
        inside = folds == fold
        for place, level in enumerate(levels):
            gate = fit_gate(signals[level][~inside], labels[level][~inside], used[level])
            confidence[inside, place] = confidences(gate, signals[level][inside])
    exits = np.full(len(folds), len(levels), dtype=np.int64)
    for fold in np.unique(folds):
        inside = folds == fold
        threshold = _safe(confidence, losses, levels, ~inside, alpha)
        if threshold is not None:
            exits[inside] = first_exit(confidence[inside], threshold)
    gates = {n: fit_gate(signals[n], labels[n], used[n]) for n in levels}
    everyone = np.ones(len(folds), dtype=np.bool_)
    return Chosen(gates, _safe(confidence, losses, levels, everyone, alpha), exits)


def first_exit(confidence: Array, threshold: float) -> IntArray:
    """The first place of each row of (n, levels) that reaches the threshold, else the width."""
    reached = confidence >= threshold
    exits: IntArray = np.where(reached.any(axis=1), reached.argmax(axis=1), reached.shape[1])
    return exits


def risk_threshold(confidence: Array, losses: Array, alpha: float) -> float | None:
    """The lowest threshold whose risk is controlled, or None: both arrays are (n, levels)."""
    count = len(confidence)
    if not count:
        return None
    some = np.quantile(confidence, np.linspace(0, 1, GRID), method="inverted_cdf")
    padded = np.hstack([losses, np.zeros((count, 1))])
    worst = np.zeros(count)
    lowest = None
    for threshold in np.unique(some)[::-1]:
        if threshold < 0:  # no confidence: those queries can't stop
            break
        exits = first_exit(confidence, float(threshold))
        worst = np.maximum(worst, padded[np.arange(count), exits])
        if (worst.sum() + LARGEST_LOSS) / (count + 1) > alpha:
            break
        lowest = float(threshold)
    return lowest


def fit_gate(signals: Array, harmless: Array, used: Sequence[str]) -> Gate:
    """A logistic model of (n,) 0 or 1 over the `used` columns of (n, len(SIGNALS)).

    Rows with NaN are left out.
    """
    columns = [SIGNALS.index(name) for name in used]
    known = ~np.isnan(signals[:, 0]) & ~np.isnan(harmless)
    x, harmless = signals[known][:, columns], harmless[known]
    if not len(x):
        return Gate((0.0,) * len(SIGNALS), 0.0)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    scale = np.where(spread > CONSTANT, spread, np.inf)  # what never varies weighs nothing
    design = np.hstack([(x - mean) / scale, np.ones((len(x), 1))])
    penalty = np.full(design.shape[1], RIDGE)
    penalty[-1] = 1e-3  # barely: only so that a sample without any loss has a finite bias
    weights = np.zeros(design.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        slope = design.T @ (harmless - chance) - penalty * weights
        curvature = (design.T * (chance * (1 - chance))) @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, slope)
        weights += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-6:
            break
    every = np.zeros(len(SIGNALS))
    every[columns] = weights[:-1] / scale
    return Gate(tuple(every.tolist()), float(weights[-1] - (weights[:-1] / scale) @ mean))


def confidences(gate: Gate, signals: Array) -> Array:
    """A gate's confidence in each row of (n, len(SIGNALS)): (n,), -1 where it is NaN."""
    found: Array = np.array([gate.confidence(tuple(row)) for row in signals.tolist()])
    found[np.isnan(found)] = -1.0
    return found


def _harmless(losses: Sequence[Array]) -> Array:
    """1 where no measure loses, 0 where one does, NaN where there is none: that teaches nothing."""
    table = np.vstack(losses)
    harmless: Array = (np.nan_to_num(table).max(axis=0) <= 0).astype(np.float64)
    harmless[np.isnan(table).all(axis=0)] = np.nan
    return harmless


def _safe(
    confidence: Array,
    losses: Sequence[Mapping[int, Array]],
    levels: Sequence[int],
    among: npt.NDArray[np.bool_],
    alpha: float,
) -> float | None:
    """The highest of the thresholds that the measures ask for; None where one finds none."""
    found = []
    for loss in losses:
        each = np.stack([loss[level] for level in levels], axis=1)
        known = among & ~np.isnan(each[:, 0])
        found.append(risk_threshold(confidence[known], each[known], alpha))
    real = [threshold for threshold in found if threshold is not None]
    return max(real) if real and len(real) == len(found) else None

"""Thresholds of early exits keep the loss they were asked to keep; gates are logistic models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.index.build.risk import (
    Array,
    choose_exits,
    confidences,
    first_exit,
    fit_gate,
    risk_threshold,
)
from hivlp.index.early_exit import SIGNALS

MARGIN = SIGNALS.index("margin3")


def slow_threshold(confidence: Array, losses: Array, alpha: float) -> float | None:
    """Theorem 1 of arXiv 2208.02814 read literally, one threshold and one query at a time."""
    best = None
    count = len(confidence)
    thresholds = sorted({float(c) for c in confidence.ravel()}, reverse=True)
    for t in thresholds:
        total = 0.0
        for own, lost in zip(confidence, losses, strict=True):
            at = []  # the loss at t and at every higher threshold
            for higher in (u for u in thresholds if u >= t):
                stop = next((i for i, c in enumerate(own) if c >= higher), None)
                at.append(0.0 if stop is None else float(lost[stop]))
            total += max(at)
        if (total + 1) / (count + 1) <= alpha:
            best = t
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.floats(0.01, 0.6), st.integers(0, 10_000))
def test_the_threshold_is_the_one_of_the_theorem(
    count: int, levels: int, alpha: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random((count, levels)), 1)  # with ties
    losses = rng.choice([0.0, 0.0, 0.5, 1.0], (count, levels))
    expected = slow_threshold(confidence, losses, alpha)
    found = risk_threshold(confidence, losses, alpha)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected)


def test_too_few_queries_promise_nothing_even_without_a_loss() -> None:
    perfect = np.zeros((198, 1))
    assert risk_threshold(np.ones((198, 1)), perfect, 0.005) is None
    assert risk_threshold(np.ones((199, 1)), np.zeros((199, 1)), 0.005) == 1.0
    assert risk_threshold(np.zeros((0, 1)), np.zeros((0, 1)), 0.005) is None


def test_queries_like_those_of_the_sample_lose_no_more_than_was_asked() -> None:
    rng = np.random.default_rng(3)
    alpha, lost = 0.05, []
    for _ in range(300):
        confidence = rng.random((161, 2))
        losses = (rng.random((161, 2)) > 0.5 + confidence / 2).astype(float)
        threshold = risk_threshold(confidence[:160], losses[:160], alpha)
        assert threshold is not None
        stop = int(first_exit(confidence[160:], threshold)[0])
        lost.append(float(losses[160, stop]) if stop < 2 else 0.0)
    # The mean of 300 trials of expectation at most .05 is under .09 but once in a thousand times.
    assert np.mean(lost) < 0.09


def test_first_exit_is_the_coarsest_level_that_is_sure() -> None:
    confidence = np.array([[0.9, 0.1], [0.1, 0.9], [0.9, 0.9], [0.1, 0.1]])
    assert first_exit(confidence, 0.5).tolist() == [0, 1, 0, 2]


def test_a_gate_is_at_the_top_of_its_penalised_likelihood() -> None:
    rng = np.random.default_rng(0)
    signals = rng.standard_normal((400, len(SIGNALS)))
    harmless = (rng.random(400) < 1 / (1 + np.exp(-2 * signals[:, MARGIN] - 1))).astype(float)
    gate = fit_gate(signals, harmless, ("margin3", "top"))
    used = [MARGIN, SIGNALS.index("top")]
    mean, scale = signals[:, used].mean(0), signals[:, used].std(0)
    design = np.hstack([(signals[:, used] - mean) / scale, np.ones((400, 1))])

    def likelihood(weights: Array) -> float:
        chance = 1 / (1 + np.exp(-design @ weights))
        logs = harmless * np.log(chance) + (1 - harmless) * np.log(1 - chance)
        penalty = 0.5 * (np.array([1.0, 1.0, 1e-3]) * weights**2).sum()
        return float(logs.sum() - penalty)

    own = np.array(gate.weights)[used] * scale
    best = np.array([*own, gate.bias + np.array(gate.weights)[used] @ mean])
    for step in np.vstack([np.eye(3), -np.eye(3)]) * 0.05:
        assert likelihood(best) > likelihood(best + step)
    assert [w for i, w in enumerate(gate.weights) if i not in used] == [0.0] * (len(SIGNALS) - 2)


def test_a_sample_that_never_loses_has_a_finite_gate_that_is_sure() -> None:
    signals = np.random.default_rng(1).standard_normal((50, len(SIGNALS)))
    gate = fit_gate(signals, np.ones(50), SIGNALS)
    assert np.isfinite([*gate.weights, gate.bias]).all()
    assert confidences(gate, signals).min() > 0.9


def test_a_query_without_enough_rows_is_never_sure_and_teaches_nothing() -> None:
    signals = np.random.default_rng(1).standard_normal((50, len(SIGNALS)))
    labels = (signals[:, MARGIN] > 0).astype(float)
    blank = np.vstack([signals, np.full((5, len(SIGNALS)), np.nan)])
    gate = fit_gate(blank, np.concatenate([labels, np.ones(5)]), ("margin3",))
    assert gate == fit_gate(signals, labels, ("margin3",))
    assert (confidences(gate, blank)[-5:] == -1).all()
    nobody = fit_gate(blank[-5:], np.ones(5), ("margin3",))
    assert nobody.weights == (0.0,) * len(SIGNALS)


def test_both_measures_are_kept_and_the_margin_tells_who_may_stop() -> None:
    rng = np.random.default_rng(5)
    count = 2_000
    signals = rng.standard_normal((count, len(SIGNALS)))
    harm = (signals[:, MARGIN] < -0.5).astype(float)
    rare = np.where(np.arange(count) % 2 == 0, np.nan, 0.0)  # half have no right answer
    chosen = choose_exits(
        {1: signals}, [{1: harm}, {1: rare}], {1: ("margin3",)}, np.arange(count) % 5, 0.005
    )
    assert chosen.threshold is not None
    stopped = chosen.exits == 0
    assert harm[stopped].mean() * stopped.mean() <= 0.006
    assert stopped.mean() == pytest.approx((signals[:, MARGIN] >= -0.5).mean(), abs=0.02)
    harmed = choose_exits(
        {1: signals}, [{1: np.ones(count)}], {1: ("margin3",)}, np.arange(count) % 5, 0.005
    )
    assert harmed.threshold is None
    assert (harmed.exits == 1).all()


def test_queries_without_a_right_answer_teach_the_gate_nothing() -> None:
    rng = np.random.default_rng(2)
    signals = rng.standard_normal((800, len(SIGNALS)))
    answered = np.arange(800) % 3 == 0
    harm = (signals[:, MARGIN] < 0).astype(float)
    unknown = np.where(answered, harm, np.nan)
    folds = np.arange(800) % 5
    some = choose_exits({1: signals}, [{1: unknown}], {1: ("margin3",)}, folds, 0.05)
    alone = fit_gate(signals[answered], 1 - harm[answered], ("margin3",))
    assert some.gates[1].weights == pytest.approx(alone.weights)


def test_confidences_of_queries_that_can_not_stop_are_no_thresholds() -> None:
    confidence = np.full((300, 1), -1.0)
    assert risk_threshold(confidence, np.zeros((300, 1)), 0.005) is None
    confidence[:150] = 0.7
    assert risk_threshold(confidence, np.zeros((300, 1)), 0.005) == 0.7


def test_a_signal_that_never_varies_weighs_nothing() -> None:
    signals = np.random.default_rng(1).standard_normal((100, len(SIGNALS)))
    signals[:, 0] = 0.9
    gate = fit_gate(signals, (signals[:, MARGIN] > 0).astype(float), SIGNALS)
    assert gate.weights[0] == 0.0
    assert np.abs(gate.weights).max() < 100

"""When a level is already sure of the answer: the rule by which a cascade stops early.

    rule.sure(level, found, before)     # True: answer with what this level found

A gate turns what a level found into a confidence, the chance that later levels would not answer
better; where it reaches the rule's threshold, the cascade stops and later stages of the encoder
need not run. Gates and threshold are measured on the index (`build/exits.py`), never constants.
Notable: every signal is read from the first `DEPTH` rows, which any plan that may stop keeps at
every level, so that it means the same whatever k was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hivlp.index.candidates import Candidates

DEPTH = 11
"""Rows that the signals are read from: ten, and the one that came too late for them."""
COMPARED = 10
SIGNALS = ("top", "margin2", "margin3", "margin10", "edge", "overlap", "same_first")
"""Of one level: its best score; how far the second, the third and the tenth are below; how far the
eleventh is below the tenth; of its first ten, the share that the level before had among its own;
whether both put the same row first."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A logistic model over `SIGNALS`: `weights` has one number a signal, 0 for those unused."""

    weights: tuple[float, ...]
    bias: float

    def confidence(self, signals: tuple[float, ...]) -> float:
        """From 0 to 1: the chance that later levels would not answer better."""
        pairs = zip(self.weights, signals, strict=True)
        return sigmoid(self.bias + sum(weight * signal for weight, signal in pairs))


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Gates by level; the cascade stops at the first whose confidence reaches `threshold`."""

    threshold: float
    gates: Mapping[int, Gate]

    def sure(self, level: int, found: Candidates, before: Candidates | None) -> bool:
        """Whether to answer with what `level` found; `before` is what the level before it found.

        Never with fewer rows than the signals are read from.
        """
        return self.confidence(level, found, before) >= self.threshold

    def confidence(self, level: int, found: Candidates, before: Candidates | None) -> float:
        """From 0 to 1: the chance that later levels would not answer better.

        -inf, under every threshold, without a gate or with too few rows to read signals from.
        """
        gate = self.gates.get(level)
        if gate is None or len(found) < DEPTH:
            return -math.inf
        return gate.confidence(exit_signals(found, before))


def exit_signals(found: Candidates, before: Candidates | None) -> tuple[float, ...]:
    """`SIGNALS` of one level's candidates, of which there are at least `DEPTH`.

    The last two are 0 at the first level, which has none before it.
    """
    assert len(found) >= DEPTH, len(found)
    scores = found.scores[:DEPTH].tolist()
    first, tenth = scores[0], scores[COMPARED - 1]
    overlap = same = 0.0
    if before is not None and len(before):
        rows, earlier = found.rows[:COMPARED].tolist(), before.rows[:COMPARED].tolist()
        overlap = len(set(rows) & set(earlier)) / COMPARED
        same = float(rows[0] == earlier[0])
    margins = (first - scores[1], first - scores[2], first - tenth)
    return (first, *margins, tenth - scores[COMPARED], overlap, same)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

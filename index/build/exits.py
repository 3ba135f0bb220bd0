"""Early exit, measured: what each query of a direction would lose by stopping at a level.

    record = measure_exits(direction, plan, graphs, best)

The cascade is run as it is served, with the widths that were just measured; what a level found is
compared with what the whole cascade finds. Where enough queries have right answers, the loss is of
R@1 and of R@10, both; elsewhere of ANN recall@10. A query that has doubles in the gallery says
nothing: they take the places of what it should find. Of several sets of signals the one that saves
most of the encoder's time on held-out queries is taken, which flatters what it saves a little
(`risk.py` says how the threshold is chosen).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hivlp.index.build.directions import Direction
from hivlp.index.build.observe import blocks, own_rows, run_stages, without
from hivlp.index.build.risk import (
    FOLDS,
    Array,
    Chosen,
    IntArray,
    choose_exits,
    confidences,
    first_exit,
)
from hivlp.index.build.widths import share_found
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan
from hivlp.index.early_exit import COMPARED, DEPTH, SIGNALS, exit_signals
from hivlp.index.level_index import LevelIndex
from hivlp.index.snapshot.manifest import ExitRecord, ExitTrial, GateRecord, Loss

MOST_LOST = 0.005
"""What stopping early may cost: half a point of R@1, and of R@10, or of ANN recall@10."""
MENUS: Mapping[str, tuple[str, ...]] = {
    "margin": ("margin3",),
    "agreement": ("margin3", "overlap", "same_first"),
    "gate": SIGNALS,
}
"""What a gate may look at. At the first level there is no agreement yet, only the margin."""
RECALLS = ("r1", "r10", "ann10")
LOSSES: Mapping[Loss, tuple[str, ...]] = {"retrieval": ("r1", "r10"), "ann": ("ann10",)}


@dataclass(slots=True)
class _Seen:
    """Signals and recalls of every query: by level, the last level's being the whole cascade's.

    `recalls[name][level]` is (n,) from 0 to 1, NaN where the query has no right answer.
    """

    signals: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)
    recalls: dict[str, dict[int, list[float]]] = field(
        default_factory=lambda: {name: {} for name in RECALLS}
    )

    def array(self, name: str, level: int) -> Array:
        """One recall at one level, (n,)."""
        return np.array(self.recalls[name][level])


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule on given queries: `trial` (its shares, savings and recalls), the recalls of the `full`
    cascade, and what each query `lost`, by measure, (n,), NaN where it has no right answer."""

    trial: ExitTrial
    full: dict[str, float | None]
    lost: dict[str, Array]


def measure_exits(
    direction: Direction,
    plan: Plan,
    graphs: Mapping[int, LevelIndex],
    best: Sequence[Candidates],
) -> ExitRecord | None:
    """Thresholds for one direction's cascade, or None where it has no level to stop at.

    `best[i]` is what query i finds by exhaustive search of the finest level, at least `DEPTH` rows.
    """
    levels = [stage.level for stage in plan.stages]
    if len(levels) < 2 or direction.size <= DEPTH or direction.count < 2 * FOLDS:
        return None
    seen = _look(direction, plan, graphs, best)
    paired = enough_answers(seen.array("r1", levels[-1]))
    names = LOSSES["retrieval" if paired else "ann"]
    losses = [_losses(seen, name, levels) for name in names]
    signals = {level: np.array(seen.signals[level]) for level in levels[:-1]}
    saved = _saved(levels, direction.encode_ms)
    tried: list[tuple[ExitTrial, Chosen]] = []
    for name, menu in MENUS.items():
        used = {level: _used(menu, first=level == levels[0]) for level in levels[:-1]}
        chosen = choose_exits(signals, losses, used, direction.folds(FOLDS), MOST_LOST)
        tried.append((_trial(name, chosen.exits, seen, levels, saved), chosen))
    trial, chosen = max(tried, key=lambda pair: (pair[1].threshold is not None, pair[0].saved))
    return ExitRecord(
        searched=direction.searched,
        query=direction.query,
        signal=trial.signal,
        loss="retrieval" if paired else "ann",
        most_lost=MOST_LOST,
        threshold=chosen.threshold,
        gates=tuple(
            GateRecord(level=level, weights=gate.weights, bias=gate.bias)
            for level, gate in sorted(chosen.gates.items())
        ),
        queries=direction.count,
        full={name: _mean(seen.array(name, levels[-1])) for name in RECALLS},
        tried=tuple(one for one, _ in tried),
    )


def apply_rule(
    direction: Direction,
    plan: Plan,
    graphs: Mapping[int, LevelIndex],
    best: Sequence[Candidates],
    loss: Loss,
) -> Applied:
    """What a plan's own rule does with queries that it was not chosen on, losing of `loss`."""
    assert plan.exits is not None, "a plan that may stop early"
    levels = [stage.level for stage in plan.stages]
    seen = _look(direction, plan, graphs, best)
    sure = np.full((direction.count, len(levels) - 1), -1.0)
    for place, level in enumerate(levels[:-1]):
        if level in plan.exits.gates:
            sure[:, place] = confidences(plan.exits.gates[level], np.array(seen.signals[level]))
    exits = first_exit(sure, plan.exits.threshold)
    names = LOSSES[loss]
    lost = [_at(_padded(_losses(seen, name, levels), levels), exits) for name in names]
    saved = _saved(levels, direction.encode_ms)
    return Applied(
        trial=_trial("", exits, seen, levels, saved),
        full={name: _mean(seen.array(name, levels[-1])) for name in RECALLS},
        lost=dict(zip(names, lost, strict=True)),
    )


def _padded(losses: Mapping[int, Array], levels: Sequence[int]) -> Array:
    """(n, levels): the last level loses nothing."""
    columns = [losses[level] for level in levels[:-1]]
    return np.stack([*columns, np.where(np.isnan(columns[0]), np.nan, 0.0)], axis=1)


def _at(table: Array, exits: IntArray) -> Array:
    """Each row's number in the column of its exit: (n,)."""
    picked: Array = table[np.arange(len(exits)), exits]
    return picked


def _look(
    direction: Direction,
    plan: Plan,
    graphs: Mapping[int, LevelIndex],
    best: Sequence[Candidates],
) -> _Seen:
    """Run the cascade for every query, looking at what each level found."""
    seen = _Seen()
    own = own_rows(direction, best)
    for block in blocks(direction):
        before: list[Candidates] | None = None
        for level, found in run_stages(direction, plan, graphs, block):
            others = [without(f, o, DEPTH) for f, o in zip(found, own[block], strict=True)]
            for place, other in enumerate(others):
                number = block.start + place
                earlier = before[place] if before else None
                seen.signals.setdefault(level, []).append(_signals(other, earlier))
                _note(seen, level, _recalls(direction, number, other, best[number], own[number]))
            before = others
    return seen


def _signals(found: Candidates, before: Candidates | None) -> tuple[float, ...]:
    """The signals; NaN, which is never sure, where the query's doubles left too few rows."""
    if len(found) < DEPTH:
        return (float("nan"),) * len(SIGNALS)
    return exit_signals(found, before)


def _recalls(
    direction: Direction, number: int, found: Candidates, best: Candidates, own: RowArray
) -> tuple[float, float, float]:
    """One query's `RECALLS` if it were answered with what was found; NaN with doubles."""
    if len(own) > 1:
        return (float("nan"),) * 3
    rank = None if direction.answers is None else direction.answers.rank(number, found.rows)
    scores = direction.finest.score(direction.finest_queries[number], found.rows)
    ann = share_found(Candidates(found.rows, scores), best, own, COMPARED)
    if rank is None:
        return float("nan"), float("nan"), ann
    return float(rank <= 1), float(rank <= COMPARED), ann


def _note(seen: _Seen, level: int, recalls: tuple[float, ...]) -> None:
    for name, value in zip(RECALLS, recalls, strict=True):
        seen.recalls[name].setdefault(level, []).append(value)


def enough_answers(known: Array) -> bool:
    """Whether so many queries have right answers that something can be promised of them."""
    return int((~np.isnan(known)).sum()) >= math.ceil(1 / MOST_LOST) - 1


def _losses(seen: _Seen, name: str, levels: Sequence[int]) -> dict[int, Array]:
    """What each query loses of one recall by stopping at each level but the last."""
    full = seen.array(name, levels[-1])
    return {level: np.maximum(full - seen.array(name, level), 0) for level in levels[:-1]}


def _used(menu: Sequence[str], *, first: bool) -> tuple[str, ...]:
    """The menu, at the first level without what needs a level before it."""
    return tuple(name for name in menu if not (first and name in ("overlap", "same_first")))


def _saved(levels: Sequence[int], encode_ms: Sequence[float]) -> Array:
    """Share of the encoder's time that need not be spent, by the place of the exit; last 0."""
    stages = np.array(encode_ms if encode_ms else np.ones(max(levels)))
    return np.array([stages[level:].sum() / stages.sum() for level in levels])


def _trial(
    name: str, exits: IntArray, seen: _Seen, levels: Sequence[int], saved: Array
) -> ExitTrial:
    """Shares and recalls of queries whose exits were decided without them."""
    recalls = {}
    for recall in RECALLS:
        table = np.stack([seen.array(recall, level) for level in levels], axis=1)
        recalls[recall] = _mean(_at(table, exits))
    return ExitTrial(
        signal=name,
        shares={
            level: round(float((exits == place).mean()), 4)
            for place, level in enumerate(levels[:-1])
        },
        saved=round(float(saved[exits].mean()), 4),
        recalls=recalls,
    )


def _mean(values: Array) -> float | None:
    """The mean of what is known, or None."""
    known = values[~np.isnan(values)]
    return round(float(known.mean()), 4) if len(known) else None

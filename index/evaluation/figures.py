"""From ranks, query by query, to figures with intervals.

R@K is the share of queries whose rank is at most K. AR is the mean of the R@K of both cross-modal
directions, six numbers with K = 1, 5, 10; RSUM is their sum in percent. Over folds every figure is
the mean of the folds' figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hivlp.index.evaluation.bootstrap import RESAMPLES, Column, Numbers, interval, resampled
from hivlp.index.evaluation.counting import Counts
from hivlp.index.evaluation.measure import LEVEL, Scored, Stages
from hivlp.index.evaluation.report import (
    DirectionReport,
    Figure,
    SummaryReport,
    SystemReport,
    ThresholdReport,
    WidthReport,
)
from hivlp.index.evaluation.tally import EARLY, Tally
from hivlp.models.levels import Modality

AT = (1, 5, 10)
ANN_TARGET = 0.99
WIDTHS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
THRESHOLDS = 21
CROSS: tuple[tuple[Modality, Modality], ...] = (("text", "image"), ("image", "text"))
"""The directions of AR and RSUM: (query, searched)."""
Key = tuple[Modality, Modality, str, str]
"""(query, searched, system, figure)"""


class Figures:
    """All figures of some directions, and their spread over the same draws of items."""

    def __init__(
        self, tallies: Sequence[Tally], at: Sequence[int] = AT, resamples: int = RESAMPLES
    ) -> None:
        self._at = tuple(at)
        self.columns = dict(_columns(tallies, self._at))
        self._values = {key: column.figure() for key, column in self.columns.items()}
        self._spread: dict[Key, Numbers] = {}
        if resamples:
            spread = resampled(list(self.columns.values()), resamples)
            self._spread = dict(zip(self.columns, spread.T, strict=True))

    def system(self, tally: Tally, name: str) -> SystemReport:
        """One system of one direction."""
        key = (tally.query, tally.searched, name)
        ann = (*key, "ANN@10")
        shares = None
        if name == EARLY and tally.stages is not None and tally.threshold is not None:
            shares = _shares(tally.stages, tally.threshold)
        return SystemReport(
            recalls={k: self._figure([(*key, f"R@{k}")]) for k in self._at},
            ann10=self._figure([ann]) if ann in self.columns else None,
            keeps=tally.keeps.get(name, ()),
            shares=shares,
            threshold=None if shares is None else tally.threshold,
        )

    def summary(self) -> dict[str, SummaryReport]:
        """AR and RSUM of every system that was measured in both directions."""
        names = dict.fromkeys(system for _, _, system, _ in self.columns)
        keys = {name: six(name, self._at) for name in names}
        keys = {name: own for name, own in keys.items() if all(k in self.columns for k in own)}
        exact = finest(keys)
        return {
            name: SummaryReport(
                ar=self._figure(own, 100.0),
                rsum=self._figure(own, 100.0 * len(own), 2),
                apart=None if name == exact or exact is None else self._apart(own, keys[exact]),
            )
            for name, own in keys.items()
        }

    def _figure(self, keys: Sequence[Key], times: float = 1.0, digits: int = 4) -> Figure:
        """The mean of some columns, `times` over."""
        value = times * float(np.mean([self._values[key] for key in keys]))
        if not self._spread:
            return Figure(round(value, digits))
        return _between(value, times * self._mean(keys), digits)

    def _apart(self, keys: Sequence[Key], others: Sequence[Key]) -> Figure:
        """The mean of some columns less that of others, in percent."""
        own, other = (float(np.mean([self._values[key] for key in k])) for k in (keys, others))
        if not self._spread:
            return Figure(round(100 * (own - other), 4))
        return _between(100 * (own - other), 100 * (self._mean(keys) - self._mean(others)), 4)

    def _mean(self, keys: Sequence[Key]) -> Numbers:
        """The mean of some columns in every draw: (resamples,)."""
        mean: Numbers = np.mean([self._spread[key] for key in keys], axis=0)
        return mean


def _between(value: float, spread: Numbers, digits: int) -> Figure:
    low, high = interval(spread)
    return Figure(round(value, digits), round(low, digits), round(high, digits))


def finest(systems: Iterable[str]) -> str | None:
    """The finest of the levels among some systems; None where none is one."""
    levels = [int(name.removeprefix(LEVEL)) for name in systems if name.startswith(LEVEL)]
    return f"{LEVEL}{max(levels)}" if levels else None


def six(system: str, at: Sequence[int]) -> list[Key]:
    """The columns that AR is the mean of."""
    return [(*direction, system, f"R@{k}") for direction in CROSS for k in at]


def direction_report(
    tally: Tally, figures: Figures, at: Sequence[int], widths: tuple[WidthReport, ...] = ()
) -> DirectionReport:
    """One direction's figures; `widths` were measured apart."""
    tops = tally.tops
    stages = tally.stages
    return DirectionReport(
        query=tally.query,
        searched=tally.searched,
        queries=len(tally),
        left_out=tally.left_out,
        rows=tally.rows,
        systems={name: figures.system(tally, name) for name in tally.systems},
        by_width={n: by_width(tops[n][max(tops[n])], max(tops[n])) for n in sorted(tops)},
        width_needed=width_needed(tops[min(tops)]) if tops else {},
        thresholds=tuple(threshold_curve(stages, at)) if stages is not None else (),
        widths=widths,
    )


def by_width(ranks: Counts, rows: int) -> dict[int, float]:
    """ANN recall@10 of a level's first K rows, by K, from the ranks there of the exact top 10."""
    flat = np.sort(ranks.ravel())
    return {
        width: round(float(np.searchsorted(flat, width, side="right")) / len(flat), 4)
        for width in WIDTHS
        if width <= rows
    }


def width_needed(sizes: Mapping[int, Counts]) -> dict[int, int]:
    """By gallery size, the K at which a level holds .99 of the exact top 10."""
    flat = {size: np.sort(ranks.ravel()) for size, ranks in sorted(sizes.items())}
    return {
        size: int(ranked[int(np.ceil(ANN_TARGET * len(ranked))) - 1])
        for size, ranked in flat.items()
    }


def threshold_curve(stages: Stages, at: Sequence[int]) -> Iterator[ThresholdReport]:
    """The early exit at thresholds over all there is to choose from, from sure to never mind."""
    known = stages.confidence[np.isfinite(stages.confidence)]
    if not len(known):
        return
    tried = np.unique(np.quantile(known, np.linspace(0, 1, THRESHOLDS), method="inverted_cdf"))
    for threshold in [*tried[::-1].tolist()]:
        scored = stages.at(stages.stopped(threshold))
        yield ThresholdReport(
            threshold=round(threshold, 6),
            shares=_shares(stages, threshold),
            recalls={k: round(float((scored.ranks <= k).mean()), 4) for k in at},
            ann10=round(float(scored.ann.mean()), 4),
        )


def _shares(stages: Stages, threshold: float) -> dict[int, float]:
    """Shares of queries that each level answers."""
    places = stages.stopped(threshold)
    return {
        level: round(float((places == place).mean()), 4)
        for place, level in enumerate(stages.levels)
    }


def _columns(tallies: Sequence[Tally], at: Sequence[int]) -> Iterator[tuple[Key, Column]]:
    for tally in tallies:
        items, folds = tally.items, tally.folds
        for name, scored in tally.systems.items():
            key = (tally.query, tally.searched, name)
            for figure, values in _figures(scored, at):
                yield (*key, figure), Column(values, items, folds)


def _figures(scored: Scored, at: Sequence[int]) -> Iterator[tuple[str, Numbers]]:
    """What is averaged over queries: (n,) each."""
    for k in at:
        yield f"R@{k}", (scored.ranks <= k).astype(np.float64)
    if not np.isnan(scored.ann).any():
        yield "ANN@10", scored.ann

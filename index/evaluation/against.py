"""Two evaluations of the same queries, subtracted: figures with paired intervals.

Queries are matched by name, direction and system; a figure counts the queries that both have. The
same draws of items serve both sides (`bootstrap.py`). Folds are not told apart: what is compared is
the mean over queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc

from hivlp.index.candidates import RowArray
from hivlp.index.evaluation.bootstrap import RESAMPLES, Column, Numbers, interval, resampled
from hivlp.index.evaluation.figures import AT, CROSS
from hivlp.index.evaluation.ranks_file import read_ranks
from hivlp.index.evaluation.report import DifferenceReport, Figure
from hivlp.models.levels import Modality

Group = tuple[Modality, Modality, str]
"""(query, searched, system)"""


@dataclass(frozen=True, slots=True)
class _Pair:
    """What both files say of the same n queries: the figures of one system, (n,) each.

    `overlap` (n,) are the shares of their answers that both give; None where one doesn't say.
    """

    items: RowArray
    ours: Mapping[str, Numbers]
    theirs: Mapping[str, Numbers]
    overlap: Numbers | None

    def column(self, values: Numbers) -> Column:
        return Column(values, self.items, np.zeros(len(self.items), np.int64))


@dataclass(frozen=True, slots=True)
class _Sides:
    """One figure of both, in percent, and the draws of each, (resamples,)."""

    ours: float
    theirs: float
    spread: Numbers

    @property
    def apart(self) -> Figure:
        return _figure(self.ours - self.theirs, self.spread)


def differences(
    ours: Path, theirs: Path, at: Sequence[int] = AT, resamples: int = RESAMPLES
) -> tuple[DifferenceReport, ...]:
    """Ours less theirs, in percent, for every direction and system that both files have; none
    where they have no query in common. Raises BuildError for a file that can't be read.
    """
    pairs = dict(_pairs(read_ranks(ours), read_ranks(theirs), at))
    if not pairs:
        return ()
    names = [(group, name) for group, pair in pairs.items() for name in pair.ours]
    columns = [
        pairs[group].column(side[name])
        for group, name in names
        for side in (pairs[group].ours, pairs[group].theirs)
    ]
    same = {group: pair.overlap for group, pair in pairs.items() if pair.overlap is not None}
    columns += [pairs[group].column(shares) for group, shares in same.items()]
    values = 100 * np.array([column.figure() for column in columns])
    spread = 100 * (resampled(columns, resamples) if resamples else np.empty((0, len(columns))))
    sides = {
        name: _Sides(values[2 * n], values[2 * n + 1], spread[:, 2 * n] - spread[:, 2 * n + 1])
        for n, name in enumerate(names)
    }
    first = 2 * len(names)
    overlaps = {
        group: _figure(values[first + n], spread[:, first + n]) for n, group in enumerate(same)
    }
    reports = (
        _report(group, len(pair.items), {n: sides[group, n] for n in pair.ours}, overlaps)
        for group, pair in pairs.items()
    )
    return (*reports, *_both(pairs, sides, at))


def _report(
    group: Group, queries: int, sides: Mapping[str, _Sides], overlaps: Mapping[Group, Figure]
) -> DifferenceReport:
    return DifferenceReport(
        *group,
        queries=queries,
        figures={name: own.apart for name, own in sides.items()},
        ours={name: round(own.ours, 4) for name, own in sides.items()},
        theirs={name: round(own.theirs, 4) for name, own in sides.items()},
        overlap10=overlaps.get(group),
    )


def _both(
    pairs: Mapping[Group, _Pair], sides: Mapping[tuple[Group, str], _Sides], at: Sequence[int]
) -> Iterator[DifferenceReport]:
    """The difference in AR of every system that has both cross-modal directions."""
    for system in dict.fromkeys(group[2] for group in pairs):
        groups: list[Group] = [(*direction, system) for direction in CROSS]
        if all(group in pairs for group in groups):
            each = [sides[group, f"R@{k}"] for group in groups for k in at]
            ar = _Sides(
                float(np.mean([own.ours for own in each])),
                float(np.mean([own.theirs for own in each])),
                np.mean([own.spread for own in each], axis=0),
            )
            yield DifferenceReport(
                None,
                None,
                system,
                sum(len(pairs[group].items) for group in groups),
                {"AR": ar.apart},
                {"AR": round(ar.ours, 4)},
                {"AR": round(ar.theirs, 4)},
            )


def _figure(value: float, spread: Numbers) -> Figure:
    if not len(spread):
        return Figure(round(value, 4))
    low, high = interval(spread)
    return Figure(round(value, 4), round(low, 4), round(high, 4))


def _pairs(ours: Any, theirs: Any, at: Sequence[int]) -> Iterator[tuple[Group, _Pair]]:
    items = ours.column("item")
    ours = ours.append_column("code", pc.index_in(items, pc.unique(items)))
    known = set(_groups(theirs))
    for group in _groups(ours):
        if group in known:
            pair = _pair(_of(ours, group), _of(theirs, group), at)
            if len(pair.items):
                yield group, pair


def _groups(table: Any) -> list[Group]:
    found = table.group_by(["from", "to", "system"], use_threads=False).aggregate([]).to_pylist()
    return [cast(Group, (row["from"], row["to"], row["system"])) for row in found]


def _of(table: Any, group: Group) -> Any:
    """The rows of one direction and system."""
    for name, value in zip(("from", "to", "system"), group, strict=True):
        table = table.filter(pc.equal(table.column(name), value))
    return table


def _pair(ours: Any, theirs: Any, at: Sequence[int]) -> _Pair:
    """The queries that both have."""
    place = pc.index_in(ours.column("query"), theirs.column("query"))
    mine = ours.filter(pc.is_valid(place))
    other = theirs.take(pc.drop_null(place))
    items = mine.column("code").to_numpy().astype(np.int64)
    left, right = _figures(mine, at), _figures(other, at)
    both = [name for name in left if name in right]
    overlap = _overlap(mine.column("found"), other.column("found"))
    return _Pair(items, {n: left[n] for n in both}, {n: right[n] for n in both}, overlap)


def _overlap(ours: Any, theirs: Any) -> Numbers | None:
    """(n,): the share of two lists of answers that is in both; None where one isn't known."""
    if ours.null_count or theirs.null_count:
        return None
    shares = (
        len(set(left) & set(right)) / max(len(left), len(right), 1)
        for left, right in zip(ours.to_pylist(), theirs.to_pylist(), strict=True)
    )
    return np.fromiter(shares, np.float64, len(ours))


def _figures(table: Any, at: Sequence[int]) -> dict[str, Numbers]:
    """(n,) each; a rank that is null is one beyond every K."""
    ranks = table.column("rank").to_numpy()
    found = {f"R@{k}": (~np.isnan(ranks) & (ranks <= k)).astype(np.float64) for k in at}
    ann = table.column("ann10").to_numpy()
    if not np.isnan(ann).any():
        found["ANN@10"] = ann
    return found

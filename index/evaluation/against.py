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
    """What both files say of the same n queries: the figures of one system, (n,) each."""

    items: RowArray
    ours: Mapping[str, Numbers]
    theirs: Mapping[str, Numbers]


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
        Column(side[name], pairs[group].items, np.zeros(len(pairs[group].items), np.int64))
        for group, name in names
        for side in (pairs[group].ours, pairs[group].theirs)
    ]
    values = np.array([column.figure() for column in columns])
    spread = resampled(columns, resamples) if resamples else np.empty((0, len(columns)))
    value = dict(zip(names, 100 * (values[::2] - values[1::2]), strict=True))
    apart = dict(zip(names, 100 * (spread[:, ::2] - spread[:, 1::2]).T, strict=True))
    reports = [
        DifferenceReport(
            *group,
            queries=len(pair.items),
            figures={n: _figure(value[group, n], apart[group, n]) for n in pair.ours},
        )
        for group, pair in pairs.items()
    ]
    return (*reports, *_both(pairs, value, apart, at))


def _both(
    pairs: Mapping[Group, _Pair],
    value: Mapping[tuple[Group, str], float],
    apart: Mapping[tuple[Group, str], Numbers],
    at: Sequence[int],
) -> Iterator[DifferenceReport]:
    """The difference in AR of every system that has both cross-modal directions."""
    for system in dict.fromkeys(group[2] for group in pairs):
        groups: list[Group] = [(*direction, system) for direction in CROSS]
        if all(group in pairs for group in groups):
            keys = [(group, f"R@{k}") for group in groups for k in at]
            queries = sum(len(pairs[group].items) for group in groups)
            spread = np.mean([apart[key] for key in keys], axis=0)
            ar = _figure(float(np.mean([value[key] for key in keys])), spread)
            yield DifferenceReport(None, None, system, queries, {"AR": ar})


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
    return _Pair(items, {n: left[n] for n in both}, {n: right[n] for n in both})


def _figures(table: Any, at: Sequence[int]) -> dict[str, Numbers]:
    """(n,) each; a rank that is null is one beyond every K."""
    ranks = table.column("rank").to_numpy()
    found = {f"R@{k}": (~np.isnan(ranks) & (ranks <= k)).astype(np.float64) for k in at}
    ann = table.column("ann10").to_numpy()
    if not np.isnan(ann).any():
        found["ANN@10"] = ann
    return found

"""All that is measured of an index's directions, from queries encoded through every exit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from hivlp.index.backends.choose import open_graphs, open_level
from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.answers import answers_for
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.exits import measure_exits
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.retrieval import measure_pace, measure_retrieval
from hivlp.index.build.widths import KS, PLANS, exact_best, sweep
from hivlp.index.candidates import RowArray
from hivlp.index.cascade import Plan, PlanName, PlanRequest
from hivlp.index.early_exit import DEPTH, ExitRule
from hivlp.index.level_index import LevelIndex
from hivlp.index.plans import make_plan
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.manifest import (
    ExitRecord,
    PaceRecord,
    RetrievalRecord,
    WidthRecord,
    width_table,
)
from hivlp.models.levels import GalleryKind, LevelSpec, Modality
from hivlp.models.runtime.progress import Progress


class OpenSide(Protocol):
    """A gallery side that can be searched."""

    @property
    def rows(self) -> Mapping[int, LevelRows]:
        """Rows by level."""

    @property
    def levels(self) -> Mapping[int, LevelIndex]:
        """What scans and re-scores, by level."""

    @property
    def graphs(self) -> Mapping[int, LevelIndex]:
        """What graph stages walk, by level."""

    @property
    def row_items(self) -> RowArray:
        """The item of each row, (N,) int64."""


class StagedSide:
    """A side whose files were written but not published yet, opened."""

    def __init__(self, folder: Path, built: BuiltSide) -> None:
        self.rows = built.rows
        self.row_items = built.row_items
        self._codes: set[int] = set()
        self.levels: dict[int, LevelIndex] = {}
        for level, rows in built.rows.items():
            codes = folder / layout.faiss_file(built.modality, level)
            if codes.is_file():
                self._codes.add(level)
            codes_file = codes if level in self._codes else None
            self.levels[level] = open_level(level, rows, codes_file, "faiss-cpu")
        files = {n: folder / layout.graph_file(built.modality, n) for n in built.rows}
        there = {level: file for level, file in files.items() if file.is_file()}
        self.graphs = open_graphs(there, built.rows, self.levels)

    def has_codes(self, level: int) -> bool:
        """Whether the level was written as a FAISS file."""
        return level in self._codes


NEVER = ExitRule(math.inf, {})
"""Looks like a rule, and never stops: a plan with it keeps what one with a rule would."""


@dataclass(slots=True)
class Measured:
    """Records of every direction that there are queries for, and notes of what could not be had."""

    widths: list[WidthRecord] = field(default_factory=list)
    exits: list[ExitRecord] = field(default_factory=list)
    retrieval: list[RetrievalRecord] = field(default_factory=list)
    paces: list[PaceRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(
    sides: Mapping[Modality, OpenSide],
    queries: Mapping[Modality, QuerySet],
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
    *,
    groups: RowArray,
    quiet: bool,
) -> Measured:
    """Widths, early exits, R@K and the plan of `auto`, of every direction there are queries for.

    `groups` (items,): items of one number answer each other.
    """
    measured = Measured()
    directions = [(searched, query) for searched in sides for query in layout.SIDES]
    with Progress("measure widths", len(directions), "direction", quiet=quiet) as progress:
        for searched, query in directions:
            given = queries.get(query)
            if given is None:
                note = f"no {query} queries to measure {query} to {searched} with"
                measured.notes.append(note)
            else:
                side = sides[searched]
                direction = direction_of(side, searched, query, given, groups)
                _measure_direction(measured, direction, side.graphs, specs, gallery, target)
            progress.step()
    measured.notes += shortfalls(measured.widths)
    return measured


def direction_of(
    side: OpenSide, searched: Modality, query: Modality, given: QuerySet, groups: RowArray
) -> Direction:
    """Some queries against an opened side, with the answers that the corpus knows."""
    answers = own = None
    if given.from_corpus:
        same = query == searched
        answers = answers_for(given.ordinals, side.row_items, groups, same_side=same)
        own = _own_rows(side, given) if same else None
    return Direction(
        searched,
        query,
        given.outputs,
        side.rows,
        given.held_out,
        levels=side.levels,
        items=given.ordinals,
        answers=answers,
        encode_ms=given.encode_ms,
        own_rows=own,
    )


def _own_rows(side: OpenSide, given: QuerySet) -> RowArray:
    """The row that each query is: of its item's rows the nearest."""
    finest = max(side.rows)
    own = np.empty(len(given), np.int64)
    first = np.searchsorted(side.row_items, given.ordinals, side="left")
    last = np.searchsorted(side.row_items, given.ordinals, side="right")
    for i, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        rows = np.arange(begin, end)
        own[i] = rows[side.rows[finest].score(given.outputs[finest][i], rows).argmax()]
    return own


def _measure_direction(
    measured: Measured,
    direction: Direction,
    graphs: Mapping[int, LevelIndex],
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
) -> None:
    """Widths of the scan, beams where the side has graphs, and what both lead to.

    Nothing where a half is empty or there is but one level.
    """
    if not direction.halved:
        return
    best = exact_best(direction, specs[-1].level, min(max(KS), direction.size))
    widths = sweep(direction, specs, gallery, target, best)
    if graphs:
        widths += measure_beams(direction, graphs, best, KS, target)
    if not widths:
        return
    measured.widths += widths
    plans = {name: _plan(direction, graphs, specs, gallery, widths, name) for name in PLANS}
    early = _plan(direction, graphs, specs, gallery, widths, "cascade", exits=NEVER)
    exits = measure_exits(direction, early, graphs, best)
    pace = measure_pace(direction, plans, graphs)
    measured.exits += [exits] if exits is not None else []
    measured.paces += [pace] if pace is not None else []
    measured.retrieval += measure_retrieval(direction, plans, graphs, best)


def _plan(
    direction: Direction,
    graphs: Mapping[int, LevelIndex],
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    widths: Sequence[WidthRecord],
    name: PlanName,
    exits: ExitRule | None = None,
) -> Plan:
    """A plan of the family that serves, at the widths just measured, `DEPTH` rows deep.

    One row more where each query is itself in the gallery. With `exits` it keeps what a request
    that may stop early would.
    """
    need = min(DEPTH + (direction.query == direction.searched), direction.size)
    early = exits is not None
    return make_plan(
        PlanRequest(direction.searched, direction.query, need, name, early_exit=early),
        specs,
        width_table(widths, "scan"),
        direction.size,
        gallery=gallery,
        graphs=width_table(widths, "graph") if graphs else None,
        exits=exits,
    )


def shortfalls(records: Sequence[WidthRecord]) -> list[str]:
    """A line for each record whose target was not reached by queries it wasn't chosen on."""
    return [
        f"{r.query} to {r.searched}, {r.family} {r.plan}: ANN recall@{r.k} is "
        f"{r.recall_held_out:.4f} on held-out queries, under the target {r.target:g}"
        for r in records
        if not r.reached
    ]

"""Widths and beams of every direction of an index, from queries encoded through every exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hivlp.index.backends.choose import open_graph, open_level
from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.widths import KS, exact_best, sweep
from hivlp.index.level_index import LevelIndex
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.manifest import WidthRecord
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


class StagedSide:
    """A side whose files were written but not published yet, opened."""

    def __init__(self, folder: Path, built: BuiltSide, gallery: GalleryKind) -> None:
        self.rows = built.rows
        self._codes: set[int] = set()
        self.levels: dict[int, LevelIndex] = {}
        self.graphs: dict[int, LevelIndex] = {}
        for level, rows in built.rows.items():
            codes = folder / layout.faiss_file(built.modality, level)
            if codes.is_file():
                self._codes.add(level)
            codes_file = codes if level in self._codes else None
            self.levels[level] = open_level(level, rows, codes_file, "faiss-cpu")
            graph = folder / layout.graph_file(built.modality, level)
            if graph.is_file():
                rows_file = folder / layout.rows_file(built.modality, gallery, level)
                self.graphs[level] = open_graph(graph, rows, self.levels[level], rows_file)

    def has_codes(self, level: int) -> bool:
        """Whether the level was written as a FAISS file."""
        return level in self._codes


def measure(
    sides: Mapping[Modality, OpenSide],
    queries: Mapping[Modality, QuerySet],
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
    *,
    quiet: bool,
) -> tuple[list[WidthRecord], list[str]]:
    """Records of every direction that there are queries for, and notes of what could not be had."""
    records: list[WidthRecord] = []
    notes: list[str] = []
    directions = [(searched, query) for searched in sides for query in layout.SIDES]
    with Progress("measure widths", len(directions), "direction", quiet=quiet) as progress:
        for searched, query in directions:
            given = queries.get(query)
            if given is None:
                notes.append(f"no {query} queries to measure {query} to {searched} with")
            else:
                side = sides[searched]
                direction = Direction(
                    searched, query, given.outputs, side.rows, given.held_out, side.levels
                )
                records += measure_direction(direction, side.graphs, specs, gallery, target)
            progress.step()
    return records, notes + shortfalls(records)


def measure_direction(
    direction: Direction,
    graphs: Mapping[int, LevelIndex],
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
) -> list[WidthRecord]:
    """Widths of the scan, and beams where the side has graphs; none where a half is empty."""
    records = sweep(direction, specs, gallery, target)
    if graphs and direction.halved:
        best = exact_best(direction, specs[-1].level, min(max(KS), direction.size))
        records += measure_beams(direction, graphs, best, KS, target)
    return records


def shortfalls(records: Sequence[WidthRecord]) -> list[str]:
    """A line for each record whose target was not reached by queries it wasn't chosen on."""
    return [
        f"{r.query} to {r.searched}, {r.family} {r.plan}: ANN recall@{r.k} is "
        f"{r.recall_held_out:.4f} on held-out queries, under the target {r.target:g}"
        for r in records
        if not r.reached
    ]

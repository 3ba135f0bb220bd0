"""Evaluate an open version with queries from its own corpus.

    report, tallies = evaluate(store.open("default"), model, EvaluationSettings())

Two kinds of recall, never mixed. *R@K*: is a right item among the first K; any of an item's
captions is right, and so is any item of the same `group` where a metadata column is given. *ANN
recall@10*: the share of the exact top 10, by exhaustive search of the finest level, that is found.
A query that is itself in the gallery never counts as its own answer, in neither.

What is measured are the levels as they were built: a version with changes, which are searched
beside them, is refused (`check_unchanged`). Queries are encoded and measured CHUNK at a time; what
is kept is a few numbers a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hivlp.index.build.answers import item_groups
from hivlp.index.build.model import Model
from hivlp.index.candidates import RowArray
from hivlp.index.cascade import Plan
from hivlp.index.errors import BuildError, PlanError
from hivlp.index.evaluation.bootstrap import RESAMPLES
from hivlp.index.evaluation.figures import AT, CROSS, Figures, direction_report
from hivlp.index.evaluation.gallery import FoldGallery, Gallery
from hivlp.index.evaluation.measure import Measured, Measurer, results_of
from hivlp.index.evaluation.queries import SEED, chunks, encoded, query_ids, query_rows
from hivlp.index.evaluation.ranks_file import RanksWriter
from hivlp.index.evaluation.report import EvaluationReport, WidthReport
from hivlp.index.evaluation.reranked import RERANKED, Reranking, with_reranked
from hivlp.index.evaluation.sweep import QUERIES, sweep, widths_tried
from hivlp.index.evaluation.tally import Tally
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.levels import Modality
from hivlp.models.runtime.progress import Progress

Directions = tuple[tuple[Modality, Modality], ...]
DIRECTIONS: Directions = (
    ("text", "image"),
    ("image", "text"),
    ("image", "image"),
    ("text", "text"),
)
"""(query, searched)"""
Measurers = Mapping[tuple[Modality, Modality], Measurer]


@dataclass(frozen=True, slots=True)
class Folds:
    """`count` galleries of `size` items each, in the corpus's order: COCO's 1K is 5 of 1,000."""

    count: int
    size: int

    def slices(self, items: int) -> list[slice]:
        """The items of each fold. Raises PlanError where there are too few."""
        if self.count * self.size > items:
            raise PlanError(
                f"{self.count} folds of {self.size} items need {self.count * self.size}; the index "
                f"has {items}",
                param="folds",
                limit=items // self.size,
            )
        return [slice(n * self.size, (n + 1) * self.size) for n in range(self.count)]


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """`sample` is the most queries of a modality (None: all); `group` a metadata column, or None.

    `at` are the K of R@K; `folds` None is the full gallery; `keeps` the cascade's widths as (level,
    keep), none for its own; `only` a filter of the items whose queries count; `resamples` those of
    the bootstrap, 0 for no intervals. `rerank` is how many of the cascade's rows the model's
    re-ranker scores again (0: none); `sweep` measures the cascade at other widths too, on some of
    the cross-modal queries (not of folds).
    """

    sample: int | None = 2_000
    group: str | None = None
    at: tuple[int, ...] = AT
    folds: Folds | None = None
    keeps: tuple[tuple[int, int], ...] = ()
    only: object | None = None
    directions: Directions = DIRECTIONS
    resamples: int = RESAMPLES
    rerank: int = 0
    sweep: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The report, and what it was made of; `groups` (items,) tell which items are right.

    `measurers` gives those of a fold (0 where there are none), by direction.
    """

    report: EvaluationReport
    tallies: tuple[Tally, ...]
    searcher: LocalSearcher
    groups: RowArray
    measurers: Callable[[int], Measurers]


def evaluate(
    snapshot: Snapshot,
    model: Model,
    settings: EvaluationSettings = EvaluationSettings(),
    ranks: RanksWriter | None = None,
) -> Evaluation:
    """Measure an open snapshot, in both cross-modal directions, and within one modality where
    another right row exists for some query.

    Raises SpaceMismatch; PlanError for an unknown group, for folds or widths that don't fit;
    FilterError; BuildError for a version with changes, and where the model has no re-ranker and one
    is asked for.
    """
    manifest = snapshot.manifest
    check_unchanged(manifest)
    model.check_fits(manifest.gallery_space)
    run = _Run(snapshot, model, settings, ranks)
    run.all()
    measured = (run.tallies.get(direction) for direction in settings.directions)
    tallies = tuple(tally for tally in measured if tally is not None and len(tally))
    figures = Figures(tallies, settings.at, settings.resamples)
    report = EvaluationReport(
        index=manifest.index,
        version=manifest.version,
        model=model.name,
        items=manifest.items,
        group=settings.group,
        protocol=_protocol(settings),
        at=settings.at,
        unread=run.unread,
        directions=tuple(
            direction_report(tally, figures, settings.at, run.widths.get(tally.direction, ()))
            for tally in tallies
        ),
        summary=figures.summary(),
        failures=manifest.corpus.failures,
        reranked=settings.rerank if any(RERANKED in tally.keeps for tally in tallies) else 0,
        results=results_of(settings.at),
    )
    return Evaluation(report, tallies, run.searcher, run.groups, run.measurers)


def check_unchanged(manifest: SnapshotManifest) -> None:
    """Raises BuildError for a version with items that were put, deleted, replaced or erased since
    it was built: its levels alone are not what is searched.
    """
    pending = () if manifest.changes is None else manifest.changes.pending
    if not pending and layout.ERASED not in manifest.files:
        return
    way = "`hivlp build` takes them in"
    if manifest.imported is not None:
        way = "`hivlp import-vectors --forget-changes` leaves them out"
    raise BuildError(
        f"version {manifest.version!r} of index {manifest.index!r} has items that were put, "
        f"deleted or erased since it was built, and levels are measured as built: {way}, and "
        "--version names one from before"
    )


class _Run:
    """Goes through folds, query modalities and blocks of queries."""

    def __init__(
        self,
        snapshot: Snapshot,
        model: Model,
        settings: EvaluationSettings,
        ranks: RanksWriter | None,
    ) -> None:
        self._snapshot, self._model, self._settings = snapshot, model, settings
        self._ranks = ranks
        column = settings.group
        values = None if column is None else snapshot.catalogue.column(column)
        self.groups = item_groups(values, snapshot.manifest.items)
        self.searcher = LocalSearcher(snapshot, model.query_encoder)
        self._rows = query_rows(snapshot, model, settings.only, settings.sample)
        if settings.rerank and model.reranker is None:
            raise BuildError(f"rerank: the model {model.name!r} has no re-ranker")
        self._reranking: Reranking | None = None
        self.tallies: dict[tuple[Modality, Modality], Tally] = {}
        self.widths: dict[tuple[Modality, Modality], tuple[WidthReport, ...]] = {}
        self.unread = 0

    def all(self) -> None:
        """Measure everything."""
        folds = self._folds()
        total = sum(
            len(self._of(fold, query)) * self._passes(query)
            for fold in folds
            for query in self._queries()
        )
        with Progress("evaluate", total, "row", quiet=self._settings.quiet) as progress:
            if self._settings.rerank and self._model.reranker is not None:
                self._reranking = Reranking(
                    self.searcher, self._model.reranker, self.groups, progress.step
                )
            for number, fold in enumerate(folds):
                measurers = self.measurers(number)
                for query in self._queries():
                    rows = self._of(fold, query)
                    for chunk in chunks(rows):
                        own = {key: m for key, m in measurers.items() if key[0] == query}
                        self._chunk(query, chunk, own, number)
                        progress.step(len(chunk))
        if self._settings.sweep and self._settings.folds is None:
            self._sweep(measurers)

    def measurers(self, fold: int) -> Measurers:
        """What measures in a fold, by direction; 0 is all rows where there are no folds."""
        return dict(self._measurers(self._folds()[fold]))

    def _sweep(self, measurers: Measurers) -> None:
        """Other widths of the cascade, on some of the queries of both cross-modal directions."""
        at, rng = self._settings.at, np.random.default_rng(SEED)
        cross = {key: own for key, own in measurers.items() if key in CROSS}
        total = sum(
            widths_tried(own, key[0], at) * min(QUERIES, len(self._rows[key[0]]))
            for key, own in cross.items()
        )
        with Progress("widths", total, "row", quiet=self._settings.quiet) as progress:
            for (query, searched), measurer in cross.items():
                side, rows = self._snapshot.sides[query], self._rows[query]
                some = np.sort(rng.choice(rows, min(QUERIES, len(rows)), replace=False))
                sampled = encoded(self._snapshot, self._model, side, some)
                if sampled is not None:
                    groups = self.groups[side.row_items[sampled.own_rows]]
                    self.widths[query, searched] = sweep(
                        measurer, query, sampled, groups, at, progress.step
                    )

    def _folds(self) -> list[slice | None]:
        folds = self._settings.folds
        return [None] if folds is None else [*folds.slices(self._snapshot.manifest.items)]

    def _queries(self) -> list[Modality]:
        """The modalities that ask, each once."""
        sides = self._snapshot.sides
        asked = [q for q, s in self._settings.directions if q in sides and s in sides]
        return list(dict.fromkeys(asked))

    def _passes(self, query: Modality) -> int:
        """How often progress passes over the queries of a modality: once more to re-rank them."""
        pairs = (q == query and q != s for q, s in self._settings.directions)
        return 1 + (self._settings.rerank > 0 and any(pairs))

    def _of(self, fold: slice | None, query: Modality) -> RowArray:
        """The queries of a fold."""
        rows = self._rows[query]
        if fold is None:
            return rows
        items = self._snapshot.sides[query].row_items[rows]
        inside: RowArray = rows[(items >= fold.start) & (items < fold.stop)]
        return inside

    def _measurers(
        self, fold: slice | None
    ) -> Iterator[tuple[tuple[Modality, Modality], Measurer]]:
        sides, settings = self._snapshot.sides, self._settings
        galleries = {
            side: Gallery(self.searcher, side, self.groups)
            if fold is None
            else FoldGallery(self.searcher, side, self.groups, fold)
            for side in sides
        }
        for query, searched in settings.directions:
            if query in sides and searched in sides and galleries[searched].size:
                gallery = galleries[searched]
                depth = settings.rerank if query != searched else 0
                results = results_of(settings.at)
                measurer = Measurer(gallery, query, results, settings.keeps, depth)
                yield (query, searched), measurer

    def _chunk(
        self,
        query: Modality,
        rows: RowArray,
        measurers: Measurers,
        fold: int,
    ) -> None:
        side = self._snapshot.sides[query]
        sampled = encoded(self._snapshot, self._model, side, rows)
        if query == "image" and self._model.image is not None:
            self.unread += len(rows) - (0 if sampled is None else len(sampled.queries))
        if sampled is None:
            return
        items = side.row_items[sampled.own_rows]
        for direction, measurer in measurers.items():
            tally = self._tally(direction, measurer)
            measured = measurer.measure(sampled, items, self.groups[items])
            tally.left_out += len(items) - (0 if measured is None else len(measured))
            if measured is not None:
                if self._reranking is not None and direction[0] != direction[1]:
                    again = self._reranking.scored(measured, *direction)
                    measured = with_reranked(measured, again)
                self._write(direction, tally, measured, fold)
                tally.add(measured, fold)

    def _tally(self, direction: tuple[Modality, Modality], measurer: Measurer) -> Tally:
        if direction not in self.tallies:
            plans: dict[str, Plan] = dict(measurer.plans.items())
            if measurer.reranked is not None:
                plans[RERANKED] = measurer.reranked
            keeps = {name: tuple(s.keep for s in plan.stages) for name, plan in plans.items()}
            exits = None if measurer.early is None else measurer.early.exits
            threshold = None if exits is None else exits.threshold
            rows = measurer.gallery.size
            self.tallies[direction] = Tally(*direction, rows, keeps, threshold)
        return self.tallies[direction]

    def _write(
        self,
        direction: tuple[Modality, Modality],
        tally: Tally,
        measured: Measured,
        fold: int,
    ) -> None:
        if self._ranks is None:
            return
        side = self._snapshot.sides[direction[0]]
        names = (
            query_ids(self._snapshot, side, measured.rows),
            self._snapshot.catalogue.ids(measured.items),
        )
        for system, scored in tally.systems_of(measured).items():
            found = self._names(direction[1], measured.found.get(system))
            self._ranks.add(direction, system, fold, names, scored, found)

    def _names(self, searched: Modality, found: RowArray | None) -> list[list[str]] | None:
        """What rows of a side are called, of those that were found: (n, 10) in, -1 for none."""
        if found is None:
            return None
        known = found >= 0
        names = query_ids(self._snapshot, self._snapshot.sides[searched], found[known])
        ends = np.cumsum(known.sum(axis=1)).tolist()
        return [names[begin:end] for begin, end in pairwise([0, *ends])]


def _protocol(settings: EvaluationSettings) -> str:
    """What was searched, in words."""
    folds = settings.folds
    if folds is None:
        return "full gallery"
    return f"mean of {folds.count} folds of {folds.size} items"

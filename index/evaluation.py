"""How good an index is: retrieval recall and ANN recall, by direction, level and plan.

Two kinds of recall, never mixed. *R@K*: is a right item among the first K; ties never favour the
model (a right row counts behind every wrong row of the same score), any of an item's captions is
right, and so is any item of the same `group` where a metadata column is given. *ANN recall@10*: the
share of the exact top 10, by exhaustive search of the finest level, that a plan returns. A query
that is itself in the gallery never counts as its own answer, in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from hivlp.index.backends.rows import query_blocks
from hivlp.index.build.answers import item_groups
from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet, image_queries, text_queries
from hivlp.index.build.vectors.queries import vector_queries
from hivlp.index.build.widths import ROUNDING, ranks
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanName, PlanRequest
from hivlp.index.early_exit import DEPTH
from hivlp.index.evaluation_report import (
    DirectionReport,
    EarlyExitRecall,
    EvaluationReport,
    PlanRecall,
    RetrievalRecall,
)
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_early, run_plan
from hivlp.index.snapshot.snapshot import Side, Snapshot
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.levels import FloatArray, Modality

KS = (1, 5, 10)
ANN_K = 10
ANN_TARGET = 0.99
WIDTHS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
LEAST_GALLERY = 100
SEED = 11
PLANS: tuple[PlanName, ...] = ("cascade", "funnel")
DIRECTIONS: tuple[tuple[Modality, Modality], ...] = (
    ("text", "image"),
    ("image", "text"),
    ("image", "image"),
    ("text", "text"),
)
"""(query, searched)"""
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """`sample` is the most queries of a modality; `group` a metadata column, or None."""

    sample: int = 2_000
    group: str | None = None


def evaluate(snapshot: Snapshot, model: Model, settings: EvaluationSettings) -> EvaluationReport:
    """Measure an open snapshot with queries from its own corpus.

    Text to picture and picture to text; within one modality too, where another right row exists for
    some query. Raises SpaceMismatch, and PlanError for an unknown group.
    """
    manifest = snapshot.manifest
    model.check_fits(manifest.gallery_space)
    groups = _groups(snapshot, settings.group)
    queries, unread = sample_queries(snapshot, model, settings.sample)
    searcher = LocalSearcher(snapshot, model.query_encoder)
    reports = []
    for query, searched in DIRECTIONS:
        given = queries.get(query)
        if given is not None and searched in snapshot.sides:
            report = _Direction(searcher, query, searched, given, groups).report()
            reports += [report] if report.queries else []
    return EvaluationReport(
        index=manifest.index,
        version=manifest.version,
        model=model.name,
        items=manifest.items,
        group=settings.group,
        unread=unread,
        directions=tuple(reports),
    )


def pessimistic_rank(scores: FloatArray, right: BoolArray) -> float:
    """1 + how many wrong rows score at least as much as the best right one; inf without one."""
    if not right.any():
        return float("inf")
    best = scores[right].max() - ROUNDING
    return 1.0 + float(np.count_nonzero(scores[~right] >= best))


def plan_rank(exact: FloatArray, found: RowArray, right: BoolArray) -> float:
    """Pessimistic rank of the best right row among `found`; `exact` are every row's finest scores.

    Wrong rows that tie with it count although they were not found: only the row's number left them
    out.
    """
    rank = pessimistic_rank(exact[found], right[found])
    if np.isinf(rank):
        return rank
    tied = np.abs(exact - exact[found][right[found]].max()) <= ROUNDING
    tied[found] = False
    return rank + float(np.count_nonzero(tied & ~right))


def ann_recall(exact: FloatArray, found: RowArray, k: int = ANN_K) -> float:
    """Share of the exact top k among the first k `found`; `exact` are every row's finest scores.

    A row as good as the k-th counts as one of them.
    """
    k = min(k, len(exact))
    threshold = np.partition(exact, len(exact) - k)[len(exact) - k] - ROUNDING
    return float(np.count_nonzero(exact[found[:k]] >= threshold)) / k


@dataclass(frozen=True, slots=True)
class Sampled:
    """Queries and the row each one is in its own modality's side."""

    queries: QuerySet
    own_rows: RowArray


@dataclass(slots=True)
class _Tally:
    """What was counted, query by query."""

    ranks: dict[int, list[float]]
    plan_ranks: dict[PlanName, list[float]]
    ann: dict[PlanName, list[float]]
    widths: dict[int, list[RowArray]]
    early_ranks: list[float] = field(default_factory=list)
    early_ann: list[float] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    counted: int = 0
    left_out: int = 0


class _Direction:
    """Measures queries of one modality against one side, block by block."""

    def __init__(
        self,
        searcher: LocalSearcher,
        query: Modality,
        searched: Modality,
        sampled: Sampled,
        groups: RowArray,
    ) -> None:
        self._searcher = searcher
        self._query: Modality = query
        self._searched: Modality = searched
        self._side: Side = searcher.snapshot.sides[searched]
        self._sampled = sampled
        self._groups = groups
        self._row_groups = groups[self._side.row_items]
        need = max(KS) + (query == searched)
        self._plans: dict[PlanName, Plan] = {
            name: searcher.plan(PlanRequest(searched, query, need, name)) for name in PLANS
        }
        deep = max(need, DEPTH + (query == searched))
        early = searcher.plan(PlanRequest(searched, query, deep, early_exit=True))
        self._early = early if early.exits is not None else None
        rng = np.random.default_rng(SEED)
        self._galleries = {n: rng.permutation(self._side.size)[:n] for n in self._sizes()}

    def report(self) -> DirectionReport:
        tally = _Tally(
            ranks={level: [] for level in self._side.rows},
            plan_ranks={name: [] for name in PLANS},
            ann={name: [] for name in PLANS},
            widths={size: [] for size in self._galleries},
        )
        levels = self._side.rows
        for block in query_blocks(len(self._sampled.queries), self._side.size * len(levels)):
            outputs = self._sampled.queries.outputs
            scores = {n: rows.scan_many(outputs[n][block]) for n, rows in levels.items()}
            for i in range(len(scores[1])):
                self._count(block.start + i, {n: found[i] for n, found in scores.items()}, tally)
        return self._summary(tally)

    def _count(self, i: int, scores: Mapping[int, FloatArray], tally: _Tally) -> None:
        right, counted = self._right(i)
        if not right.any():
            tally.left_out += 1
            return
        tally.counted += 1
        coarse, exact = scores[min(scores)], scores[max(scores)]
        for level, found in scores.items():
            tally.ranks[level].append(pessimistic_rank(found[counted], right[counted]))
        wanted = np.where(counted, exact, -np.inf).astype(np.float32)
        k = min(ANN_K, int(counted.sum()))
        for size, gallery in self._galleries.items():
            tally.widths[size].append(_top_ranks(coarse[gallery], wanted[gallery], k))
        outputs = {n: out[i : i + 1] for n, out in self._sampled.queries.outputs.items()}
        for name, plan in self._plans.items():
            hits = run_plan(self._searcher, self._searched, plan, outputs)[0]
            others = hits.rows[counted[hits.rows]]
            tally.plan_ranks[name].append(plan_rank(wanted, others, right))
            tally.ann[name].append(ann_recall(wanted, others, k))
        if self._early is not None:
            answer, level = run_early(
                self._searcher, self._searched, self._early, outputs, seen=partial(_others, counted)
            )
            others = answer.rows[counted[answer.rows]]
            own = np.where(counted, scores[level], -np.inf).astype(np.float32)
            tally.early_ranks.append(plan_rank(own, others, right))
            tally.early_ann.append(ann_recall(wanted, others, k))
            tally.exits.append(level)

    def _summary(self, tally: _Tally) -> DirectionReport:
        by_width, needed = _width_curves(tally.widths) if tally.counted else ({}, {})
        plans = {
            name: PlanRecall(
                _recall(tally.plan_ranks[name]),
                round(float(np.mean(tally.ann[name])), 4),
                tuple(stage.keep for stage in plan.stages),
            )
            for name, plan in self._plans.items()
            if tally.counted
        }
        return DirectionReport(
            query=self._query,
            searched=self._searched,
            queries=tally.counted,
            left_out=tally.left_out,
            rows=self._side.size,
            levels={n: _recall(found) for n, found in tally.ranks.items() if tally.counted},
            plans=plans,
            by_width=by_width,
            width_needed=needed,
            early=_early(tally, sorted(self._side.rows)) if tally.exits else None,
        )

    def _right(self, i: int) -> tuple[BoolArray, BoolArray]:
        """Right rows of query i, and rows that count at all: not the query itself."""
        ordinal = self._sampled.queries.ordinals[i]
        counted = np.ones(self._side.size, dtype=np.bool_)
        if self._query == self._searched:
            counted[self._sampled.own_rows[i]] = False
        return (self._row_groups == self._groups[ordinal]) & counted, counted

    def _sizes(self) -> list[int]:
        """The whole side, a half, a quarter and so on, down to LEAST_GALLERY."""
        sizes = [self._side.size]
        while sizes[-1] // 2 >= LEAST_GALLERY:
            sizes.append(sizes[-1] // 2)
        return sizes


def _others(counted: BoolArray, found: Candidates) -> Candidates:
    """Candidates without the query itself."""
    kept = counted[found.rows]
    return Candidates(found.rows[kept], found.scores[kept])


def _early(tally: _Tally, levels: Sequence[int]) -> EarlyExitRecall:
    shares = {level: round(float(np.mean(np.array(tally.exits) == level)), 4) for level in levels}
    ann = round(float(np.mean(tally.early_ann)), 4)
    return EarlyExitRecall(_recall(tally.early_ranks), ann, shares)


def _width_curves(
    found: Mapping[int, Sequence[RowArray]],
) -> tuple[dict[int, float], dict[int, int]]:
    """ANN recall by K1, and K1 needed by N, from the ranks of the exact top rows in level 1."""
    flat = {size: np.sort(np.concatenate(list(ranked))) for size, ranked in found.items()}
    rows = max(flat)
    by_width = {
        width: round(float(np.searchsorted(flat[rows], width, side="right")) / len(flat[rows]), 4)
        for width in WIDTHS
        if width <= rows
    }
    needed = {
        size: int(ranked[int(np.ceil(ANN_TARGET * len(ranked))) - 1])
        for size, ranked in sorted(flat.items())
    }
    return by_width, needed


def _top_ranks(coarse: FloatArray, exact: FloatArray, k: int) -> RowArray:
    """Ranks by `coarse` (ties count against) of the best k rows by `exact`: (min(k, n),) int64."""
    k = min(k, len(exact))
    return ranks(coarse, coarse[np.argpartition(-exact, k - 1)[:k]])


def _recall(ranks: Sequence[float]) -> RetrievalRecall:
    return RetrievalRecall(*(round(float(np.mean([rank <= k for rank in ranks])), 4) for k in KS))


def _groups(snapshot: Snapshot, column: str | None) -> RowArray:
    """(items,) int64: items of one number are right for each other."""
    values = None if column is None else snapshot.catalogue.column(column)
    return item_groups(values, snapshot.manifest.items)


def sample_queries(
    snapshot: Snapshot, model: Model, limit: int, seed: int = SEED
) -> tuple[dict[Modality, Sampled], int]:
    """Up to `limit` captions and pictures of the snapshot, encoded through every exit; where
    vectors were imported and `model` encodes nothing, rows as they are.

    Besides, how many of the pictures could not be read.
    """
    rng = np.random.default_rng(seed)
    found: dict[Modality, Sampled] = {}
    unread = 0
    for side in snapshot.sides.values():
        said = side.modality == "text" and model.encodes
        rows = _sampled_rows(snapshot, side, limit, rng, said)
        ordinals = side.row_items[rows].tolist()
        queries = _encoded(snapshot, model, side, rows, ordinals)
        if side.modality == "image" and model.image is not None:
            unread = len(rows) - (0 if queries is None else len(queries))
        if queries is None:
            continue
        own = rows
        if side.modality == "image":  # one row an item; unreadable pictures dropped out
            own = np.searchsorted(side.row_items, queries.ordinals)
        found[side.modality] = Sampled(queries, own.astype(np.int64))
    return found, unread


def _sampled_rows(
    snapshot: Snapshot, side: Side, limit: int, rng: np.random.Generator, said: bool
) -> RowArray:
    """Some rows that can be found, ascending; where `said`, only those whose text isn't blank."""
    alive = None if snapshot.delta is None else snapshot.delta.alive(side.modality)
    there = side.size if alive is None else alive.count
    picked = np.sort(rng.choice(there, min(limit, there), replace=False)).astype(np.int64)
    rows = picked if alive is None else alive.rows[picked]
    if said and len(rows):
        rows = rows[[bool(side.texts[row].as_py().strip()) for row in rows.tolist()]]
    return rows


def _encoded(
    snapshot: Snapshot, model: Model, side: Side, rows: RowArray, ordinals: list[int]
) -> QuerySet | None:
    if not model.encodes:
        finest = side.rows[max(side.rows)].vectors(rows)
        return vector_queries(finest, snapshot.manifest.specs, rows, from_corpus=True)
    if side.modality == "text":
        return text_queries(model, [side.texts[int(row)].as_py() for row in rows], ordinals)
    images = snapshot.catalogue.images()
    refs = [images[ordinal] or "" for ordinal in ordinals]
    roots = picture_roots(snapshot.path.parent, snapshot.manifest.corpus.root)
    return image_queries(model, roots, refs, ordinals)

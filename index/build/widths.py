"""How many rows each level must keep: measured on this gallery with this model's early exits.

For each direction, plan and k in `KS`: the smallest widths at which one half of a sample of queries
surely keeps `target` of the exact top k (its mean less 1.645 standard errors), where exact means an
exhaustive search of the finest level with the finest query; what the other half keeps is reported.
The allowed loss is shared out evenly over the narrowing levels. Keeping every row loses nothing, so
the half that is chosen on can always reach the target.

Notable: a query that is itself in the gallery would find itself at any width and prove nothing, so
rows equal to the query are not among those it must keep. Widths never fall as k grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hivlp.index.backends.rows import LevelRows, query_blocks
from hivlp.index.build.confidence import recall_lower, sure_recall
from hivlp.index.build.directions import Direction
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanName, PlanRequest, Stage, run_stage
from hivlp.index.plans import make_plan, stage_query
from hivlp.index.snapshot.manifest import WidthRecord
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec

KS = (1, 10, 100)
PLANS: tuple[PlanName, ...] = ("cascade", "funnel")
GROWTH = 1.1
"""Widths tried are this much apart."""
WIDENING = 1.25
"""And these, where each try runs the plan."""
ROUNDING = 1e-6
"""Scores this near count as equal."""
AT_ONCE = 1_024
"""Queries whose scores of some rows are in memory together."""
ITSELF = 1 - 1e-5
"""From this cosine on a row is the query itself, or its double."""
HALF = 1e-3
"""The score of a row kept as fp16 may be so far from its cosine: its length is nearly one."""


def sweep(
    direction: Direction,
    levels: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
    best: Sequence[Candidates] | None = None,
) -> list[WidthRecord]:
    """Widths of every plan and k for one direction; none with an empty half or one level.

    `best` is what `exact_best` finds for the largest k, where it is known already.
    """
    if not direction.halved or len(levels) < 2:
        return []
    truth = exact_rows(direction, levels[-1].level, min(max(KS), direction.size), best)
    records = []
    asked, first = np.empty(0, np.float32), []
    for name in PLANS:
        request = PlanRequest(direction.searched, direction.query, need=1, name=name)
        plan = make_plan(request, levels, {}, direction.size, gallery=gallery)
        own = stage_query(
            plan.stages[0], direction.queries, direction.rows[plan.stages[0].level].dim
        )
        if not np.array_equal(own, asked):  # vectors' first query is the same in either plan
            asked, first = own, first_ranks(direction, plan, truth)
        keeps: tuple[int, ...] = (1,) * (len(plan.stages) - 1)
        for k in KS:
            wanted = [t[:k] for t in truth]
            keeps, shares = narrow(direction, plan, wanted, first, target, keeps)
            if not _exact(direction, plan):
                keeps, shares = _widen(direction, plan, wanted, keeps, target)
            records.append(_record(direction, name, k, keeps, shares, target))
    return records


def exact_rows(
    direction: Direction, finest: int, k: int, best: Sequence[Candidates] | None = None
) -> list[RowArray]:
    """The best k rows of every query by exhaustive search of the finest level, itself left out."""
    rows, queries = direction.rows[finest], direction.queries[finest]
    pairs = zip(best or exact_best(direction, finest, k), queries, strict=True)
    return [without_itself(best, itself(best, rows, query), k) for best, query in pairs]


def exact_best(direction: Direction, finest: int, k: int) -> list[Candidates]:
    """The best k + 1 rows of every query by exhaustive search of the finest level, itself too."""
    return _best(direction.rows[finest], direction.queries[finest], k + 1)


def itself(best: Candidates, rows: LevelRows, query: FloatArray) -> RowArray:
    """Which of the `best` rows of a finest query (dim,) are the query itself, or its doubles.

    None where there is nothing but such rows: then they stand.
    """
    near = best.rows[best.scores >= ITSELF - HALF]
    own: RowArray = near[np.vecdot(rows.vectors(near), query) >= ITSELF]
    return own if len(own) < len(best) else own[:0]


def without_itself(found: Candidates, own: RowArray, k: int) -> RowArray:
    """The best k rows of what was found, the query's `own` rows left out."""
    return found.rows[~np.isin(found.rows, own)][:k]


def share_found(found: Candidates, best: Candidates, own: RowArray, k: int) -> float:
    """Share of the best k rows that a search found, the query's `own` rows left out of both.

    Whatever is as good as the k-th counts as one of them: which of equal rows is found says nothing
    about a search.
    """
    wanted, got = (some.scores[~np.isin(some.rows, own)][:k] for some in (best, found))
    return float(np.count_nonzero(got[: len(wanted)] >= wanted[-1] - ROUNDING)) / len(wanted)


def first_ranks(direction: Direction, plan: Plan, wanted: Sequence[RowArray]) -> list[RowArray]:
    """1-based ranks of each query's wanted rows in the plan's first scan."""
    stage = plan.stages[0]
    rows = direction.rows[stage.level]
    queries = stage_query(stage, direction.queries, rows.dim)
    own = [rows.score(query, some) for query, some in zip(queries, wanted, strict=True)]
    above: list[list[FloatArray]] = [[] for _ in own]
    for query, _, scores in _scanned(rows, queries):
        least = own[query].min(initial=np.inf) - ROUNDING
        above[query].append(scores[scores >= least])  # no other comes before a wanted one
    return [ranks(np.concatenate(a), scores) for a, scores in zip(above, own, strict=True)]


def narrow(
    direction: Direction,
    plan: Plan,
    truth: Sequence[RowArray],
    first: Sequence[RowArray],
    target: float,
    floors: Sequence[int],
) -> tuple[tuple[int, ...], FloatArray]:
    """Smallest widths of the plan's narrowing levels, and the share each query keeps, (n,) float32.

    No width is under its `floors`, which must not grow from level to level.
    `truth[i]` are the rows that query i must keep, `first[i]` begin with their ranks in the first
    scan.
    """
    totals = [len(wanted) for wanted in truth]
    alive = list(truth)
    places = [rank[:total] for rank, total in zip(first, totals, strict=True)]
    kept: list[RowArray] = []
    keeps: list[int] = []
    narrowing = plan.stages[:-1]
    for i, stage in enumerate(narrowing):
        rows = direction.rows[stage.level]
        queries = stage_query(stage, direction.queries, rows.dim)
        if i > 0:
            kept = _survivors(direction, narrowing[i - 1], keeps[-1], kept)
            places = [
                _ranks_among(rows, query, given, wanted)
                for query, given, wanted in zip(queries, kept, alive, strict=True)
            ]
        allowed = 1 - (1 - target) * (i + 1) / len(narrowing)
        half = np.flatnonzero(~direction.held_out)
        curve = _Curve([places[q] for q in half], [totals[q] for q in half])
        ceiling = keeps[-1] if keeps else direction.size
        keeps.append(_smallest(curve, max(*totals, floors[i]), allowed, ceiling))
        alive = [some[rank <= keeps[-1]] for some, rank in zip(alive, places, strict=True)]
    shares = [len(some) / total for some, total in zip(alive, totals, strict=True)]
    return tuple(keeps), np.array(shares, dtype=np.float32)


def _record(
    direction: Direction,
    name: PlanName,
    k: int,
    keeps: tuple[int, ...],
    shares: FloatArray,
    target: float,
) -> WidthRecord:
    return WidthRecord(
        searched=direction.searched,
        query=direction.query,
        plan=name,
        k=k,
        keeps=keeps,
        target=target,
        recall_chosen_on=round(float(shares[~direction.held_out].mean()), 5),
        recall_held_out=round(float(shares[direction.held_out].mean()), 5),
        recall_lower=round(recall_lower(shares[direction.held_out]), 5),
        queries=direction.count,
    )


def _exact(direction: Direction, plan: Plan) -> bool:
    """Whether the plan's first scan finds what an exhaustive one would."""
    levels = direction.levels
    return levels is None or levels[plan.stages[0].level].capabilities.exact


def _widen(
    direction: Direction,
    plan: Plan,
    wanted: Sequence[RowArray],
    keeps: tuple[int, ...],
    target: float,
) -> tuple[tuple[int, ...], FloatArray]:
    """Widen the first scan until lossy codes reach the target too, by running the plan.

    While it widens, only queries that it is chosen by and that miss something are run: what a
    narrower scan finds a wider one finds too, but for little. What is returned was run as it is.
    """
    half = behind = np.flatnonzero(~direction.held_out)
    shares, tried = np.zeros(direction.count, np.float32), np.zeros(direction.count, np.int64)
    while True:
        shares[behind] = _run(direction, plan, wanted, keeps, behind)
        tried[behind] = keeps[0]
        whole = keeps[0] >= direction.size
        if whole or sure_recall(shares[half]) >= target:
            others = np.flatnonzero(tried != keeps[0])
            shares[others] = _run(direction, plan, wanted, keeps, others)
            if whole or sure_recall(shares[half]) >= target:
                return keeps, shares
        wider = max(keeps[0] + 1, int(keeps[0] * WIDENING))
        keeps = (min(direction.size, wider), *keeps[1:])
        behind = half[shares[half] < 1]


def _run(
    direction: Direction,
    plan: Plan,
    wanted: Sequence[RowArray],
    keeps: tuple[int, ...],
    some: RowArray,
) -> FloatArray:
    """The share that `some` queries keep up to the plan's last narrowing level: (m,) float32."""
    assert direction.levels is not None
    queries = {level: vectors[some] for level, vectors in direction.queries.items()}
    found: list[Candidates] | None = None
    for stage, keep in zip(plan.stages, keeps, strict=False):
        query = stage_query(stage, queries, direction.rows[stage.level].dim)
        found = run_stage(direction.levels, replace(stage, keep=keep), query, found)
    assert found is not None
    pairs = zip(found, (wanted[number] for number in some.tolist()), strict=True)
    return np.array([len(np.intersect1d(f.rows, w)) / len(w) for f, w in pairs], np.float32)


def _survivors(
    direction: Direction, stage: Stage, keep: int, kept: Sequence[RowArray]
) -> list[RowArray]:
    """What a stage hands on: the best `keep` of all rows, or of those it was given."""
    rows = direction.rows[stage.level]
    queries = stage_query(stage, direction.queries, rows.dim)
    if not kept:
        return [found.rows for found in _best(rows, queries, keep)]
    return [
        Candidates.ranked(given, rows.score(query, given), keep).rows
        for query, given in zip(queries, kept, strict=True)
    ]


def _ranks_among(rows: LevelRows, query: FloatArray, given: RowArray, wanted: RowArray) -> RowArray:
    """Ranks of wanted rows, all among the given ones, when the given ones are re-scored."""
    scores = rows.score(query, given)
    order = np.argsort(given)
    return ranks(scores, scores[order[np.searchsorted(given, wanted, sorter=order)]])


def _best(rows: LevelRows, queries: FloatArray, k: int) -> list[Candidates]:
    """The best k rows of each query, best first."""
    best = [Candidates.none() for _ in queries]
    for query, first, scores in _scanned(rows, queries):
        known = best[query]
        least = known.scores[-1] if len(known) == k else -np.inf
        near = np.flatnonzero(scores >= least)
        best[query] = Candidates.ranked(
            np.concatenate([known.rows, near + first]),
            np.concatenate([known.scores, scores[near]]),
            k,
        )
    return best


def _scanned(rows: LevelRows, queries: FloatArray) -> Iterator[tuple[int, int, FloatArray]]:
    """Every query's scores of a part of the rows, from row `first` on, part by part:
    (query, first, scores).

    Rows are the outer loop: they are read once, not once for every few queries.
    """
    for start in range(0, len(queries), AT_ONCE):
        some = queries[start : start + AT_ONCE]
        for part in query_blocks(rows.size, len(some)):
            for query, scores in enumerate(rows.part(part).scan_many(some), start=start):
                yield query, part.start, scores


def ranks(scores: FloatArray, wanted: FloatArray) -> RowArray:
    """1-based ranks of wanted scores among all; one that ties counts behind all its equals."""
    if not len(wanted):
        return np.empty(0, dtype=np.int64)
    least = wanted - ROUNDING
    above = np.sort(scores[scores >= least.min()])  # the others can't come before any
    below = np.searchsorted(above, least, side="left")
    return (len(above) - below).astype(np.int64)


def _smallest(curve: _Curve, least: int, allowed: float, ceiling: int) -> int:
    """The smallest width, in steps of GROWTH, at which `allowed` is surely kept."""
    keep = least
    while keep < ceiling:
        if curve(keep) >= allowed:
            return keep
        keep = max(keep + 1, int(keep * GROWTH))
    return ceiling


class _Curve:
    """The share of wanted rows that queries surely keep within a width."""

    def __init__(self, ranks: Sequence[RowArray], totals: Sequence[int]) -> None:
        counts = [len(r) for r in ranks]
        self._ranks = np.concatenate(list(ranks))
        self._query = np.repeat(np.arange(len(ranks)), counts)
        self._totals = np.array(totals, dtype=np.float32)

    def __call__(self, keep: int) -> float:
        inside = self._query[self._ranks <= keep]
        kept = np.bincount(inside, minlength=len(self._totals))
        return sure_recall((kept / self._totals).astype(np.float32)) + 1e-9

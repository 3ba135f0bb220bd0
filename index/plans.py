"""From a request to a plan: which levels, by which method, keeping how many.

    cascade   scan level 1 with the first exit, re-score 2..L each with its own exit
    funnel    encode fully; scan level 1 with the finest query's prefix, re-score the finest level
    exact     scan the finest level
    auto      the one of the first two that was measured to answer sooner in this direction

and, on an index of the graph family, for requests without a filter or widths of their own:

    cascade   walk level 1's graph with the first exit; enter the finest graph at what it found,
              with the last exit, or with the one before: its level's prefixes walk the same links,
              and the last exit only scores again what that walk found
    funnel    encode fully; walk the finest graph from a cold start

Widths come from a sweep at build (`build/widths.py`), never from a constant; where none could be
measured, because the corpus held no query of that kind, `UNMEASURED` says what is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanName, PlanRequest, Stage
from hivlp.index.early_exit import DEPTH, ExitRule
from hivlp.index.errors import PlanError
from hivlp.index.level_index import SearchParams
from hivlp.index.masks import Mask
from hivlp.index.searcher import Searcher
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec, Modality, nested_prefix

UNMEASURED = ((1_000, 50), (200, 10))
"""(at least, times k) kept by the first and by every later narrowing level without a sweep."""


@dataclass(frozen=True, slots=True)
class WidthPoint:
    """What to keep for `k` returned rows: one number per narrowing level of the plan, coarse first.

    A cascade of L levels has L - 1 narrowing levels, a funnel one. A graph's funnel has none; `efs`
    are the beams of its walks. A graph's cascade keeps some entry rows and walks once more (two
    `efs`, one of `keeps`), or keeps what each walk found, the last of which is scored again (as
    many of both).
    """

    @property
    def rescored(self) -> bool:
        """Whether the last stage of a graph's cascade scores again instead of walking."""
        return 0 < len(self.efs) == len(self.keeps)

    k: int
    keeps: tuple[int, ...]
    efs: tuple[int, ...] = ()


UNMEASURED_GRAPH = (WidthPoint(10, (), (512,)), WidthPoint(10, (40,), (128, 256)))
"""The beams of a funnel and of a cascade without a sweep."""
WidthKey = tuple[Modality, Modality, PlanName]
"""(searched, query, plan)"""
STEEPEST = 2.0
"""Widths under a mask, far beyond the measured k, grow as k squared at most."""
WidthTable = Mapping[WidthKey, Sequence[WidthPoint]]


def make_plan(
    request: PlanRequest,
    levels: Sequence[LevelSpec],
    widths: WidthTable,
    rows: int,
    *,
    gallery: GalleryKind = "nested",
    rows_needed: int | None = None,
    graphs: WidthTable | None = None,
    auto: PlanName = "cascade",
    exits: ExitRule | None = None,
    few: bool = False,
    share: float = 1.0,
) -> Plan:
    """The plan for a request on a side of `rows` rows.

    `graphs` are the measured beams of a side that has graphs and may walk them (None: it has none,
    or a filter forbids it). Explicit widths and a cap on the level speak of scans: they get one.
    `auto` is the plan of a request that names none and asks for nothing that only a cascade has.
    `exits` is when a request that allows it may stop early; its plan keeps at least `DEPTH` rows.
    `few`: so few rows may be found that they are all scored at the finest level, unless widths or a
    cap on the level say otherwise. `rows_needed` is how many rows make sure that `request.need`
    items are among them (None: as many as items). `share` of the rows may be found; see
    `masked_keeps`. Explicit widths replace the measured ones of their levels and are taken as
    meant, as long as they leave `need` rows. Raises PlanError naming the parameter and the limit.
    """
    if request.need < 1:
        raise PlanError("at least one result must be asked for", param="k", limit=1)
    finest = _finest_level(request, levels)
    name = _name(request, auto)
    used = _levels_of(name, finest)
    explicit = _explicit_keeps(request, name, used, finest)
    if few and not explicit and finest == len(levels):
        used = (finest,)
    exits = exits if request.early_exit else None
    wanted = max(request.need, rows_needed or 0, DEPTH if exits is not None else 0)
    wanted = min(wanted, max(rows, 1))
    walks = graphs is not None and not few and name != "exact"
    if graphs is not None and walks and not explicit and finest == len(levels):
        walked: PlanName = name if finest > 1 else "funnel"  # one level narrows nothing
        points = graphs.get((request.searched, request.query, walked), ())
        # Entry rows that are an answer themselves, where stopping with them is allowed.
        least = min(DEPTH, rows) if exits is None else wanted
        stages = graph_stages(name, finest, points, wanted, max(rows, 1), least=least)
        return Plan(name, stages, exits)
    points = widths.get((request.searched, request.query, name), ())
    measured = masked_keeps(points, wanted, len(used) - 1, share)
    keeps = _merge(used, [*measured, wanted], explicit, max(rows, 1))
    return Plan(name, _stages(name, used, keeps, finest, gallery), exits)


def masked_keeps(points: Sequence[WidthPoint], k: int, narrowing: int, share: float) -> list[int]:
    """Widths for `k` rows of those that a mask allows, a `share` of all.

    The best k of them are about the best k / share of all rows, and stand as far down a level's
    ranking as those; a share of what is kept for those is what of it the mask allows, give or take
    what chance does to small numbers (three standard deviations of a Poisson count). Widths grow on
    beyond the measured k as steeply as they did before.
    """
    plain = default_keeps(points, k, narrowing)
    if not points or not 0 < share < 1:
        return plain
    found = []
    deep = default_keeps(points, math.ceil(k / share), narrowing, steepest=STEEPEST)
    for own, every in zip(plain, deep, strict=True):
        expected = share * every
        found.append(max(own, math.ceil(expected + 3 * math.sqrt(expected))))
    return found


def default_keeps(
    points: Sequence[WidthPoint], k: int, narrowing: int, steepest: float = 1.0
) -> list[int]:
    """Widths of the first `narrowing` levels for `k` rows: interpolated log-log, never below k.

    Beyond the last point they grow as from the one before to it, at most as k to the `steepest`.
    """
    if not points:
        pairs = [UNMEASURED[min(i, 1)] for i in range(narrowing)]
        return [max(least, times * k) for least, times in pairs]
    found = []
    for i in range(narrowing):
        known = {point.k: point.keeps[i] for point in points}
        found.append(max(k, _interpolate(known, k, steepest)))
    return found


def graph_stages(
    name: PlanName,
    finest: int,
    points: Sequence[WidthPoint],
    k: int,
    rows: int,
    *,
    least: int = 1,
) -> tuple[Stage, ...]:
    """The stages of a graph plan for `k` rows: beams and rows kept interpolated as widths are.

    Level 1 keeps at least `least` rows. The points of a direction are of one shape.
    """
    entered = name == "cascade" and finest > 1
    known = points or (UNMEASURED_GRAPH[1 if entered else 0],)
    shape = known[0]
    efs = [
        max(k, _interpolate({point.k: point.efs[i] for point in known}, k))
        for i in range(len(shape.efs))
    ]
    if not entered:
        return (Stage(finest, "graph", k, finest, SearchParams(ef=efs[0])),)
    keeps = [
        min(_interpolate({point.k: point.keeps[i] for point in known}, k), rows)
        for i in range(len(shape.keeps))
    ]
    keeps[0] = min(max(keeps[0], least), rows)
    if not shape.rescored:
        return (_walk(1, keeps[0], efs[0]), _walk(finest, k, efs[1]))
    keeps[-1] = min(max(keeps[-1], k), rows)
    levels = (1, finest - 1)[: len(keeps)]
    walks = [_walk(level, keep, ef) for level, keep, ef in zip(levels, keeps, efs, strict=True)]
    return (*walks, Stage(finest, "rescore", min(k, rows), finest))


def _walk(level: int, keep: int, ef: int) -> Stage:
    """A graph stage with its own level's query; no beam is narrower than what it keeps."""
    return Stage(level, "graph", keep, level, SearchParams(ef=max(ef, keep)))


def stage_query(stage: Stage, outputs: Mapping[int, FloatArray], dim: int) -> FloatArray:
    """The query of a stage: (n, dim) float32, from the encoder's outputs by level.

    A finer output is cut to the level's prefix and normalised again.
    """
    vectors = outputs[stage.query_level]
    return vectors if vectors.shape[1] == dim else nested_prefix(vectors, dim)


def run_early(
    searcher: Searcher,
    searched: Modality,
    plan: Plan,
    outputs: Mapping[int, FloatArray],
    mask: Mask | None = None,
    seen: Callable[[Candidates], Candidates] = lambda found: found,
) -> tuple[Candidates, int]:
    """Run a plan for one fully encoded query, stopping where it may: what was found, and the level.

    For measuring: a service stops its encoder too (`service/overlap.py`). `seen` is what of the
    candidates is looked at to decide, without a query that is itself in the gallery, say.
    """
    dims = {spec.level: spec.dim for spec in searcher.info.levels}
    before: Candidates | None = None
    for stage in plan.stages:
        query = stage_query(stage, outputs, dims[stage.level])
        if before is None:
            (found,) = searcher.step(searched, stage, query, None, mask=mask)
        else:
            (found,) = searcher.step(searched, stage, query, [before])
        if plan.stops(stage.level, seen(found), None if before is None else seen(before)):
            break
        before = found
    return found, stage.level


def run_plan(
    searcher: Searcher, searched: Modality, plan: Plan, outputs: Mapping[int, FloatArray]
) -> list[Candidates]:
    """Run every stage of a plan for n fully encoded queries: n Candidates."""
    dims = {spec.level: spec.dim for spec in searcher.info.levels}
    found: list[Candidates] | None = None
    for stage in plan.stages:
        query = stage_query(stage, outputs, dims[stage.level])
        found = searcher.step(searched, stage, query, found)
    assert found is not None, "a plan has at least one stage"
    return found


def _finest_level(request: PlanRequest, levels: Sequence[LevelSpec]) -> int:
    count = len(levels)
    if request.max_level is None:
        return count
    if not 1 <= request.max_level <= count:
        raise PlanError(
            f"max_level must be from 1 to {count}, got {request.max_level}",
            param="max_level",
            limit=count,
        )
    return request.max_level


def _name(request: PlanRequest, auto: PlanName) -> PlanName:
    """The plan's name. Raises PlanError for an early exit from anything but a cascade."""
    if request.early_exit and request.name not in ("auto", "cascade"):
        raise PlanError(
            f"early_exit belongs to the cascade plan, not to {request.name}: a query that is "
            "encoded fully first has nothing to save",
            param="early_exit",
        )
    if request.name != "auto":
        return request.name
    cascades = request.early_exit or request.keeps or request.max_level is not None
    return "cascade" if cascades else auto


def _levels_of(name: PlanName, finest: int) -> tuple[int, ...]:
    if name == "exact" or finest == 1:
        return (finest,)
    return (1, finest) if name == "funnel" else tuple(range(1, finest + 1))


def _explicit_keeps(
    request: PlanRequest, name: PlanName, used: tuple[int, ...], finest: int
) -> dict[int, int]:
    """The widths asked for, by level, checked against each other and against the plan."""
    if not request.keeps:
        return {}
    if name == "exact":
        raise PlanError("widths can't be given with the exact plan: it scans one level")
    for level, keep in request.keeps:
        if level not in used:
            raise PlanError(
                f"level {level} is not one of the {name} plan's levels {list(used)}", limit=finest
            )
        if keep < request.need:
            raise PlanError(
                f"level {level} keeps {keep}, fewer than the {request.need} results asked for",
                limit=request.need,
            )
    _check_order(request.keeps)
    return dict(request.keeps)


def _check_order(keeps: Sequence[tuple[int, int]]) -> None:
    for (level, keep), (next_level, next_keep) in pairwise(keeps):
        if next_level <= level:
            raise PlanError(f"levels must be given coarse first: {next_level} follows {level}")
        if next_keep > keep:
            raise PlanError(
                f"level {next_level} keeps {next_keep}, more than the {keep} it is given",
                limit=keep,
            )


def _merge(
    used: tuple[int, ...], defaults: Sequence[int], explicit: Mapping[int, int], rows: int
) -> list[int]:
    """One keep a level: explicit where given, never growing, never over `rows`."""
    keeps: list[int] = []
    ceiling = rows
    for i, level in enumerate(used):
        keep = explicit.get(level)
        if keep is None:
            later = (explicit[other] for other in used[i + 1 :] if other in explicit)
            keep = max(defaults[i], max(later, default=0))
        ceiling = min(keep, ceiling)
        keeps.append(ceiling)
    return keeps


def _stages(
    name: PlanName,
    used: tuple[int, ...],
    keeps: Sequence[int],
    finest: int,
    gallery: GalleryKind,
) -> tuple[Stage, ...]:
    # Only a nested gallery's levels are prefixes of the finest query; per_exit levels are spaces
    # of their own, so there a funnel's first query is the first exit, searched after the last.
    finest_queries = name == "funnel" and gallery == "nested"
    return tuple(
        Stage(
            level=level,
            method="scan" if i == 0 else "rescore",
            keep=keeps[i],
            query_level=finest if finest_queries else level,
        )
        for i, level in enumerate(used)
    )


def _interpolate(known: Mapping[int, int], k: int, steepest: float = 1.0) -> int:
    """Straight lines in log-log space; beyond the last point its slope goes on, from 0 to
    `steepest`.
    """
    ks = np.log(sorted(known))
    keeps = np.log([known[n] for n in sorted(known)])
    beyond = max(0.0, math.log(k) - float(ks[-1]))
    slope = 1.0 if len(ks) == 1 else float((keeps[-1] - keeps[-2]) / (ks[-1] - ks[-2]))
    y = float(np.interp(math.log(k), ks, keeps)) + min(max(slope, 0.0), steepest) * beyond
    return math.ceil(math.exp(y) - 1e-6)

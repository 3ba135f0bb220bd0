"""What a worker thread does for one search: open, plan, run the levels, and name what was found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.errors import PlanError
from hivlp.index.filters import parse_filter
from hivlp.index.masks import Mask
from hivlp.index.searcher import FoundItem, Searcher
from hivlp.models.levels import Modality
from hivlp.models.reranker import Reranker
from hivlp.service.overlap import (
    EarlyOutputs,
    Found,
    PlanRun,
    check_time,
    levels_wanted,
    run_plan,
)
from hivlp.service.queries import Opened, Query, Setting
from hivlp.service.reranking import Ranking, items_needed, reranked, reranker_of
from hivlp.service.schemas import PlanChoice, SearchOptions


def find(
    query: Query,
    options: SearchOptions,
    setting: Setting,
    ahead: Executor | None,
    *,
    busy: bool = False,
) -> dict[str, Any]:
    """Everything of an answer that depends on the query and not on the request.

    `busy`: others wait for the core that an overlapped cascade would take. Raises DeadlinePassed.
    """
    check_time(setting.due_s)
    check_side(setting.searcher, options.modality)
    reranker = reranker_of(query, options, setting)
    opened = query.open(setting)
    early = None
    if query.encodes:
        early = EarlyOutputs(opened.outputs, ahead, setting.timeline, setting.due_s)
    try:
        run = plan_run(query, options, setting, opened, busy=busy)
        if early is not None:
            early.want(levels_wanted(run.plan))
        found = run_plan(run, opened.outputs if early is None else early)
    finally:
        if early is not None:  # an early exit leaves some of it unread, and a bad filter all
            early.close()
    return answer(options, setting, opened, run.plan, found, reranker)


def plan_run(
    query: Query, options: SearchOptions, setting: Setting, opened: Opened, *, busy: bool = False
) -> PlanRun:
    """The plan of a search, ready to be fed. Raises PlanError, FilterError."""
    mask = _mask(options, setting)
    plan = _plan(query, options, setting, opened, mask, busy=busy)
    return PlanRun(setting.searcher, plan, options.modality, setting.timeline, mask, setting.due_s)


def answer(
    options: SearchOptions,
    setting: Setting,
    opened: Opened,
    plan: Plan,
    found: Found,
    reranker: Reranker | None = None,
) -> dict[str, Any]:
    """What was found, re-ranked where that was asked for and time is left, with its items named."""
    ranking = None
    if reranker is not None:
        ranking = reranked(reranker, options, setting, opened, found)
    degraded = {"deadline": found.cut, "rerank": ranking is not None and ranking.degraded}
    setting.timeline.degraded += [why for why, so in degraded.items() if so]
    with setting.timeline.measure("metadata"):
        if ranking is None:
            ranking = Ranking(_items(options, setting.searcher, found, opened.exclude))
        hits = _hits(options, setting.searcher, found, ranking)
    return {
        "hits": hits,
        "returned": len(hits),
        "index": setting.searcher.info.index,
        "snapshot": setting.searcher.info.version,
        "model": setting.model.name,
        "plan": plan.name,
        "exit_level": found.level,
        "degraded": any(degraded.values()),
        "partial": False,
        "truncated": opened.truncated,
    }


def check_side(searcher: Searcher, searched: Modality) -> None:
    """Raises PlanError where there is nothing to search."""
    if not searcher.info.rows.get(searched, 0):
        message = f"index {searcher.info.index!r} holds no {searched}s to search"
        raise PlanError(message, param="modality")


def _mask(options: SearchOptions, setting: Setting) -> Mask | None:
    """The rows that a filter allows, or None without one. Raises FilterError."""
    if options.filter is None:
        return None
    with setting.timeline.measure("filter") as span:
        mask = setting.searcher.mask(options.modality, parse_filter(options.filter))
        span.candidates_in, span.candidates_out = mask.size, mask.count
    return mask


def _plan(
    query: Query,
    options: SearchOptions,
    setting: Setting,
    opened: Opened,
    mask: Mask | None,
    *,
    busy: bool,
) -> Plan:
    if options.early_exit and not query.encodes:
        message = f"early_exit: a search by {query.kind} encodes nothing, so nothing can be saved"
        raise PlanError(message, param="early_exit")
    own_levels = setting.searcher.info.gallery == "per_exit"
    request = PlanRequest(
        searched=options.modality,
        query=opened.modality,
        need=items_needed(options) + (opened.exclude is not None),
        name=_name(query, options, busy=busy, own_levels=own_levels),
        keeps=tuple((width.level, width.keep) for width in options.cascade),
        max_level=options.max_level,
        early_exit=options.early_exit,
    )
    plan = setting.searcher.plan(request, allowed=None if mask is None else mask.count)
    if query.kind == "vector" and own_levels:
        _check_vector_plan(plan, setting.searcher)
    return plan


def _name(query: Query, options: SearchOptions, *, busy: bool, own_levels: bool) -> PlanChoice:
    """What `auto` means now; with nothing to hide a cascade behind, or no core to do so on, all is
    encoded first. A deadline wants an early answer to fall back on.
    """
    only_cascades = options.cascade or options.early_exit or options.max_level is not None
    if options.plan != "auto":
        return options.plan
    if not query.encodes and not options.cascade:
        return "exact" if query.kind == "vector" and own_levels else "funnel"
    if only_cascades:
        return "auto"
    if options.deadline_ms is not None:
        return "cascade"
    return "funnel" if busy else "auto"


def _check_vector_plan(plan: Plan, searcher: Searcher) -> None:
    """A finest vector of a per_exit gallery says nothing about the levels before."""
    finest = searcher.info.levels[-1].level
    if any(stage.level != finest for stage in plan.stages):
        message = "a vector searches the finest level of this index only: plan must be exact"
        raise PlanError(message, param="plan")


def _items(
    options: SearchOptions, searcher: Searcher, found: Found, exclude: str | None
) -> list[FoundItem]:
    searched, candidates = options.modality, found.candidates
    if exclude is None:
        return searcher.items(searched, candidates, options.k, options.offset)
    end = options.offset + options.k
    items = searcher.items(searched, candidates, end + 1, 0)
    return [item for item in items if item.id != exclude][options.offset : end]


def _hits(
    options: SearchOptions, searcher: Searcher, found: Found, ranking: Ranking
) -> list[dict[str, Any]]:
    hits = []
    least = -math.inf if options.min_score is None else options.min_score
    kept = [item for item in ranking.items if item.score >= least]
    for place, item in enumerate(kept):
        assert math.isfinite(item.score), (item.id, item.score)
        hit: dict[str, Any] = {
            "id": item.id,
            "rank": options.offset + place + 1,
            "score": item.score,
            "level": found.level,
        }
        if item.row in ranking.matches:
            hit["match"] = ranking.matches[item.row]
        if item.text is not None:
            hit["text"] = item.text
        hits.append(hit)
    _add_metadata(options, searcher, hits)
    if options.explain:
        _add_explanations(options, searcher, found, kept, hits)
    return hits


def _add_metadata(options: SearchOptions, searcher: Searcher, hits: list[dict[str, Any]]) -> None:
    if options.with_metadata is False:
        return
    names = None if options.with_metadata is True else options.with_metadata
    rows = searcher.metadata([hit["id"] for hit in hits], names)
    for hit, metadata in zip(hits, rows, strict=True):
        hit["metadata"] = metadata


def _add_explanations(
    options: SearchOptions,
    searcher: Searcher,
    found: Found,
    items: Sequence[FoundItem],
    hits: list[dict[str, Any]],
) -> None:
    """Per level: the exact score of the hit, and its place among what that level kept."""
    rows = np.array([item.row for item in items], dtype=np.int64)
    scores = searcher.explain(options.modality, found.queries, rows)
    places = {
        level: dict(zip(kept.rows.tolist(), itertools.count(1), strict=False))
        for level, kept in found.kept.items()
    }
    for i, (hit, item) in enumerate(zip(hits, items, strict=True)):
        hit["explain"] = [
            {"level": level, "score": float(values[i]), "rank": places[level].get(item.row)}
            for level, values in sorted(scores.items())
        ]

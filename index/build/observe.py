"""Running a plan over a direction's queries, and looking at what each stage found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from hivlp.index.build.directions import Direction
from hivlp.index.build.widths import itself
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, run_stage
from hivlp.index.level_index import LevelIndex
from hivlp.index.plans import stage_query

BLOCK = 64
TIMED = 40


def run_stages(
    direction: Direction, plan: Plan, graphs: Mapping[int, LevelIndex], block: slice
) -> Iterator[tuple[int, list[Candidates]]]:
    """What each stage of the plan finds for a block of queries, by level."""
    queries = {level: vectors[block] for level, vectors in direction.queries.items()}
    found: list[Candidates] | None = None
    for stage in plan.stages:
        query = stage_query(stage, queries, direction.rows[stage.level].dim)
        found = run_stage(_opened(direction), stage, query, found, graphs=graphs)
        yield stage.level, found


def blocks(direction: Direction) -> Iterator[slice]:
    """Slices of the queries, few enough for what they find to be kept at once."""
    return (slice(start, start + BLOCK) for start in range(0, direction.count, BLOCK))


def own_rows(direction: Direction, best: Sequence[Candidates]) -> list[RowArray]:
    """For each query the rows that are itself or its doubles; `best[i]` as `exact_best` finds it.

    Where queries are rows of the side, their own rows count whatever the encoder made of them: one
    of another precision does not meet them exactly.
    """
    pairs = zip(best, direction.finest_queries, strict=True)
    own = [itself(some, direction.finest, query) for some, query in pairs]
    if direction.own_rows is None:
        return own
    named = zip(own, direction.own_rows, strict=True)
    return [np.union1d(rows, [row]).astype(np.int64) for rows, row in named]


def without(found: Candidates, own: RowArray, most: int) -> Candidates:
    """The first `most` rows that are not the query itself."""
    kept = np.flatnonzero(~np.isin(found.rows[: most + len(own)], own))[:most]
    return Candidates(found.rows[kept], found.scores[kept])


def stage_ms(direction: Direction, plan: Plan, graphs: Mapping[int, LevelIndex]) -> list[float]:
    """Median milliseconds of each stage of a plan, searched query by query."""
    spent: list[list[float]] = [[] for _ in plan.stages]
    for number in range(min(TIMED, direction.count)):
        began = time.perf_counter()
        stages = run_stages(direction, plan, graphs, slice(number, number + 1))
        for times, _ in zip(spent, stages, strict=True):
            ended = time.perf_counter()
            times.append(1e3 * (ended - began))
            began = ended
    return [median(times) for times in spent]


def overlapped_ms(encode: Sequence[float], search: Sequence[tuple[int, float]]) -> float:
    """Milliseconds of a query whose encoder runs ahead of its search.

    `encode` are the encoder's stages; `search` the plan's, each with the level whose output it
    begins with. HiVLP section 3, `equations.md` 1.8: a level is searched while the next is encoded.
    """
    ready = np.cumsum(encode)
    done = 0.0
    for level, milliseconds in search:
        done = max(done, float(ready[level - 1])) + milliseconds
    return done


def _opened(direction: Direction) -> Mapping[int, LevelIndex]:
    assert direction.levels is not None, "the side's levels must be open"
    return direction.levels

"""Which family and which codes a side gets: measured on a sample of its own rows and queries.

    options = choose(side, queries, specs, gallery, wishes, target)
    print(table(side.modality, options))

Each candidate is built over a sample of the rows, and its widths or beams are measured for k = 10.
Times are carried over to all rows: a scan's codes are timed over a larger sample and grow in
proportion, what it re-scores doesn't grow; a graph takes N^.25 a query (steeper than its logarithm,
so as not to flatter it) and N log N to build. Of those within the
limits that reach the target, the simplest wins, unless a later one is `WORTH` times faster.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from hivlp.index.backends.choose import (
    codec_for,
    open_graph,
    open_level,
    write_graph,
    write_level,
)
from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.widths import exact_best, sweep
from hivlp.index.candidates import Candidates
from hivlp.index.cascade import PlanRequest, run_stage
from hivlp.index.errors import BuildError
from hivlp.index.level_index import Codec, Family, LevelIndex, SearchParams
from hivlp.index.plans import WidthPoint, make_plan, stage_query
from hivlp.index.snapshot.manifest import OptionRecord, WidthRecord
from hivlp.models.levels import GalleryKind, LevelSpec, Modality

FEW_ROWS = 20_000
"""Up to so many rows a flat scan is taken without trying anything else."""
SAMPLED = 10_000
SCANNED = 200_000
"""Rows that a scan is timed over: enough that what a search costs besides doesn't count."""
TIMED = 40
WORTH = 1.5
SLACK = 0.005
"""Held-out recall this far under the target still counts as reaching it: a sample has noise."""
GRAPH_GROWTH = 0.25
K = 10
CANDIDATES: tuple[tuple[Family, Codec], ...] = (
    ("scan", "flat"),
    ("scan", "sq8"),
    ("scan", "pq64x4fs"),
    ("graph", "sq8"),
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for: a family and codes, or limits to choose within (None: no limit).

    Raises BuildError for a pair that can't be: fast-scan codes are never scored one by one.
    """

    family: Literal["auto", "scan", "graph"] = "auto"
    level1: Literal["auto", "flat", "sq8", "pq64x4fs"] = "auto"
    max_memory_bytes: int | None = None
    max_query_ms: float | None = None
    max_build_s: float | None = 1_800.0

    def __post_init__(self) -> None:
        if (self.family, self.level1) == ("graph", "pq64x4fs"):
            raise BuildError("a graph can't walk over pq64x4fs codes: ask for sq8 or flat ones")

    def share(self, part: float) -> Wishes:
        """The same for a side that has this part of all rows: memory and building are shared."""
        memory, build = self.max_memory_bytes, self.max_build_s
        return replace(
            self,
            max_memory_bytes=None if memory is None else round(memory * part),
            max_build_s=None if build is None else build * part,
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some of a side's rows, every level, and queries against them."""

    direction: Direction
    specs: Sequence[LevelSpec]
    gallery: GalleryKind
    target: float


def choose(
    side: BuiltSide,
    queries: QuerySet | None,
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    wishes: Wishes,
    target: float,
) -> tuple[OptionRecord, ...]:
    """Every candidate with what was measured and why it was taken or not; one is `chosen`."""
    asked = [c for c in CANDIDATES if _wanted(c, wishes)] or [_forced(wishes)]
    if len(asked) == 1:
        return (_unmeasured(side, asked[0], "asked for", chosen=True),)
    if side.size <= FEW_ROWS and ("scan", "flat") in asked:
        reason = f"at most {FEW_ROWS} rows: a flat scan is exact and takes {_flat_ms(side):.2f} ms"
        return tuple(
            _unmeasured(side, c, reason if c == ("scan", "flat") else "not tried: few rows",
                        chosen=c == ("scan", "flat"))
            for c in asked
        )  # fmt: skip
    sample = _sample(side, queries, specs, gallery, target)
    if sample is None:
        reason = "no queries to measure with: the codes that lose nothing and take a mask"
        taken = next((c for c in asked if c == ("scan", "sq8")), asked[0])
        return tuple(
            _unmeasured(side, c, reason if c == taken else "not tried", chosen=c == taken)
            for c in asked
        )
    return _judge([_measured(side, c, sample) for c in asked], wishes, target)


def table(side: Modality, options: Sequence[OptionRecord]) -> str:
    """The candidates of a side as a table, the chosen one marked."""
    lines = [
        f"{side}: {options[0].rows} rows",
        f"  {'family':<7}{'level 1':<10}{'ANN@10':>7}{'search ms':>11}{'after exit':>11}"
        f"{'build s':>9}{'MiB':>9}  why",
    ]
    lines += [
        f"{'*' if o.chosen else ' ':>1} {o.family:<7}{o.level1:<10}{_cell(o.recall, 3):>7}"
        f"{_cell(o.search_ms, 2):>11}{_cell(o.after_ms, 2):>11}{_cell(o.build_s, 1):>9}"
        f"{o.memory_bytes / 2**20:>9.1f}  {o.reason}"
        for o in options
    ]
    return "\n".join(lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _wanted(candidate: tuple[Family, Codec], wishes: Wishes) -> bool:
    family, codec = candidate
    return wishes.family in ("auto", family) and wishes.level1 in ("auto", codec)


def _forced(wishes: Wishes) -> tuple[Family, Codec]:
    """A pair that is never a candidate by itself: a graph over flat codes, say."""
    family: Family = "scan" if wishes.family == "auto" else wishes.family
    return family, "sq8" if wishes.level1 == "auto" else wishes.level1


def _judge(
    options: Sequence[OptionRecord], wishes: Wishes, target: float
) -> tuple[OptionRecord, ...]:
    """Mark the chosen one, and say of each other why not."""
    over = [_over(option, wishes, target) for option in options]
    good = [o for o, reasons in zip(options, over, strict=True) if not reasons]
    if not good:  # the nearest: the one over the fewest limits, and of those the best recall
        pairs = zip(options, over, strict=True)
        taken = min(pairs, key=lambda pair: (len(pair[1]), -(pair[0].recall or 0)))[0]
        missed = "; ".join(_over(taken, wishes, target))
        why = f"nothing is within every limit; this comes nearest: {missed}"
    else:
        taken = good[0]
        for option in good[1:]:
            if (option.search_ms or 0) * WORTH < (taken.search_ms or 0):
                taken = option
        why = "the simplest within the limits" if taken is good[0] else "fastest by far"
    return tuple(
        _with_verdict(option, why)
        if option is taken
        else _with_verdict(option, _why_not(option, taken, reasons), chosen=False)
        for option, reasons in zip(options, over, strict=True)
    )


def _with_verdict(option: OptionRecord, reason: str, *, chosen: bool = True) -> OptionRecord:
    """The same measurements with a verdict."""
    return option.model_copy(update={"chosen": chosen, "reason": reason})


def _why_not(option: OptionRecord, taken: OptionRecord, reasons: Sequence[str]) -> str:
    if reasons:
        return "; ".join(reasons)
    if (option.search_ms or 0) > (taken.search_ms or 0):
        return "slower"
    return f"not {WORTH:g} times faster than what is simpler"


def _over(option: OptionRecord, wishes: Wishes, target: float) -> list[str]:
    """What keeps an option from being taken."""
    low = option.recall is not None and option.recall < target - SLACK
    return [f"recall under {target:g}"] * low + over_limits(option, wishes)


def over_limits(option: OptionRecord, wishes: Wishes) -> list[str]:
    """The limits that an option is known to be over."""
    values = (
        (option.memory_bytes, wishes.max_memory_bytes, "over --max-memory"),
        (option.search_ms, wishes.max_query_ms, "over --max-query-ms"),
        (option.build_s, wishes.max_build_s, "over --max-build-s"),
    )
    return [
        words
        for value, limit, words in values
        if limit is not None and value is not None and value > limit
    ]


def _unmeasured(
    side: BuiltSide, candidate: tuple[Family, Codec], reason: str, *, chosen: bool
) -> OptionRecord:
    family, codec = candidate
    return OptionRecord(
        family=family,
        level1=codec_for(codec, side.size),
        rows=side.size,
        memory_bytes=_memory(side, family, codec),
        chosen=chosen,
        reason=reason,
    )


def _memory(side: BuiltSide, family: Family, codec: Codec) -> int:
    """Bytes of everything that a search may touch: rows, norms, codes and links."""
    matrices = {id(rows.matrix): rows.matrix.nbytes for rows in side.rows.values()}
    norms = sum(4 for rows in side.rows.values() if rows.inverse_norms is not None)
    dim = side.rows[min(side.rows)].dim
    codes = {"flat": 4 * dim, "sq8": dim, "pq64x4fs": max(dim // 4, 1)}[codec]
    links = 2 * 280 if family == "graph" else 0
    return sum(matrices.values()) + side.size * (norms + codes + links)


def _flat_ms(side: BuiltSide) -> float:
    """Milliseconds of one exhaustive pass over level 1."""
    rows = side.rows[min(side.rows)]
    query = rows.vectors(np.arange(1))[0]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        rows.scan(query)
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def _sample(
    side: BuiltSide,
    queries: QuerySet | None,
    specs: Sequence[LevelSpec],
    gallery: GalleryKind,
    target: float,
) -> _Sample | None:
    """A spread of rows in memory, and the queries; None where there is nothing to measure with."""
    if queries is None or len(specs) < 2:
        return None
    chosen = np.linspace(0, side.size - 1, min(SAMPLED, side.size)).astype(np.int64)
    matrices = {id(rows.matrix): rows.matrix[chosen] for rows in side.rows.values()}
    rows = {
        level: LevelRows(
            matrices[id(own.matrix)],
            own.dim,
            None if own.inverse_norms is None else own.inverse_norms[chosen],
        )
        for level, own in side.rows.items()
    }
    direction = Direction(side.modality, "text", queries.outputs, rows, queries.held_out)
    return _Sample(direction, specs, gallery, target) if direction.halved else None


def _measured(side: BuiltSide, candidate: tuple[Family, Codec], sample: _Sample) -> OptionRecord:
    """Build a candidate over the sample, measure it, carry it over to all rows."""
    family, codec = candidate
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        levels, graphs = _build(Path(folder), candidate, sample)
        build_s = time.monotonic() - began
        direction = replace(sample.direction, levels=levels)
        record = _record(direction, graphs, sample)
        first_ms, after_ms = _times(direction, graphs, sample, record)
        if family == "scan":
            scan_ms, build_s = _scan(Path(folder), side, codec, direction)
            first_ms = scan_ms + max(0.0, first_ms - _one_ms(direction, levels))
    growth = side.size / direction.size
    if family == "graph":
        build_s *= growth * math.log(side.size) / math.log(direction.size)
        first_ms, after_ms = (ms * growth**GRAPH_GROWTH for ms in (first_ms, after_ms))
    return OptionRecord(
        family=family,
        level1=codec,
        rows=side.size,
        recall=record.recall_held_out,
        search_ms=round(first_ms + after_ms, 3),
        after_ms=round(after_ms, 3),
        build_s=round(build_s, 1),
        memory_bytes=_memory(side, family, codec),
        chosen=False,
        reason="",
    )


def _scan(folder: Path, side: BuiltSide, codec: Codec, direction: Direction) -> tuple[float, float]:
    """Milliseconds of a scan of all rows' codes, and seconds to write them."""
    rows = side.rows[min(side.rows)]
    chosen = np.linspace(0, rows.size - 1, min(SCANNED, rows.size)).astype(np.int64)
    some = LevelRows(rows.vectors(chosen), rows.dim)
    began = time.monotonic()
    write_level(folder / "scanned.faiss", some, codec)
    build_s = time.monotonic() - began
    level = open_level(min(side.rows), some, folder / "scanned.faiss", "faiss-cpu")
    growth = rows.size / some.size
    return _one_ms(direction, {level.level: level}) * growth, build_s * growth


def _one_ms(direction: Direction, levels: Mapping[int, LevelIndex]) -> float:
    """Median milliseconds of a search of the coarsest level for one row."""
    level = levels[min(levels)]
    queries = direction.queries[level.level]
    times = []
    for i in range(min(TIMED, direction.count)):
        began = time.perf_counter()
        level.search(queries[i : i + 1], 1, SearchParams(), None, None)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def _build(
    folder: Path, candidate: tuple[Family, Codec], sample: _Sample
) -> tuple[dict[int, LevelIndex], dict[int, LevelIndex]]:
    family, codec = candidate
    rows = sample.direction.rows
    coarse, finest = min(rows), max(rows)
    write_level(folder / "codes.faiss", rows[coarse], codec)
    levels = {
        level: open_level(
            level, own, folder / "codes.faiss" if level == coarse else None, "faiss-cpu"
        )
        for level, own in rows.items()
    }
    graphs: dict[int, LevelIndex] = {}
    for level in (coarse, finest) if family == "graph" else ():
        write_graph(folder / f"{level}.hnsw", rows[level])
        graphs[level] = open_graph(folder / f"{level}.hnsw", rows[level], levels[level], None)
    return levels, graphs


def _record(direction: Direction, graphs: Mapping[int, LevelIndex], sample: _Sample) -> WidthRecord:
    """The cascade's widths or beams for k = 10."""
    if graphs:
        best = exact_best(direction, sample.specs[-1].level, K)
        records = measure_beams(direction, graphs, best, (K,), sample.target)
    else:
        records = sweep(direction, sample.specs, sample.gallery, sample.target)
    return next(r for r in records if r.plan == "cascade" and r.k == K)


def _times(
    direction: Direction,
    graphs: Mapping[int, LevelIndex],
    sample: _Sample,
    record: WidthRecord,
) -> tuple[float, float]:
    """Median milliseconds of all stages but the last, and of the last one, query by query."""
    request = PlanRequest(direction.searched, direction.query, K, "cascade")
    key = (direction.searched, direction.query, record.plan)
    measured = {key: (WidthPoint(K, record.keeps, record.efs),)}
    plan = make_plan(
        request,
        sample.specs,
        {} if graphs else measured,
        direction.size,
        gallery=sample.gallery,
        graphs=measured if graphs else None,
    )
    assert direction.levels is not None
    spent: list[list[float]] = [[] for _ in plan.stages]
    for i in range(min(TIMED, direction.count)):
        found: list[Candidates] | None = None
        for stage, times in zip(plan.stages, spent, strict=True):
            dim = direction.rows[stage.level].dim
            query = stage_query(stage, {n: q[i : i + 1] for n, q in direction.queries.items()}, dim)
            began = time.perf_counter()
            found = run_stage(direction.levels, stage, query, found, graphs=graphs)
            times.append(1e3 * (time.perf_counter() - began))
    medians = [median(times) for times in spent]
    return sum(medians[:-1]), medians[-1]

"""Which family and which codes a side gets: measured on a sample of its own rows and queries.

    options = choose(side, queries, specs, gallery, wishes, target)
    print(table(side.modality, options))  # build/explain.py

Each candidate is built over a sample of the rows, and its widths or beams are measured for k = 10.
Times are carried over to all rows: a scan's codes are timed over a larger sample and grow in
proportion, what it keeps grows as it did from a part of the sample to all of it; a graph takes
N^.25 a query (steeper than its logarithm, so as not to flatter it) and N log N to build. Of those
within the limits that reach the target, the simplest wins, unless a later one is `WORTH` times
faster.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from hivlp.index.backends.choose import (
    codec_for,
    open_graphs,
    open_level,
    write_graph,
    write_level,
)
from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.assemble import BuiltSide, maskable_beside
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.footprint import SideShape
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.widths import exact_best, sweep
from hivlp.index.build.wishes import CANDIDATES as CANDIDATES
from hivlp.index.build.wishes import FEW_ROWS, Wishes
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import PlanRequest, run_stage
from hivlp.index.level_index import Codec, Family, LevelIndex, SearchParams
from hivlp.index.plans import WidthPoint, make_plan, stage_query
from hivlp.index.snapshot.manifest import OptionRecord, WidthRecord
from hivlp.models.levels import GalleryKind, LevelSpec

SAMPLED: dict[Family, int] = {"scan": 50_000, "graph": 10_000}
"""Rows that a candidate is built over. What a scan must keep grows with the rows, so that a small
sample flatters it, lossy codes most of all; a graph is slow to build."""
PART = 4
"""How a scan's keep grows is measured between one in so many of the sampled rows and all."""
SCANNED = 200_000
"""Rows that a scan is timed over: enough that what a search costs besides doesn't count."""
TIMED = 40
WORTH = 1.5
SLACK = 0.005
"""Held-out recall this far under the target still counts as reaching it: a sample has noise."""
GRAPH_GROWTH = 0.25
K = 10
BATCH = 32
"""Queries at once, where an index must serve batches."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a build brings: threads for graphs, and whether every level becomes a FAISS index."""

    threads: int = 1
    materialise: bool = False


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
    means: Means = Means(),
) -> tuple[OptionRecord, ...]:
    """Every candidate with what was measured and why it was taken or not; one is `chosen`."""
    draft = partial(_draft, side, gallery, wishes, means)
    asked = wishes.asked(side.size)
    if len(asked) == 1:
        return (draft(asked[0], "asked for", chosen=True),)
    if side.size <= FEW_ROWS and ("scan", "flat") in asked:
        reason = f"at most {FEW_ROWS} rows: a flat scan is exact and takes {_flat_ms(side):.2f} ms"
        return tuple(
            draft(c, reason if c == ("scan", "flat") else "not tried: few rows",
                  chosen=c == ("scan", "flat"))
            for c in asked
        )  # fmt: skip
    found = {
        family: _sample(side, queries, specs, gallery, target, count)
        for family, count in SAMPLED.items()
        if any(candidate[0] == family for candidate in asked)
    }
    samples = {family: sample for family, sample in found.items() if sample is not None}
    if not samples:  # nothing to measure one of them with is nothing for any
        reason = "no queries to measure with: the codes that lose nothing and take a mask"
        taken = next((c for c in asked if c == ("scan", "sq8")), asked[0])
        return tuple(
            draft(c, reason if c == taken else "not tried", chosen=c == taken) for c in asked
        )
    drafts = [draft(candidate) for candidate in asked]
    measured = [
        one if wishes.never_takes(one) else _measured(side, one, samples[one.family], wishes, means)
        for one in drafts
    ]
    return _judge(measured, wishes, target)


def _judge(
    options: Sequence[OptionRecord], wishes: Wishes, target: float
) -> tuple[OptionRecord, ...]:
    """Mark the chosen one, and say of each other why not."""
    over = [_over(option, wishes, target) for option in options]
    good = [o for o, reasons in zip(options, over, strict=True) if not reasons]
    if not good:  # the nearest: the one over the fewest limits, and of those the best recall
        pairs = [
            pair for pair in zip(options, over, strict=True) if not wishes.never_takes(pair[0])
        ]
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
    return [f"recall under {target:g}"] * low + wishes.over(option)


def _draft(
    side: BuiltSide,
    gallery: GalleryKind,
    wishes: Wishes,
    means: Means,
    candidate: tuple[Family, Codec],
    reason: str = "",
    *,
    chosen: bool = False,
) -> OptionRecord:
    """What is known of a candidate without measuring it."""
    family, codec = candidate[0], codec_for(candidate[1], side.size)
    maskable = maskable_beside(codec, wishes.must)
    return OptionRecord(
        family=family,
        level1=codec,
        maskable=maskable,
        rows=side.size,
        memory_bytes=SideShape.of(side, gallery).level_bytes(
            family, codec, maskable, materialise=means.materialise
        ),
        chosen=chosen,
        reason=reason,
    )


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
    count: int,
) -> _Sample | None:
    """A spread of rows in memory, and the queries; None where there is nothing to measure with."""
    if queries is None or len(specs) < 2:
        return None
    rows = _some(side.rows, np.linspace(0, side.size - 1, min(count, side.size)).astype(np.int64))
    direction = Direction(
        side.modality,
        "text",
        queries.outputs,
        rows,
        queries.held_out,
        encode_ms=queries.encode_ms,
    )
    return _Sample(direction, specs, gallery, target) if direction.halved else None


def _some(levels: Mapping[int, LevelRows], chosen: RowArray) -> dict[int, LevelRows]:
    """Given rows of every level, copied into memory."""
    matrices = {id(rows.matrix): rows.matrix[chosen] for rows in levels.values()}
    return {
        level: LevelRows(
            matrices[id(own.matrix)],
            own.dim,
            None if own.inverse_norms is None else own.inverse_norms[chosen],
        )
        for level, own in levels.items()
    }


def _measured(
    side: BuiltSide, draft: OptionRecord, sample: _Sample, wishes: Wishes, means: Means
) -> OptionRecord:
    """Build a candidate over the sample, measure it, carry it over to all rows."""
    batch = BATCH if "batch" in wishes.must else 1
    growth = side.size / sample.direction.size
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        levels, graphs = _build(Path(folder), draft, sample, means.threads)
        build_s = time.monotonic() - began
        direction = replace(sample.direction, levels=levels)
        record = _record(direction, graphs, sample)
        first_ms, after_ms = _times(direction, graphs, sample, record, batch)
        if draft.family == "scan":
            scan_ms, build_s = _scan(Path(folder), side, draft, direction, batch)
            kept_ms = max(0.0, first_ms - _one_ms(direction, levels, batch))
            first_ms = scan_ms + kept_ms * growth ** _keep_growth(draft, sample, record)
    if draft.family == "graph":
        build_s *= growth * math.log(side.size) / math.log(direction.size)
        first_ms, after_ms = (ms * growth**GRAPH_GROWTH for ms in (first_ms, after_ms))
    return draft.model_copy(
        update={
            "recall": record.recall_held_out,
            "search_ms": round(first_ms + after_ms, 3),
            "after_ms": round(after_ms, 3),
            "build_s": round(build_s, 1),
        }
    )


def _keep_growth(draft: OptionRecord, sample: _Sample, record: WidthRecord) -> float:
    """The exponent by which what level 1 keeps grows with the rows, 0 to 1."""
    rows = _some(sample.direction.rows, np.arange(0, sample.direction.size, PART))
    few = replace(sample, direction=replace(sample.direction, rows=rows))
    with tempfile.TemporaryDirectory() as folder:
        levels, _ = _build(Path(folder), draft, few, 1)
        less = _record(replace(few.direction, levels=levels), {}, few)
    grown = math.log(record.keeps[0] / less.keeps[0]) / math.log(PART)
    return min(1.0, max(0.0, grown))


def _scan(
    folder: Path, side: BuiltSide, draft: OptionRecord, direction: Direction, batch: int
) -> tuple[float, float]:
    """Milliseconds of a scan of all rows' codes, and seconds to write them."""
    rows = side.rows[min(side.rows)]
    chosen = np.linspace(0, rows.size - 1, min(SCANNED, rows.size)).astype(np.int64)
    some = LevelRows(rows.vectors(chosen), rows.dim)
    began = time.monotonic()
    write_level(folder / "scanned.faiss", some, draft.level1)
    if draft.maskable is not None:
        write_level(folder / "maskable.faiss", some, draft.maskable)
    build_s = time.monotonic() - began
    level = open_level(min(side.rows), some, folder / "scanned.faiss", "faiss-cpu")
    growth = rows.size / some.size
    return _one_ms(direction, {level.level: level}, batch) * growth, build_s * growth


def _one_ms(direction: Direction, levels: Mapping[int, LevelIndex], batch: int) -> float:
    """Median milliseconds a query of searches of the coarsest level for one row."""
    level = levels[min(levels)]
    queries = direction.queries[level.level]
    times = []
    for some in _batches(direction, batch):
        began = time.perf_counter()
        level.search(queries[some], 1, SearchParams(), None, None)
        times.append(1e3 * (time.perf_counter() - began) / batch)
    return median(times)


def _batches(direction: Direction, batch: int) -> list[RowArray]:
    """Which queries are timed together, `batch` at once, from the first again where they run out"""
    return [np.arange(i, i + batch) % direction.count for i in range(0, TIMED * batch, batch)]


def _build(
    folder: Path, draft: OptionRecord, sample: _Sample, threads: int
) -> tuple[dict[int, LevelIndex], dict[int, LevelIndex]]:
    rows = sample.direction.rows
    coarse, finest = min(rows), max(rows)
    codec = codec_for(draft.level1, rows[coarse].size)
    write_level(folder / "codes.faiss", rows[coarse], codec)
    levels = {
        level: open_level(
            level, own, folder / "codes.faiss" if level == coarse else None, "faiss-cpu"
        )
        for level, own in rows.items()
    }
    walked = {n: folder / f"{n}.hnsw" for n in (coarse, finest) if draft.family == "graph"}
    for level, file in walked.items():
        write_graph(file, rows[level], threads)
    return levels, open_graphs(walked, rows, levels)


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
    batch: int,
) -> tuple[float, float]:
    """Median milliseconds a query of all stages but the last, and of the last one."""
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
    for some in _batches(direction, batch):
        found: list[Candidates] | None = None
        for stage, times in zip(plan.stages, spent, strict=True):
            dim = direction.rows[stage.level].dim
            query = stage_query(stage, {n: q[some] for n, q in direction.queries.items()}, dim)
            began = time.perf_counter()
            found = run_stage(direction.levels, stage, query, found, graphs=graphs)
            times.append(1e3 * (time.perf_counter() - began) / batch)
    medians = [median(times) for times in spent]
    return sum(medians[:-1]), medians[-1]

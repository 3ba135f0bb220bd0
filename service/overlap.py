"""Encoding and searching at once: the heart of the pipeline, and a plain function of two iterators.

    this thread     encode 1 | search 1 ......| search 2 ...| search 3
    ahead's thread           | encode 2 ..| encode 3 ..|

`early_outputs` asks the encoder for the next stage before it hands on the last, never for more
stages than the plan reads. With `ahead` None the same code runs in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, Stage
from hivlp.index.searcher import Searcher
from hivlp.models.levels import EarlyOutput, FloatArray, Modality, nested_prefix
from hivlp.service.timeline import Timeline


@dataclass(slots=True)
class Found:
    """What a plan found: the last stage's candidates, and per level the query and what was kept."""

    candidates: Candidates
    level: int
    queries: dict[int, FloatArray] = field(default_factory=dict)
    kept: dict[int, Candidates] = field(default_factory=dict)


def early_outputs(
    outputs: Iterator[EarlyOutput], wanted: int, ahead: Executor | None, timeline: Timeline
) -> Iterator[EarlyOutput]:
    """The first `wanted` of `outputs`, each measured, the next one under way in `ahead`."""

    def compute(level: int) -> EarlyOutput:
        with timeline.measure("encode", level):
            output = next(outputs)
        assert output.level == level, (output.level, level)
        return output

    pending: Future[EarlyOutput] | None = None
    try:
        for level in range(1, wanted + 1):
            output = pending.result() if pending else compute(level)
            pending = ahead.submit(compute, level + 1) if ahead and level < wanted else None
            yield output
    finally:
        _drop(outputs, pending)


def _drop(outputs: Iterator[EarlyOutput], pending: Future[EarlyOutput] | None) -> None:
    """Stop the encoder: what has not begun never will; what runs is left to end by itself."""

    def close(_: object = None) -> None:
        if hasattr(outputs, "close"):
            outputs.close()

    if pending is None:
        close()
    else:
        pending.cancel()
        pending.add_done_callback(close)


def levels_wanted(plan: Plan) -> int:
    """The finest level whose output the plan reads."""
    return max(max(stage.query_level, stage.level) for stage in plan.stages)


def run_plan(
    searcher: Searcher,
    plan: Plan,
    searched: Modality,
    outputs: Iterator[EarlyOutput],
    timeline: Timeline,
) -> Found:
    """Each stage as soon as the output that it queries with is there."""
    reader = _Reader(searcher, outputs)
    found: Found | None = None
    for stage in plan.stages:
        query = reader.query(stage)
        before = found.candidates if found else None
        size = len(before) if before is not None else searcher.info.rows.get(searched, 0)
        with timeline.measure("search", stage.level, size) as span:
            previous = None if before is None else [before]
            (candidates,) = searcher.step(searched, stage, query, previous)
            span.candidates_out = len(candidates)
        found = found or Found(candidates, stage.level)
        found.candidates, found.level = candidates, stage.level
        found.queries[stage.level] = query
        found.kept[stage.level] = candidates
    assert found is not None, "a plan has at least one stage"
    return found


class _Reader:
    """Reads outputs as far as a stage needs, and cuts queries from them."""

    def __init__(self, searcher: Searcher, outputs: Iterator[EarlyOutput]) -> None:
        self._nested = searcher.info.gallery == "nested"
        self._dims = {spec.level: spec.dim for spec in searcher.info.levels}
        self._outputs = outputs
        self._seen: dict[int, FloatArray] = {}

    def query(self, stage: Stage) -> FloatArray:
        """(1, dim of the level): the prefix of the stage's query level, or the level's own."""
        while stage.query_level not in self._seen:
            output = next(self._outputs)
            self._seen[output.level] = output.vectors
        if stage.query_level == stage.level or not self._nested:
            return self._seen[stage.level]
        return nested_prefix(self._seen[stage.query_level], self._dims[stage.level])

"""Encoding and searching at once: the heart of the pipeline, and a plain function of two iterators.

    this thread              | search 1 ...| search 2 ...| search 3
    ahead's thread  encode 1 | encode 2 ......| encode 3 ..|

The encoder never waits for a search: `early_outputs` lets it run through the stages that the plan
reads, and no further, while what is done waits to be searched. All stages run in ahead's thread:
one that joined after the first stage would have to wait until this one lets go of the interpreter,
and short searches would be over by then. With `ahead` None the same stages run in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, Stage
from hivlp.index.masks import Mask
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
) -> Generator[EarlyOutput]:
    """The first `wanted` of `outputs`, each measured; computed in `ahead` where there is one."""

    def compute(level: int) -> EarlyOutput:
        with timeline.measure("encode", level):
            output = next(outputs)
        assert output.level == level, (output.level, level)
        return output

    running: Future[None] | None = None
    done: SimpleQueue[EarlyOutput | BaseException] = SimpleQueue()
    left = threading.Event()
    try:
        if ahead is not None and wanted > 1:
            running = ahead.submit(_run_on, compute, wanted, done, left)
        for level in range(1, wanted + 1):
            output = compute(level) if running is None else done.get()
            if isinstance(output, BaseException):
                raise output
            yield output
    finally:
        left.set()
        _drop(outputs, running)


def _run_on(
    compute: Callable[[int], EarlyOutput],
    wanted: int,
    done: SimpleQueue[EarlyOutput | BaseException],
    left: threading.Event,
) -> None:
    """Compute levels 1 to `wanted` into `done`, until something fails or the reader has left."""
    for level in range(1, wanted + 1):
        if left.is_set():
            return
        try:
            done.put(compute(level))
        except BaseException as error:
            done.put(error)
            return


def _drop(outputs: Iterator[EarlyOutput], running: Future[None] | None) -> None:
    """Stop the encoder: what has not begun never will; a stage that runs is left to end."""

    def close(_: object = None) -> None:
        if hasattr(outputs, "close"):
            outputs.close()

    if running is None:
        close()
    else:
        running.cancel()
        running.add_done_callback(close)


def levels_wanted(plan: Plan) -> int:
    """The finest level whose output the plan reads."""
    return max(max(stage.query_level, stage.level) for stage in plan.stages)


def run_plan(
    searcher: Searcher,
    plan: Plan,
    searched: Modality,
    outputs: Iterator[EarlyOutput],
    timeline: Timeline,
    mask: Mask | None = None,
) -> Found:
    """Each stage as soon as the output that it queries with is there, stopping where it may.

    `mask`: the rows that may be found (None: all).

    What the encoder has not begun by then never begins, once the caller closes `outputs`.
    """
    reader = _Reader(searcher, outputs)
    found: Found | None = None
    before: Candidates | None = None
    for stage in plan.stages:
        query = reader.query(stage)
        size = len(before) if before is not None else searcher.info.rows.get(searched, 0)
        with timeline.measure("search", stage.level, size) as span:
            previous = None if before is None else [before]
            given = mask if previous is None else None
            (candidates,) = searcher.step(searched, stage, query, previous, mask=given)
            span.candidates_out = len(candidates)
        found = found or Found(candidates, stage.level)
        found.candidates, found.level = candidates, stage.level
        found.queries[stage.level] = query
        found.kept[stage.level] = candidates
        if plan.stops(stage.level, candidates, before):
            break
        before = candidates
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

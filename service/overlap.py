"""Encoding and searching at once: the heart of the pipeline, and a plain function of two iterators.

    this thread              | search 1 ...| search 2 ...| search 3
    ahead's thread  encode 1 | encode 2 ......| encode 3 ..|

The encoder never waits for a search: `EarlyOutputs` lets it run through the stages that the plan
reads, and no further, while what is done waits to be searched. All stages run in ahead's thread:
one that joined after the first stage would have to wait until this one lets go of the interpreter,
and short searches would be over by then. With `ahead` None the same stages run in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, Stage
from hivlp.index.masks import Mask
from hivlp.index.searcher import Searcher
from hivlp.models.errors import DeadlinePassed
from hivlp.models.levels import EarlyOutput, FloatArray, Modality, nested_prefix
from hivlp.service.timeline import Timeline

TOO_LATE = "the deadline came before level 1 was searched"


@dataclass(slots=True)
class Found:
    """What a plan found: the last stage's candidates, and per level the query and what was kept.

    `cut`: the deadline came before the plan's last stage.
    """

    candidates: Candidates
    level: int
    queries: dict[int, FloatArray] = field(default_factory=dict)
    kept: dict[int, Candidates] = field(default_factory=dict)
    cut: bool = False


class EarlyOutputs(Iterator[EarlyOutput]):
    """The outputs that a plan reads, each measured; computed in `ahead` where there is one.

    There the first is begun at once, before there is a plan: with a filter that takes a while to
    answer. The others are once `want` has told how many are read. Raises DeadlinePassed from
    `due_s` on (`time.perf_counter`), even while a stage runs ahead. To be closed.
    """

    def __init__(
        self,
        outputs: Iterator[EarlyOutput],
        ahead: Executor | None,
        timeline: Timeline,
        due_s: float | None = None,
    ) -> None:
        self._outputs, self._timeline, self._due_s = outputs, timeline, due_s
        self._wanted, self._given = 0, 0
        self._planned, self._left = threading.Event(), threading.Event()
        self._done: SimpleQueue[EarlyOutput | BaseException] = SimpleQueue()
        self._running = None if ahead is None else ahead.submit(self._run_on)

    def want(self, levels: int) -> None:
        """So many are read, and no more computed; told once."""
        self._wanted = levels
        self._planned.set()

    def __next__(self) -> EarlyOutput:
        """The next one, as soon as it is there."""
        if self._given == self._wanted:
            raise StopIteration
        check_time(self._due_s)
        level = self._given + 1
        output = self._compute(level) if self._running is None else _within(self._due_s, self._done)
        if isinstance(output, BaseException):
            raise output
        self._given = level
        return output

    def close(self) -> None:
        """Stop the encoder: what has not begun never will; a stage that runs is left to end."""
        self._left.set()
        self._planned.set()
        if self._running is None:
            close_outputs(self._outputs)
        else:
            self._running.cancel()
            self._running.add_done_callback(lambda _: close_outputs(self._outputs))

    def _compute(self, level: int) -> EarlyOutput:
        with self._timeline.measure("encode", level):
            output = next(self._outputs)
        assert output.level == level, (output.level, level)
        return output

    def _run_on(self) -> None:
        """Compute what is wanted, until something fails or the reader has left."""
        level = 0
        while not self._left.is_set():
            level += 1
            try:
                self._done.put(self._compute(level))
            except BaseException as error:
                self._done.put(error)
                return
            self._planned.wait()
            if level >= self._wanted:
                return


def check_time(due_s: float | None) -> None:
    """Raises DeadlinePassed from `due_s` on."""
    if due_s is not None and time.perf_counter() >= due_s:
        raise DeadlinePassed(TOO_LATE)


def _within(
    due_s: float | None, done: SimpleQueue[EarlyOutput | BaseException]
) -> EarlyOutput | BaseException:
    if due_s is None:
        return done.get()
    try:
        return done.get(timeout=max(0.0, due_s - time.perf_counter()))
    except Empty:
        raise DeadlinePassed(TOO_LATE) from None


def close_outputs(outputs: Iterator[EarlyOutput]) -> None:
    """Stop what makes them, where that can be told."""
    if hasattr(outputs, "close"):
        outputs.close()


def levels_wanted(plan: Plan) -> int:
    """The finest level whose output the plan reads."""
    return max(max(stage.query_level, stage.level) for stage in plan.stages)


def run_plan(run: PlanRun, outputs: Iterator[EarlyOutput]) -> Found:
    """Each stage as soon as the output that it queries with is there, stopping where it may.

    What the encoder has not begun by then never begins, once the caller closes `outputs`. Raises
    DeadlinePassed where not even the first stage was done in time.
    """
    while not run.done:
        try:
            run.feed(next(outputs))
        except DeadlinePassed:
            run.cut_short()
    return run.found


class PlanRun:
    """A plan being run for one query, as far as its early outputs have come.

    `mask`: the rows that may be found (None: all). `due_s` is when it must stop with what it has.
    """

    def __init__(
        self,
        searcher: Searcher,
        plan: Plan,
        searched: Modality,
        timeline: Timeline,
        mask: Mask | None = None,
        due_s: float | None = None,
    ) -> None:
        self.plan = plan
        self.done = False
        self._searcher = searcher
        self._searched = searched
        self._timeline = timeline
        self._mask = mask
        self._due_s = due_s
        self._nested = searcher.info.gallery == "nested"
        self._dims = {spec.level: spec.dim for spec in searcher.info.levels}
        self._seen: dict[int, FloatArray] = {}
        self._stages = iter(plan.stages)
        self._next: Stage | None = next(self._stages)
        self._found: Found | None = None

    @property
    def found(self) -> Found:
        """What was found, once `done`."""
        assert self._found is not None, "a plan has at least one stage"
        return self._found

    def feed(self, output: EarlyOutput) -> None:
        """Run the stages that this output lets run. Raises DeadlinePassed before one that is late.

        `output.vectors` is (1, dim).
        """
        self._seen[output.level] = output.vectors
        while not self.done and self._next is not None and self._next.query_level in self._seen:
            check_time(self._due_s)
            self._run(self._next)

    def cut_short(self) -> None:
        """Be done with what was found. Raises DeadlinePassed where that is nothing."""
        if self._found is None:
            raise DeadlinePassed(TOO_LATE)
        self._found.cut = True
        self.done = True

    def _run(self, stage: Stage) -> None:
        before = None if self._found is None else self._found.candidates
        query = self._query(stage)
        size = len(before) if before is not None else self._rows
        with self._timeline.measure("search", stage.level, size) as span:
            previous = None if before is None else [before]
            given = self._mask if previous is None else None
            (candidates,) = self._searcher.step(self._searched, stage, query, previous, mask=given)
            span.candidates_out = len(candidates)
        self._keep(stage.level, query, candidates)
        self._next = next(self._stages, None)
        self.done = self._next is None or self.plan.stops(stage.level, candidates, before)

    def _keep(self, level: int, query: FloatArray, candidates: Candidates) -> None:
        if self._found is None:
            self._found = Found(candidates, level)
        self._found.candidates, self._found.level = candidates, level
        self._found.queries[level] = query
        self._found.kept[level] = candidates

    @property
    def _rows(self) -> int:
        return self._searcher.info.rows.get(self._searched, 0)

    def _query(self, stage: Stage) -> FloatArray:
        """(1, dim of the level): the prefix of the stage's query level, or the level's own."""
        if stage.query_level == stage.level or not self._nested:
            return self._seen[stage.level]
        return nested_prefix(self._seen[stage.query_level], self._dims[stage.level])

"""Several searches by one worker: encoded as one batch, searched each by itself.

    read, prepare, plan each ─► stage 1 of all ─► search each that can ─► stage 2 of all ─► ...

Encoding is what a batch makes cheaper; a scan or a walk is as dear for each. A search that is done
answers at once and isn't waited for by the others; when all are done, the encoder stops. What is
wrong with one (its picture, its filter, its plan) fails that one alone. If encoding several fails,
each is tried by itself. Texts of very different lengths are not padded to the longest: they are
encoded in as many parts as are cheapest together (`lengths.py`), short ones first. What one waits
for the others, until it is prepared and until its part begins, is time in the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hivlp.models.encoder import Encoder, EncoderBatch
from hivlp.models.levels import EarlyOutput
from hivlp.service.lengths import split
from hivlp.service.overlap import PlanRun, close_outputs, levels_wanted
from hivlp.service.queries import (
    EncodedQuery,
    ImageQuery,
    Opened,
    Query,
    Setting,
    TextQuery,
    prepare,
)
from hivlp.service.schemas import SearchOptions
from hivlp.service.work import answer, check_side, find, plan_run

log = logging.getLogger("hivlp.service")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One search. Those of a batch are of one version and one tower, without a deadline."""

    query: Query
    options: SearchOptions
    setting: Setting


Tell = Callable[[int, Any], None]
"""What becomes of the search in this place: an answer, or an exception."""


@dataclass(slots=True)
class _Running:
    """A search under way, and its row of the batch that is encoded."""

    place: int
    asked: Asked
    prepared: EncoderBatch
    run: PlanRun
    ready_s: float
    row: int = 0

    @property
    def opened(self) -> Opened:
        return _opened(self.asked, self.prepared)

    @property
    def tokens(self) -> int:
        """How long its text is to the encoder; pictures are all alike."""
        ids = self.prepared.inputs.get("input_ids")
        return 1 if ids is None else ids.shape[1]


def find_together(asked: Sequence[Asked], queued_s: Sequence[float], tell: Tell) -> tuple[int, ...]:
    """Answer each, or say why not; `queued_s` is when each began to wait for a worker.

    Returns how many were encoded together, part by part.
    """
    begun = [
        _attempt(tell, place, partial(_begin, place, one, since_s))
        for place, (one, since_s) in enumerate(zip(asked, queued_s, strict=True))
    ]
    running = [one for one in begun if one is not None]
    parts = [[running[i] for i in part] for part in split([one.tokens for one in running])]
    sizes = tuple(len(part) for part in parts)
    for part in parts:
        _run_part(part, tell)
    return sizes


def _run_part(running: list[_Running], tell: Tell) -> None:
    began_s, size = time.perf_counter(), len(running)
    for one in running:
        one.asked.setting.timeline.add("queue", one.ready_s, began_s)
    try:
        _run(running, _batch(running), tell)
    except BaseException as error:
        if size == 1:
            for one in running:
                tell(one.place, error)
            return
        # Not finite, or out of memory: whose fault it is shows one by one.
        log.error("%d queries can't be encoded together, so each is alone: %s", size, error)
        for one in tuple(running):
            _attempt_alone(one, tell)


def _begin(place: int, asked: Asked, queued_s: float) -> _Running:
    """Read, prepare and plan one search, in the order of one that is alone.

    A picture shrinks to what the encoder takes before the next one is decoded.
    """
    query, setting = _query(asked), asked.setting
    setting.timeline.add("queue", queued_s, time.perf_counter())
    check_side(setting.searcher, asked.options.modality)
    encoder = setting.model.encoder(query.modality, query.param)
    with setting.timeline.measure("decode"):
        prepared = prepare(encoder, query.read(setting), query.param)
    run = plan_run(query, asked.options, setting, _opened(asked, prepared), busy=True)
    return _Running(place, asked, prepared, run, time.perf_counter())


def _opened(asked: Asked, prepared: EncoderBatch) -> Opened:
    return Opened(_query(asked).modality, iter(()), prepared.truncated[0])


def _query(asked: Asked) -> EncodedQuery:
    assert isinstance(asked.query, (TextQuery, ImageQuery)), "only those form groups"
    return asked.query


def _batch(running: Sequence[_Running]) -> EncoderBatch:
    """All that were prepared as one batch, in order; texts are padded to the longest."""
    for row, one in enumerate(running):
        one.row = row
    first = running[0].asked
    if _query(first).modality == "text":
        texts = [_query(one.asked).read(one.asked.setting) for one in running]
        return _encoder(first).prepare(texts)
    parts = [one.prepared for one in running]
    inputs = {name: np.concatenate([p.inputs[name] for p in parts]) for name in parts[0].inputs}
    return EncoderBatch(inputs, len(parts), tuple(p.truncated[0] for p in parts))


def _encoder(asked: Asked) -> Encoder[Any]:
    query = _query(asked)
    return asked.setting.model.encoder(query.modality, query.param)


def _run(running: list[_Running], batch: EncoderBatch, tell: Tell) -> None:
    """Stage by stage; who is done is told and taken out of `running`."""
    wanted = max(levels_wanted(one.run.plan) for one in running)
    with closing(_measured(running, batch, wanted)) as outputs:
        for output in outputs:
            for one in tuple(running):
                _feed(one, output, tell)
                if one.run.done:
                    running.remove(one)
            if not running:
                return


def _measured(
    running: Sequence[_Running], batch: EncoderBatch, wanted: int
) -> Generator[EarlyOutput]:
    """The first `wanted` outputs of the batch; each is a span of all that still run."""
    outputs = _encoder(running[0].asked).encode(batch)
    try:
        for level in range(1, wanted + 1):
            began_s = time.perf_counter()
            output = next(outputs)
            for one in running:
                timeline = one.asked.setting.timeline
                timeline.add("encode", began_s, time.perf_counter(), level)
            yield output
    finally:
        close_outputs(outputs)


def _feed(one: _Running, output: EarlyOutput, tell: Tell) -> None:
    """Search as far as this output lets; whatever ends it ends it alone."""
    own = EarlyOutput(output.level, output.vectors[one.row : one.row + 1])
    try:
        one.run.feed(own)
        if not one.run.done:
            return
        options, setting = one.asked.options, one.asked.setting
        found = answer(options, setting, one.opened, one.run.plan, one.run.found)
    except BaseException as error:
        one.run.done = True
        tell(one.place, error)
    else:
        tell(one.place, found)


def _attempt_alone(one: _Running, tell: Tell) -> None:
    """From the beginning; what was measured of the first try is forgotten."""
    query, options, setting = one.asked.query, one.asked.options, one.asked.setting
    spans = setting.timeline.spans
    spans[:] = [span for span in spans if span.name in ("cache", "queue")]
    found = _attempt(tell, one.place, partial(find, query, options, setting, None, busy=True))
    if found is not None:
        tell(one.place, found)


def _attempt(tell: Tell, place: int, work: Callable[[], T]) -> T | None:
    """What it returns; None where it failed, which is told."""
    try:
        return work()
    except BaseException as error:
        tell(place, error)
        return None

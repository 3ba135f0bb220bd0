"""Several searches by one worker: encoded as one batch, searched each by itself.

    read each ─► prepare as one ─► stage 1 of all ─► search each that can ─► stage 2 of all ─► ...

Encoding is what a batch makes cheaper; a scan or a walk is as dear for each. A search that is done
answers at once and isn't waited for by the others; when all are done, the encoder stops. What is
wrong with one (its picture, its filter, its plan) fails that one alone. If encoding fails, each is
tried by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hivlp.models.encoder import Encoder, EncoderBatch
from hivlp.models.errors import DeadlinePassed, InputError
from hivlp.models.levels import EarlyOutput
from hivlp.service.overlap import PlanRun, check_time, levels_wanted
from hivlp.service.queries import EncodedQuery, Opened, Setting, prepare
from hivlp.service.schemas import SearchOptions
from hivlp.service.work import answer, check_side, find, plan_run

log = logging.getLogger("hivlp.service")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One search of a batch: all of one version and one tower, none of them re-ranked."""

    query: EncodedQuery
    options: SearchOptions
    setting: Setting


Deliver = Callable[[int, Any], None]
"""What becomes of the search in this place: an answer, or an exception."""


@dataclass(slots=True)
class _Running:
    """A search under way; `row` is its place in the batch that is encoded."""

    place: int
    asked: Asked
    content: Any
    run: PlanRun
    row: int = 0
    truncated: bool = False

    @property
    def opened(self) -> Opened:
        modality = self.asked.query.modality
        return Opened(modality, iter(()), self.truncated, content=self.content)


def find_together(asked: Sequence[Asked], deliver: Deliver) -> int:
    """Answer each, or say why not. Returns how many were encoded together."""
    running = [
        one
        for place, each in enumerate(asked)
        if (one := _attempt(deliver, place, partial(_begin, place, each))) is not None
    ]
    size = len(running)
    try:
        batch = _prepare(running, deliver)
        size = len(running)
        if batch is not None:
            _run(running, batch, deliver)
    except Exception as error:
        # Not finite, or out of memory: whose fault it is shows one by one.
        log.error("%d queries can't be encoded together, so each is alone: %s", size, error)
        for one in running:
            _attempt_alone(one, deliver)
    return size


def _begin(place: int, asked: Asked) -> _Running:
    query, setting = asked.query, asked.setting
    check_time(setting.due_s)
    check_side(setting.searcher, asked.options.modality)
    setting.model.encoder(query.modality, query.param)
    with setting.timeline.measure("decode"):
        content = query.read(setting)
    opened = Opened(query.modality, iter(()), content=content)
    run = plan_run(query, asked.options, setting, opened, busy=True)
    return _Running(place, asked, content, run)


def _prepare(running: list[_Running], deliver: Deliver) -> EncoderBatch | None:
    """One batch of all; who can't be prepared is told and taken out of `running`."""
    while running:
        try:
            batch = _encoder(running).prepare([one.content for one in running])
        except InputError:
            well = [one for one in running if _attempt(deliver, one.place, partial(_alone, one))]
            if len(well) == len(running):
                raise
            running[:] = well
            continue
        for row, one in enumerate(running):
            one.row, one.truncated = row, batch.truncated[row]
        return batch
    return None


def _alone(one: _Running) -> EncoderBatch:
    return prepare(_encoder([one]), one.content, one.asked.query.param)


def _encoder(running: Sequence[_Running]) -> Encoder[Any]:
    query, setting = running[0].asked.query, running[0].asked.setting
    return setting.model.encoder(query.modality, query.param)


def _run(running: list[_Running], batch: EncoderBatch, deliver: Deliver) -> None:
    """Stage by stage; who is done is delivered and taken out of `running`."""
    wanted = max(levels_wanted(one.run.plan) for one in running)
    with closing(_measured(running, batch, wanted)) as outputs:
        for output in outputs:
            for one in tuple(running):
                _feed(one, output, deliver)
                if one.run.done:
                    running.remove(one)
            if not running:
                return


def _measured(
    running: Sequence[_Running], batch: EncoderBatch, wanted: int
) -> Generator[EarlyOutput]:
    """The first `wanted` outputs of the batch; each is a span of all that still run."""
    outputs = _encoder(running).encode(batch)
    try:
        for level in range(1, wanted + 1):
            began_s = time.perf_counter()
            output = next(outputs)
            for one in running:
                timeline = one.asked.setting.timeline
                timeline.add("encode", began_s, time.perf_counter(), level)
            yield output
    finally:
        if hasattr(outputs, "close"):
            outputs.close()


def _feed(one: _Running, output: EarlyOutput, deliver: Deliver) -> None:
    """Search as far as this output lets; whatever ends it ends it alone."""
    own = EarlyOutput(output.level, output.vectors[one.row : one.row + 1])
    try:
        try:
            one.run.feed(own)
        except DeadlinePassed:
            one.run.cut_short()
        if not one.run.done:
            return
        options, setting = one.asked.options, one.asked.setting
        found = answer(options, setting, one.opened, one.run.plan, one.run.found)
    except Exception as error:
        one.run.done = True
        deliver(one.place, error)
    else:
        deliver(one.place, found)


def _attempt_alone(one: _Running, deliver: Deliver) -> None:
    query, options, setting = one.asked.query, one.asked.options, one.asked.setting
    found = _attempt(deliver, one.place, partial(find, query, options, setting, None, busy=True))
    if found is not None:
        deliver(one.place, found)


def _attempt(deliver: Deliver, place: int, work: Callable[[], T]) -> T | None:
    """What it returns; None where it failed, which is delivered."""
    try:
        return work()
    except Exception as error:
        deliver(place, error)
        return None

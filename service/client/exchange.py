"""One call from its first try to its result, without a socket or a clock of its own.

`exchange` is a generator: it yields what is to be done (`Prepare`, `Send`, `Wait`), is sent what
came of it, and returns the result or raises a `ClientError`. Whoever drives it, blocking or not,
decides nothing. Every endpoint here may be sent twice: searches and reads change nothing, and an
item put or deleted twice is as it was after the first time.
"""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import httpx
from pydantic import ValidationError

from hivlp.service.answers import ErrorAnswer
from hivlp.service.client.errors import (
    BadAnswer,
    ClientError,
    Refused,
    TimedOut,
    Unreachable,
    kind_of,
    status_of,
)
from hivlp.service.client.fields import Fields, encode
from hivlp.service.client.timing import Retries, Timeouts, retry_after_s

T = TypeVar("T")
OK = frozenset({200})
REQUEST_ID = "X-Request-ID"
SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, all of it."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request of the API, and how its answer is read.

    `fields` makes the body, once, whatever is sent again; `blocks` says that it reads a file.
    `answers` are the statuses whose bodies `read` takes; any other is an error.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    fields: Callable[[], Fields] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    answers: frozenset[int] = OK
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the body: the result is its fields."""

    fields: Callable[[], Fields]
    blocks: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Send this and read all of the answer within `left_s`.

    The result is a `Reply`, or what httpx raised, or a TimeoutError.
    """

    request: Mapping[str, Any]
    timeouts: Timeouts
    left_s: float

    @property
    def arguments(self) -> dict[str, Any]:
        """What httpx's `request` and `stream` take."""
        return {**self.request, "timeout": self.timeouts.within(self.left_s)}


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Terms:
    """How patient a call is; the two functions are those of a test where one wants them."""

    timeouts: Timeouts
    retries: Retries
    now_s: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random


Step: TypeAlias = Prepare | Send | Wait
Outcome: TypeAlias = Fields | Reply | httpx.HTTPError | TimeoutError | None
Steps: TypeAlias = Generator[Step, Outcome, T]


def exchange(call: Call[T], terms: Terms) -> Steps[T]:
    """The steps of a call. Raises ClientError.

    No try begins after `total_s`, nor after the `deadline_ms` of what is asked: an answer that may
    come later is of no use by then. What is sent again says how much of its deadline is left.
    """
    due_s, request_id = terms.now_s() + terms.timeouts.total_s, uuid.uuid4().hex
    fields: Any = None if call.fields is None else (yield Prepare(call.fields, call.blocks))
    sent_s = first_s = terms.now_s()
    last_s = min(due_s, first_s + _deadline_s(fields))
    tries = 0
    while True:
        tries += 1
        request = _request(call, _later(fields, sent_s - first_s), request_id)
        outcome = yield Send(request, terms.timeouts, max(due_s - sent_s, SHORTEST_S))
        result = _judged(call, outcome)
        if not isinstance(result, ClientError):
            return result
        result.tries = tries
        result.request_id = result.request_id or request_id
        wait_s = terms.retries.wait_s(result, tries, terms.draw())
        if wait_s is None or terms.now_s() + wait_s >= last_s:
            raise result
        yield Wait(wait_s)
        sent_s = terms.now_s()
        if sent_s >= last_s:  # woken late
            raise result


def _request(call: Call[Any], fields: Fields | None, request_id: str) -> dict[str, Any]:
    """What httpx is told."""
    headers = {REQUEST_ID: request_id}
    if fields is not None:
        headers["Content-Type"] = "application/json"
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params) or None,
        "headers": headers,
        "content": None if fields is None else encode(fields),
    }


def _asked(fields: Fields | None) -> list[Fields]:
    """The searches of a body: those of a batch, or the one that it is."""
    if fields is None:
        return []
    searches: list[Fields] = fields.get("searches", [fields])
    return searches


def _deadline_ms(search: Fields) -> float | None:
    """The deadline of a search; what isn't a number is for the service to refuse."""
    given = search.get("deadline_ms")
    return float(given) if isinstance(given, int | float) else None


def _deadline_s(fields: Fields | None) -> float:
    """When the last search of a body is too late; infinity where one may take any time."""
    given = [_deadline_ms(search) for search in _asked(fields)]
    return max((math.inf if ms is None else ms / 1e3 for ms in given), default=math.inf)


def _later(fields: Fields | None, elapsed_s: float) -> Fields | None:
    """`fields` after so many seconds: deadlines are counted from when a request arrives."""
    if fields is None or not elapsed_s:
        return fields
    if "searches" in fields:
        return {**fields, "searches": [_later(one, elapsed_s) for one in fields["searches"]]}
    deadline_ms = _deadline_ms(fields)
    if deadline_ms is None:
        return fields
    return {**fields, "deadline_ms": max(SHORTEST_S, deadline_ms / 1e3 - elapsed_s) * 1e3}


def _judged(call: Call[T], outcome: Outcome) -> T | ClientError:
    """The result of a try, or what is wrong with it."""
    place = f"{call.method} {call.path}"
    if isinstance(outcome, Reply):
        return _read(call, outcome, place)
    assert isinstance(outcome, Exception), f"not what comes of sending: {outcome!r}"
    return _chained(_broken(outcome, place), outcome)


def _read(call: Call[T], reply: Reply, place: str) -> T | ClientError:
    if reply.status not in call.answers:
        return refusal(reply, place)
    try:
        return call.read(reply)
    except ValidationError as error:
        if reply.status not in OK:
            return refusal(reply, place)
        message = f"{place}: the answer is not one of this service"
        bad = BadAnswer(message, code="bad_answer", status=reply.status)
        return _chained(bad, error)


def _broken(error: Exception, place: str) -> ClientError:
    """A try without an answer. Never a word of the request: it holds the key."""
    said = f"{place}: {str(error) or 'no reason given'} ({type(error).__name__})"
    if isinstance(error, httpx.ConnectTimeout):
        return Unreachable(said, code="unreachable")
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return TimedOut(f"{place}: no whole answer in time", code="timed_out")
    if isinstance(error, httpx.TransportError):
        return Unreachable(said, code="unreachable")
    return BadAnswer(said, code="bad_answer")


def refusal(reply: Reply, place: str) -> Refused | BadAnswer:
    """The error of an answer that is one; a proxy's has no code and no message of ours."""
    request_id = reply.headers.get(REQUEST_ID)
    if reply.status < 400:
        message = f"{place}: HTTP {reply.status}, which is no answer of this service"
        return BadAnswer(message, code="bad_answer", status=reply.status, request_id=request_id)
    after_s = retry_after_s(reply.headers.get("Retry-After"))
    kind = kind_of(reply.status)
    try:
        detail = ErrorAnswer.model_validate_json(reply.content, extra="ignore").error
    except ValidationError:
        return kind(
            f"{place}: HTTP {reply.status}",
            code=f"http_{reply.status}",
            status=reply.status,
            request_id=request_id,
            retry_after_s=after_s,
        )
    return kind(
        detail.message,
        code=detail.code,
        param=detail.param,
        status=reply.status,
        request_id=detail.request_id,
        retry_after_s=after_s,
    )


def entry_error(entry: ErrorAnswer) -> Refused:
    """The error that an entry of a batch is: the one that its search would have got alone."""
    detail = entry.error
    status = status_of(detail.code)
    return kind_of(status)(
        detail.message,
        code=detail.code,
        param=detail.param,
        status=status,
        request_id=detail.request_id,
    )


def _chained(error: ClientError, cause: Exception) -> ClientError:
    error.__cause__ = cause
    return error

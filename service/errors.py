"""Errors as HTTP: one table from error to status, one body.

    {"error": {"code", "message", "param", "request_id"}}

HTTP words live here and nowhere deeper. What isn't in the table is a bug of ours: it is logged with
the request id, in full once for all who fail of it (`failures.py`), and answered with 500, without
a word of its text.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from hivlp.index.errors import ActivationUnderWay, NoSuchItem, SnapshotMissing
from hivlp.models.errors import DeadlinePassed, HivlpError, InputError
from hivlp.service.failures import log_failure
from hivlp.service.pictures import NoPicture


class ServiceError(HivlpError):
    """An answer that isn't a result: its status, code, message and the parameter to blame."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


class Malformed(ServiceError):
    """The body can't be parsed at all."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "malformed_body", message)


class BodyTooLarge(ServiceError):
    """More bytes than `limits.max_body_bytes`, whatever Content-Length said."""

    def __init__(self, limit: int) -> None:
        message = f"the body is larger than the limit of {limit} bytes"
        super().__init__(413, "body_too_large", message, headers={"Connection": "close"})


class BodyTimeout(ServiceError):
    """The body did not come in time."""

    def __init__(self, limit_s: float) -> None:
        message = f"the body did not come within {limit_s:g} s"
        super().__init__(408, "body_timeout", message, headers={"Connection": "close"})


class Overloaded(ServiceError):
    """As much is under way as may be: an ordinary answer, never a failure.

    `what` says how much that is; `retry_s` is when there may be room again.
    """

    def __init__(self, what: str, *, retry_s: float = 1.0) -> None:
        headers = {"Retry-After": str(max(1, math.ceil(retry_s)))}
        super().__init__(429, "overloaded", f"{what}, the most there may be; try again",
                         headers=headers)  # fmt: skip


class TooManyConnections(ServiceError):
    """Told on connections that are beyond the limit, which then end."""

    def __init__(self, limit: int) -> None:
        message = f"{limit} connections are open, the most there may be; try again"
        headers = {"Retry-After": "1", "Connection": "close"}
        super().__init__(429, "too_many_connections", message, headers=headers)


class NotReady(ServiceError):
    """Still loading, or unable to load."""

    def __init__(self, message: str = "models and indexes are still loading") -> None:
        super().__init__(503, "not_ready", message, headers={"Retry-After": "1"})


class WorkerDied(ServiceError):
    """The thread that had a search, or was to take it, is no more."""

    def __init__(self) -> None:
        message = "what ran this search has failed and is being replaced: try again"
        super().__init__(503, "worker_died", message, headers={"Retry-After": "1"})


class ReadOnly(ServiceError):
    """Items can't be changed over HTTP here, or not by whoever asks."""

    def __init__(
        self,
        why: str = "items can't be changed over HTTP here: HIVLP_CHANGES__WRITES=true allows it",
    ) -> None:
        super().__init__(403, "read_only", why)


class NotWritable(ServiceError):
    """The store can't be written to now."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, "not_writable", reason, headers={"Retry-After": "5"})


def not_available(param: str, message: str) -> InputError:
    """What the request model knows and this version can't do yet: said, never ignored."""
    return InputError("not_available", message, param=param)


# Codes of InputError that aren't plain "out of range".
INPUT_STATUS = {"unsupported_image": 415, "image_too_large": 413}

# Of SnapshotMissing: whether a version was named.
SNAPSHOT_CODES = {True: ("no_such_snapshot", "snapshot"), False: ("no_such_index", "index")}

HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}

# Types of pydantic's errors, by the word we use for them; all others are `invalid_value`.
VALIDATION_CODES = {
    "missing": "missing_field",
    "extra_forbidden": "unknown_field",
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
    "too_long": "out_of_range",
    "too_short": "out_of_range",
    "invalid_text": "invalid_text",
}
# Of fields that take one of several types, pydantic's path also names the type; we don't.
UNION_FIELDS = frozenset({"with_metadata"})
# What was sent is quoted in errors no further than this.
MAX_QUOTED_CHARS = 4_096
PLAIN_MESSAGES = {"missing": "is needed", "extra_forbidden": "is not a field of this request"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One error answer, before it is bytes."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> dict[str, Any]:
        """The envelope."""
        inner = {
            "code": self.code,
            "message": _clipped(self.message),
            "param": None if self.param is None else _clipped(self.param),
            "request_id": request_id,
        }
        return {"error": inner}


def problem_of(error: Exception) -> Problem | None:
    """The one table. None for what nobody raised on purpose."""
    match error:
        case ServiceError():
            return Problem(error.status, error.code, error.message, error.param, error.headers)
        case InputError():
            return Problem(
                INPUT_STATUS.get(error.code, 422), error.code, error.message, error.param
            )
        case DeadlinePassed():
            return Problem(504, "deadline_passed", str(error), "deadline_ms")
        case NoSuchItem():
            return Problem(404, "no_such_item", str(error), "id")
        case ActivationUnderWay():
            message = f"version {error.version} {error.reason}"
            return Problem(409, "activation_under_way", message, "snapshot")
        case SnapshotMissing():
            code, param = SNAPSHOT_CODES[bool(error.version)]
            return Problem(404, code, error.reason, param)
        case NoPicture():
            return Problem(404, "no_picture", str(error), "id")
        case ValidationError() | RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            code = HTTP_CODES.get(error.status_code, "malformed_body")
            return Problem(error.status_code, code, str(error.detail), headers=error.headers or {})
    return None


def _of_validation(error: ValidationError | RequestValidationError) -> Problem:
    first = error.errors()[0]
    kind = str(first["type"])
    places = [
        place
        for before, place in zip((None, *first["loc"]), first["loc"], strict=False)
        if before not in UNION_FIELDS or isinstance(place, int)
    ]
    if isinstance(error, RequestValidationError):
        del places[:1]  # body, query or path: where it was, not what it is called
    param = ".".join(str(place) for place in places) or None
    message = PLAIN_MESSAGES.get(kind) or first["msg"].removeprefix("Value error, ")
    code = VALIDATION_CODES.get(kind, "invalid_value")
    return Problem(422, code, f"{param or 'the body'}: {message}", param)


def _clipped(text: str) -> str:
    """What may be written as JSON, whatever was sent: half of a surrogate pair as its escape."""
    cut = text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}…"
    return cut.encode("utf-8", "backslashreplace").decode()


def problem_response(problem: Problem, request_id: str) -> Response:
    """The error as an HTTP response."""
    return Response(
        orjson.dumps(problem.body(request_id)),
        status_code=problem.status,
        headers=dict(problem.headers),
        media_type="application/json",
    )


def internal_problem(error: BaseException, request_id: str) -> Problem:
    """500: the log tells what happened, the answer only where to look."""
    log_failure(error, request_id)
    return Problem(500, "internal_error", "something went wrong here; the log has the request id")


def let_go(error: BaseException) -> None:
    """Empty the frames that an error has come through, once it has been told and logged.

    An error and the tasks that it went through hold each other: pictures in those frames would live
    until the next full collection.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        following = error.__cause__ or error.__context__
        if following is None:
            return
        error = following


def _allowed(request: Request) -> str:
    """The methods of all routes of a path; Starlette tells those of the first."""
    routes = [context.route for context in iter_route_contexts(request.app.routes)]
    found = {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return ", ".join(sorted(found))


def install(app: FastAPI) -> None:
    """Answer every error of the table in our form."""

    async def answer(request: Request, error: Exception) -> Response:
        request_id = str(request.state.request_id)
        problem = problem_of(error) or internal_problem(error, request_id)
        if problem.status == 405:
            problem = replace(problem, headers={"Allow": _allowed(request)})
        request.state.error_code = problem.code
        let_go(error)
        return problem_response(problem, request_id)

    for kind in (HivlpError, HTTPException, RequestValidationError, ValidationError):
        app.add_exception_handler(kind, answer)

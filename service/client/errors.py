"""The errors of the client: one small tree, whatever went wrong and wherever.

ClientError
├── Unreachable          no connection, or one that broke
├── TimedOut             no whole answer in time
├── BadAnswer            an answer that isn't one of this service: a proxy's page, a cut body
└── Refused              the service said no
    ├── InvalidRequest   400, 405, 408, 413, 415, 422, 431; `status` None: seen here, and never sent
    ├── NotAllowed       401, 403
    ├── NotFound         404
    ├── Conflict         409
    ├── Overloaded       429
    ├── Unavailable      502, 503
    ├── TooLate          504
    └── ServerFailed     500, and all others
"""

from __future__ import annotations

from hivlp.models.errors import HivlpError


class ClientError(HivlpError):
    """A request that has no result.

    `code` is a stable word for programs, `param` the dotted path of the field to blame, `status`
    that of HTTP where there was an answer. `request_id` is in the service's log, also where no
    answer came. `retry_after_s` is what the service asked for; `tries` is how often the request
    was sent. A `NotFound` of a delete with more than one try may tell of what an earlier one did.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "failed",
        param: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.tries = 0

    def __str__(self) -> str:
        known = {"status": self.status, "request": self.request_id}
        rest = "".join(f", {name} {value}" for name, value in known.items() if value is not None)
        return f"{self.message} ({self.code}{rest})"


class Unreachable(ClientError):
    """No connection could be made, or it broke before the answer was here."""


class TimedOut(ClientError):
    """The whole answer was not here in time."""


class BadAnswer(ClientError):
    """What came back is not an answer of this service."""


class Refused(ClientError):
    """The service answered with an error."""


class InvalidRequest(Refused):
    """The request itself is wrong: sent again, it would be refused again."""


class NotAllowed(Refused):
    """The key is missing or wrong, or this may not be done here."""


class NotFound(Refused):
    """No such index, version, item, picture or endpoint."""


class Conflict(Refused):
    """Something else is under way, or was asked for with the same key."""


class Overloaded(Refused):
    """Full: every place is taken."""


class Unavailable(Refused):
    """Not ready, not writable, or stopping."""


class TooLate(Refused):
    """Not even the first level was done by `deadline_ms`, or a proxy waited no longer."""


class ServerFailed(Refused):
    """Something went wrong in the service; its log has the request id."""


# What an entry of a batch doesn't say: the status that its code has alone. See docs/api.md.
CODES = {
    400: ("malformed_body", "malformed_request"),
    401: ("missing_key",),
    403: ("read_only", "wrong_key", "not_admin", "wrong_host", "builds_off"),
    404: (
        *("no_such_index", "no_such_snapshot", "no_such_item", "no_picture", "no_such_build"),
        "not_found",
    ),
    405: ("method_not_allowed",),
    408: ("body_timeout", "head_timeout"),
    409: ("activation_under_way", "not_activatable", "build_under_way", "key_reused"),
    413: ("body_too_large", "image_too_large", "too_many_values"),
    415: ("unsupported_media_type", "unsupported_image"),
    422: (
        *("missing_field", "unknown_field", "invalid_value", "out_of_range", "not_available"),
        *("empty_text", "text_too_long", "invalid_text", "empty_image", "broken_image"),
        *("url_not_allowed", "fetch_failed"),
        *("invalid_plan", "invalid_vector", "invalid_filter", "no_encoder"),
        *("invalid_id", "invalid_metadata", "nothing_to_search"),
        *("invalid_index", "outside_roots"),
    ),
    429: ("overloaded", "too_many_connections"),
    431: ("head_too_large",),
    500: ("internal_error",),
    503: ("not_ready", "not_writable", "worker_died"),
    504: ("deadline_passed",),
}
_STATUSES = {code: status for status, codes in CODES.items() for code in codes}

_KINDS: dict[int, type[Refused]] = {
    400: InvalidRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    405: InvalidRequest,
    408: InvalidRequest,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    431: InvalidRequest,
    502: Unavailable,
    503: Unavailable,
    504: TooLate,
}


def status_of(code: str) -> int | None:
    """The status that an error of this code has; None for a code that is newer than the client."""
    return _STATUSES.get(code)


def kind_of(status: int | None) -> type[Refused]:
    """The class of an error answered with this status."""
    if status is None:
        return Refused
    return _KINDS.get(status, ServerFailed if status >= 500 else Refused)

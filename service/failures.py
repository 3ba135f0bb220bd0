"""Failures that nobody raised on purpose: each is logged in full once, however many requests fail
of it.

One search may be awaited by many requests, which then all get the one error. Its traceback stands
under the request that began the search, also where that one's client has left; every other one
has a line that names it.
"""

from __future__ import annotations

import logging

from hivlp.service.logs import with_fields

log = logging.getLogger("hivlp.service")
_BEGAN, _LOGGED = "_hivlp_began", "_hivlp_logged"
"""Set on the error itself, for it is what those who fail of it share."""


def begun_by(error: BaseException, request_id: str | None) -> None:
    """Say which request began what failed, before it is logged."""
    if request_id is not None and not hasattr(error, _BEGAN):
        setattr(error, _BEGAN, request_id)


def log_failure(error: BaseException, request_id: str) -> None:
    """Log that a request failed of an error, with its traceback where nobody has yet."""
    first: str = getattr(error, _BEGAN, request_id)
    if not hasattr(error, _LOGGED):
        setattr(error, _LOGGED, True)
        own = with_fields({"request_id": first})
        log.error("request %s failed", first, exc_info=error, extra=own)
        if first == request_id:
            return
    log.error(
        "request %s failed as request %s did: %s", request_id, first, type(error).__name__,
        extra=with_fields({"request_id": request_id}),
    )  # fmt: skip

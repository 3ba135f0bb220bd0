"""One line a request, within bounds: the way from a slow percentile to what one request did.

A request that is slower than a setting, or failed, is logged with its stages at WARNING; of the
others as many a second as a setting allows. What is kept back is counted, and told by the next
line. A request that has a line is an exemplar of its bucket in `hivlp_request_duration_seconds`:
every exemplar leads to a line.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from hivlp.service.logs import with_fields
from hivlp.service.queries import ImageQuery, ItemQuery, Query, TextQuery, VectorQuery
from hivlp.service.timeline import Timeline
from hivlp.service.watch_settings import LogSettings

log = logging.getLogger("hivlp.request")
PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
# Of an answer: what says how it came about.
TOLD = ("index", "snapshot", "plan", "exit_level", "returned", "cached", "degraded", "partial")
MAX_QUERY_CHARS = 500
SERVER_ERRORS = 500


@dataclass(slots=True)
class Noted:
    """One search of a request: what was asked, when its stages ran, and what was answered."""

    timeline: Timeline
    query: Query | None = None
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has been answered, or whose client has left."""

    request_id: str
    method: str
    route: str
    status: int
    started_s: float
    duration_s: float
    error: str | None = None
    noted: list[Noted] = field(default_factory=list)
    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False)


class Allowance:
    """So many a second, and what was saved of one second. Not for threads: the loop calls it."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s)
        self._left = self._most if per_s else 0.0
        self._clock = clock
        self._looked_s = clock()
        self.refused = 0

    def take(self) -> bool:
        """Whether one more is allowed now."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._looked_s) * self._per_s)
        self._looked_s = now_s
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        return True

    def told(self) -> int:
        """How many were refused since this was last asked."""
        refused, self.refused = self.refused, 0
        return refused


def note(request: Request, timeline: Timeline) -> Noted:
    """Begin to note one search of a request."""
    noted = Noted(timeline)
    every: list[Noted] = request.scope["state"].setdefault("noted", [])
    every.append(noted)
    return noted


class RequestLog:
    """Writes the lines of one app."""

    def __init__(self, settings: LogSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._slow = Allowance(settings.slow_per_s, clock)
        self._others = Allowance(settings.requests_per_s, clock)

    def ended(self, request: Ended, more: dict[str, Any] | None = None) -> bool:
        """Log a request, or count it; returns whether it has a line. `more` is said besides."""
        remarkable = self._is_remarkable(request)
        if request.route in PROBES and not remarkable:
            return False
        level = logging.WARNING if remarkable else logging.INFO
        allowance = self._slow if remarkable else self._others
        if not log.isEnabledFor(level) or not allowance.take():
            return False
        fields = {**_fields(request), **(more or {})}
        if self._settings.queries and request.noted:
            fields["queries"] = [asked(noted.query) for noted in request.noted]
        not_logged = allowance.told()
        if not_logged:
            fields["not_logged"] = not_logged
        log.log(level, "%s %s", request.method, request.route, extra=with_fields(fields))
        return True

    def _is_remarkable(self, request: Ended) -> bool:
        if request.status >= SERVER_ERRORS:
            # That it isn't ready is said by what keeps it from being so, not by every probe.
            return request.route not in PROBES
        return request.duration_s * 1e3 >= self._settings.slow_ms


def _fields(request: Ended) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "method": request.method,
        "route": request.route,
        "status": request.status,
        "duration_ms": _ms(request.duration_s),
    }
    if request.error is not None:
        fields["error"] = request.error
    if len(request.noted) == 1:
        fields.update(_found(request.noted[0]))
        fields.update(_around(request))
    elif request.noted:
        fields["searches"] = len(request.noted)
        fields["failed"] = sum(noted.answer is None for noted in request.noted)
        fields["slowest"] = _found(max(request.noted, key=_took_s))
    return fields


def _found(noted: Noted) -> dict[str, Any]:
    """How one search went: what its answer says of it, and where its time went."""
    fields: dict[str, Any] = {}
    if noted.query is not None:
        fields["kind"] = noted.query.kind
    if noted.answer is not None:
        fields.update((name, noted.answer[name]) for name in TOLD if name in noted.answer)
    stages: dict[str, float] = {}
    for span in noted.timeline.spans:
        name = span.name if span.level is None else f"{span.name}{span.level}"
        stages[name] = round(stages.get(name, 0.0) + _ms(span.duration_s), 3)
    if stages:
        fields["stages_ms"] = stages
    return fields


def _around(request: Ended) -> dict[str, float]:
    """The time before the first stage (the body, waiting for the event loop), and after the last
    one (the answer on its way).
    """
    spans = tuple(request.noted[0].timeline.spans)
    if not spans:
        return {}
    first_s = min(span.start_s for span in spans)
    last_s = max(span.end_s for span in spans)
    ended_s = request.started_s + request.duration_s
    return {
        "before_ms": _ms(first_s - request.started_s),
        "after_ms": _ms(max(0.0, ended_s - last_s)),
    }


def _took_s(noted: Noted) -> float:
    spans = noted.timeline.spans
    return max((span.end_s for span in spans), default=0.0) - noted.timeline.origin


def asked(query: Query | None) -> Any:
    """What was asked for, in few characters; of a picture only what tells it from others."""
    match query:
        case TextQuery():
            return query.text[:MAX_QUERY_CHARS]
        case ItemQuery():
            return {"id": query.id[:MAX_QUERY_CHARS]}
        case ImageQuery():
            digest = hashlib.sha256(query.data).hexdigest()
            return {"image_bytes": len(query.data), "sha256": digest}
        case VectorQuery():
            return {"dims": len(query.vector)}
    return None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

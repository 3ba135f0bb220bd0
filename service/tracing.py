"""OpenTelemetry: one span a request, its stages as children. Off unless an endpoint is set.

Spans are made when a request has ended, of the times that its timeline took anyway: nothing is
measured twice, no context travels through the worker threads, and a request whose trace isn't
sampled costs one decision. The spans of one that is cost OpenTelemetry a millisecond: they are made
in a thread, so that the event loop goes on. The trace that a request belongs to is read from its
`traceparent`. FastAPI's own spans are switched off (`app.py`): they hold paths and queries.

Where spans go, and what else an exporter needs (keys, certificates), OpenTelemetry's own variables
say (`OTEL_EXPORTER_OTLP_HEADERS` and so on); they are exported by a thread, a batch at a time, and
dropped where the collector doesn't take them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING

from hivlp.models.errors import MissingExtra
from hivlp.service.priority import behind
from hivlp.service.request_log import PROBES, SERVER_ERRORS, TOLD, Ended, Noted
from hivlp.service.timeline import Span
from hivlp.service.watch_settings import TraceSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

CARRIED = (b"traceparent", b"tracestate")
EXPORT_TIMEOUT_S = 5
MAX_WAITING = 1_000
"""So many traces may wait for their spans; of those beyond only the first span is exported."""
Attributes = Mapping[str, "AttributeValue"]


class Tracing:
    """Makes the spans of one app."""

    def __init__(self, provider: TracerProvider) -> None:
        """`provider` says what is sampled, and where spans go."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("hivlp", version("hivlp"))
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._pool = ThreadPoolExecutor(1, "hivlp-trace", behind)
        self._room = threading.Semaphore(MAX_WAITING)

    def ended(self, request: Ended) -> dict[str, str]:
        """Begin the spans of a request; returns its ids, or nothing where it isn't sampled."""
        if request.route in PROBES:
            return {}
        clock = _Clock()
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            context=self._caller(request),
            kind=self._server,
            attributes=_of_request(request),
            start_time=clock.ns(request.started_s),
        )
        ids = span.get_span_context()
        if not ids.trace_flags.sampled:
            return {}
        if request.status >= SERVER_ERRORS:
            span.set_status(self._error, request.error)
        if self._room.acquire(blocking=False):
            self._pool.submit(self._finish, request, span, clock)
        else:
            span.end(clock.ns(request.started_s + request.duration_s))
        return {"trace_id": f"{ids.trace_id:032x}", "span_id": f"{ids.span_id:016x}"}

    def close(self) -> None:
        """Export what is left, for a few seconds at most. Blocking."""
        self._pool.shutdown(wait=True)
        self._provider.shutdown()

    def _finish(self, request: Ended, span: OtelSpan, clock: _Clock) -> None:
        """In the thread: the spans within, then the end."""
        try:
            self._children(request, self._within(span), clock)
            span.end(clock.ns(request.started_s + request.duration_s))
        finally:
            self._room.release()

    def _caller(self, request: Ended) -> Context:
        """The trace that the request belongs to, if its headers say one that can be read."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.headers
            if name in CARRIED
        }
        return self._propagator.extract(carrier)

    def _within(self, span: OtelSpan) -> Context:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)

    def _children(self, request: Ended, within: Context, clock: _Clock) -> None:
        """The stages; of several searches, each search with its own."""
        if len(request.noted) == 1:
            self._stages(request.noted[0].timeline.spans, within, clock)
            return
        for place, noted in enumerate(request.noted):
            spans = tuple(noted.timeline.spans)
            end_s = max((span.end_s for span in spans), default=noted.timeline.origin)
            attributes = {"hivlp.place": place, **_of_search(noted)}
            search = self._tracer.start_span(
                "search of a batch",
                context=within,
                attributes=attributes,
                start_time=clock.ns(noted.timeline.origin),
            )
            self._stages(spans, self._within(search), clock)
            search.end(clock.ns(end_s))

    def _stages(self, spans: Iterable[Span], within: Context, clock: _Clock) -> None:
        for span in tuple(spans):
            name = span.name if span.level is None else f"{span.name} {span.level}"
            self._tracer.start_span(
                name,
                context=within,
                attributes=_of_stage(span),
                start_time=clock.ns(span.start_s),
            ).end(clock.ns(span.end_s))


class _Clock:
    """Nanoseconds since 1970 of what `time.perf_counter` said, by both clocks as they are now."""

    def __init__(self) -> None:
        self._then_ns = time.time_ns() - time.perf_counter_ns()

    def ns(self, counter_s: float) -> int:
        """The time of day."""
        return self._then_ns + int(counter_s * 1e9)


def open_tracing(settings: TraceSettings) -> Tracing | None:
    """What makes spans, as settings say; None without an endpoint.

    Raises MissingExtra where there is one and OpenTelemetry isn't installed.
    """
    if settings.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise MissingExtra("opentelemetry", "otel") from error
    named = {"service.name": settings.service_name, "service.version": version("hivlp")}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.share)),
        resource=Resource.create(named),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _of_request(request: Ended) -> Attributes:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": request.status,
        "hivlp.request_id": request.request_id,
    }
    if request.error is not None:
        attributes["error.type"] = request.error
    if len(request.noted) == 1:
        attributes.update(_of_search(request.noted[0]))
    return attributes


def _of_search(noted: Noted) -> Attributes:
    attributes: dict[str, AttributeValue] = {}
    if noted.query is not None:
        attributes["hivlp.kind"] = noted.query.kind
    if noted.answer is not None:
        told = {name: noted.answer[name] for name in TOLD if name in noted.answer}
        attributes.update({f"hivlp.{name}": value for name, value in told.items()})
    return attributes


def _of_stage(span: Span) -> Attributes:
    known = {
        "hivlp.level": span.level,
        "hivlp.candidates_in": span.candidates_in,
        "hivlp.candidates_out": span.candidates_out,
    }
    return {name: value for name, value in known.items() if value is not None}

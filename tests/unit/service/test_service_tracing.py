"""Spans: one a request, its stages within it, in the trace that the caller began; or none."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from hivlp.models.errors import MissingExtra
from hivlp.service.app import create_app
from hivlp.service.settings import Settings, SettingsError, load_settings
from hivlp.service.tracing import Tracing
from hivlp.service.watch_settings import LogSettings, TraceSettings
from tests.unit.service.fakes_service import VERSION, World
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_request_log import exemplars, lines

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Traced:
    """A client of a traced world, and the spans that came of it."""

    def __init__(self, client: httpx.Client, exporter: InMemorySpanExporter) -> None:
        self.client = client
        self._exporter = exporter

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        self._exporter.clear()
        return self.client.post(path, json=body, headers=headers)

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """The span of the one request, and those within it."""
        # The last byte of an answer is sent before its request has ended.
        end = time.monotonic() + 30
        while not (done := self._exporter.get_finished_spans()) or done[-1].kind is not (
            SpanKind.SERVER
        ):
            assert time.monotonic() < end, "no span came"
            time.sleep(0.005)
        return done[-1], list(done[:-1])

    def none(self) -> bool:
        self.client.get("/livez")
        return not self._exporter.get_finished_spans()


@contextmanager
def traced(world: World | None = None, share: float = 1.0) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(Settings(log=LogSettings()), load=(world or World()).load)
    app.state.hivlp.tracing = Tracing(provider)
    with serving(app) as client:
        yield Traced(client, exporter)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_search_is_one_span_with_its_stages_within_it() -> None:
    with traced() as client:
        before_ns = time.time_ns()
        client.post("/search/text", {"query": "red", "k": 2}, **{"X-Request-ID": "mine"})
        span, stages = client.spans()
        after_ns = time.time_ns()
    assert (span.name, span.kind) == ("POST /search/text", SpanKind.SERVER)
    assert span.parent is None
    found = attributes(span)
    assert found["http.route"] == "/search/text"
    assert found["http.response.status_code"] == 200
    assert found["hivlp.request_id"] == "mine"
    assert (found["hivlp.index"], found["hivlp.snapshot"]) == ("default", VERSION)
    assert (found["hivlp.plan"], found["hivlp.exit_level"]) == ("cascade", 3)
    assert "red" not in json.dumps(found)
    names = {stage.name for stage in stages}
    assert {"queue", "decode", "encode 1", "search 1", "search 3", "metadata"} <= names
    (searched,) = [stage for stage in stages if stage.name == "search 1"]
    assert attributes(searched)["hivlp.level"] == 1
    assert attributes(searched)["hivlp.candidates_in"] == 6
    assert before_ns <= (span.start_time or 0) <= (span.end_time or 0) <= after_ns
    for stage in stages:
        assert stage.parent is not None
        assert stage.context is not None
        assert stage.parent.span_id == (span.context.span_id if span.context else None)
        assert (span.start_time or 0) <= (stage.start_time or 0) <= (stage.end_time or 0)
        assert (stage.end_time or 0) <= (span.end_time or 0)


def test_it_belongs_to_the_trace_that_the_caller_began() -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    with traced(share=0.0) as client:
        client.post("/search/text", {"query": "red"}, **header)
        span, _ = client.spans()
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


def test_where_the_caller_does_not_trace_or_the_lot_does_not_fall_on_it_there_is_no_span() -> None:
    with traced() as client:
        client.post("/search/text", {"query": "red"}, traceparent=f"00-{TRACE}-{PARENT}-00")
        assert client.none()
    with traced(share=0.0) as client:
        client.post("/search/text", {"query": "red"})
        assert client.none()


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01", "00-\xff-1-01"])
def test_a_header_that_cannot_be_read_begins_a_trace_of_its_own(header: str) -> None:
    with traced() as client:
        given = {"traceparent": header.encode("latin-1").decode("latin-1")}
        answer = client.client.post(
            "/search/text",
            json={"query": "red"},
            headers={name: value.encode("latin-1") for name, value in given.items()},  # type: ignore[arg-type]
        )
        assert answer.status_code == 200
        span, _ = client.spans()
    assert span.parent is None


def test_searches_of_a_batch_have_a_span_each() -> None:
    searches = [{"kind": "text", "query": "red"}, {"kind": "text", "query": ""}]
    with traced() as client:
        client.post("/search/batch", {"searches": searches})
        span, within = client.spans()
    assert span.context is not None
    own = [one for one in within if one.parent and one.parent.span_id == span.context.span_id]
    assert [attributes(one)["hivlp.place"] for one in own] == [0, 1]
    assert len(within) > 6


def test_a_failure_of_ours_is_an_error_and_one_of_the_senders_is_not() -> None:
    world = World()
    with traced(world) as client:
        client.post("/search/text", {"query": ""})
        span, _ = client.spans()
        assert attributes(span)["error.type"] == "empty_text"
        assert span.status.status_code is StatusCode.UNSET

        def fail(_: int) -> None:
            raise RuntimeError("a bug")

        world.searcher.before = fail
        client.post("/search/text", {"query": "red"})
        span, _ = client.spans()
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["http.response.status_code"] == 500


def test_a_line_and_its_exemplar_lead_to_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), traced() as client:
        caplog.clear()
        client.post("/search/text", {"query": "red"}, **{"X-Request-ID": "r" * 64})
        span, _ = client.spans()
        found = exemplars(client.client, route="/search/text", status="200")
    (line,) = lines(caplog)
    assert span.context is not None
    assert line["trace_id"] == f"{span.context.trace_id:032x}"
    assert line["span_id"] == f"{span.context.span_id:016x}"
    assert found == {"r" * 64}


class Collector:
    """An OTLP collector on loopback: what was exported to it."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self.service = ""
        outer = self

        class Take(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Take)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever)

    def _take(self, request: Any) -> None:
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.service = named["service.name"]
            for scope in resource.scope_spans:
                self.spans += [span.name for span in scope.spans]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


def test_an_endpoint_is_all_it_takes_and_what_is_left_is_exported_in_the_end(
    world: World,
) -> None:
    with Collector() as collector:
        trace = TraceSettings(endpoint=collector.url, share=1.0, service_name="shop-search")
        with serving(create_app(Settings(trace=trace), load=world.load)) as client:
            client.post("/search/text", json={"query": "red"})
    assert "POST /search/text" in collector.spans
    assert "search 1" in collector.spans
    assert collector.service == "shop-search"


def test_a_collector_that_is_gone_harms_no_request_and_no_stop(world: World) -> None:
    trace = TraceSettings(endpoint="http://127.0.0.1:9/v1/traces", share=1.0)
    with serving(create_app(Settings(trace=trace), load=world.load)) as client:
        for _ in range(3):
            assert client.post("/search/text", json={"query": "red"}).status_code == 200


def test_without_the_extra_an_endpoint_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    trace = TraceSettings(endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(MissingExtra, match=r"hivlp\[otel\]"):
        create_app(Settings(trace=trace), load=world.load)


def test_fastapis_own_spans_which_hold_queries_stay_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    with serving(create_app(Settings(), load=world.load)) as client:
        client.post("/search/text?who=me", json={"query": "red"})
    assert exporter.get_finished_spans() == ()


def test_off_nothing_that_exports_is_imported() -> None:
    code = (
        "import sys; from hivlp.service.app import create_app; "
        "from hivlp.service.settings import Settings; create_app(Settings()); "
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x/y", "http://user:key@host/v1"])
def test_an_endpoint_is_a_url_without_a_password(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"trace\.endpoint") as caught:
        load_settings(trace={"endpoint": endpoint})
    assert "user:key" not in str(caught.value)

"""The line of a request: what it says, when there is one, and what leads to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hivlp.service.app import create_app
from hivlp.service.logs import TextLines
from hivlp.service.request_log import Allowance, Ended, RequestLog
from hivlp.service.settings import Settings
from hivlp.service.watch_settings import LogSettings
from tests.tiny_artifact import png, solid
from tests.unit.service.fakes_service import VERSION, World
from tests.unit.service.serving_app import serving

SECRET = "c0ffee-key-that-nobody-may-read"
OPEN_METRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}


@contextmanager
def logged(
    caplog: pytest.LogCaptureFixture, world: World | None = None, **log: Any
) -> Iterator[httpx.Client]:
    settings = Settings(log=LogSettings(**log))
    app = create_app(settings, load=(world or World()).load)
    with caplog.at_level(logging.DEBUG), serving(app) as client:
        caplog.clear()
        yield client


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {"level": record.levelname, **record.__dict__["fields"]}
        for record in caplog.records
        if record.name == "hivlp.request"
    ]


def test_a_search_has_one_line_that_says_how_it_went(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog) as client:
        headers = {"X-Request-ID": "mine-1"}
        client.post("/search/text?x=1", json={"query": "red", "k": 2}, headers=headers)
    (line,) = lines(caplog)
    stages, duration = line.pop("stages_ms"), line.pop("duration_ms")
    before, after = line.pop("before_ms"), line.pop("after_ms")
    assert line == {
        "level": "INFO",
        "request_id": "mine-1",
        "method": "POST",
        "route": "/search/text",
        "status": 200,
        "kind": "text",
        "index": "default",
        "snapshot": VERSION,
        "plan": "cascade",
        "exit_level": 3,
        "returned": 2,
        "cached": False,
        "degraded": False,
        "partial": False,
    }
    assert {"queue", "decode", "encode1", "search1", "search3", "metadata"} <= stages.keys()
    assert 0 < stages["search1"] < duration
    assert before > 0 < after
    assert before + after + stages["search1"] < duration


def test_neither_the_query_nor_a_key_nor_the_path_is_logged_unless_switched_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with logged(caplog) as client:
        headers = {"Authorization": f"Bearer {SECRET}", "X-API-Key": SECRET}
        client.post("/search/text", json={"query": "blue unicorn"}, headers=headers)
        client.post("/search/text", json={"query": "", "filter": {"unicorn": 1}}, headers=headers)
        client.get(f"/items/unicorn?key={SECRET}", headers=headers)
        client.get(f"/{SECRET}", headers=headers)
    assert len(lines(caplog)) == 4
    # The test's own client logs what it sends; the service must not.
    ours = [record for record in caplog.records if not record.name.startswith("http")]
    said = json.dumps(lines(caplog)) + "".join(TextLines().format(record) for record in ours)
    assert "unicorn" not in said
    assert SECRET not in said
    assert lines(caplog)[1]["error"] == "empty_text"


def test_switched_on_a_line_tells_what_was_asked_and_of_a_picture_only_its_hash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    picture = png(solid("red", (8, 8)))
    with logged(caplog, queries=True) as client:
        client.post("/search/text", json={"query": "blue " * 200})
        client.post("/search/similar", json={"id": "red"})
        client.post("/search/image", files={"image": picture})
        client.post("/search/vector", json={"vector": [1.0] * 16})
    text, item, image, vector = (line["queries"][0] for line in lines(caplog))
    assert text == ("blue " * 200)[:500]
    assert item == {"id": "red"}
    assert image["image_bytes"] == len(picture)
    assert len(image["sha256"]) == 64
    assert vector == {"dims": 16}


def test_a_batch_has_one_line_with_its_slowest_search(caplog: pytest.LogCaptureFixture) -> None:
    searches = [{"kind": "text", "query": "red", "plan": "cascade"}, {"kind": "text", "query": ""}]
    with logged(caplog) as client:
        client.post("/search/batch", json={"searches": searches})
    (line,) = lines(caplog)
    assert (line["searches"], line["failed"]) == (2, 1)
    assert line["slowest"]["plan"] == "cascade"
    assert "search1" in line["slowest"]["stages_ms"]


def test_probes_and_scrapes_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog) as client:
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert client.get(path).status_code == 200
    assert lines(caplog) == []


def test_a_slow_request_is_a_warning_with_its_stages_even_where_others_have_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with logged(caplog, slow_ms=0.001, requests_per_s=0) as client:
        client.post("/search/text", json={"query": "red"})
    (line,) = lines(caplog)
    assert line["level"] == "WARNING"
    assert line["stages_ms"]


def test_a_failure_of_ours_is_a_warning_beside_the_error_and_both_have_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()

    def fail(level: int) -> None:
        raise RuntimeError("a bug\nERROR forged: line")

    world.searcher.before = fail
    with logged(caplog, world, requests_per_s=0) as client:
        error = client.post("/search/text", json={"query": "red"}).json()["error"]
    (line,) = lines(caplog)
    assert (line["level"], line["status"], line["error"]) == ("WARNING", 500, "internal_error")
    assert line["request_id"] == error["request_id"]
    assert f"request {error['request_id']} failed" in caplog.messages


def ended(status: int = 200, duration_s: float = 0.001, route: str = "/search/text") -> Ended:
    return Ended("r", "POST", route, status, 0.0, duration_s)


def test_under_much_load_lines_are_bounded_and_what_was_kept_back_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    log = RequestLog(LogSettings(requests_per_s=2, slow_per_s=1), clock=lambda: now_s)
    with caplog.at_level(logging.INFO, "hivlp.request"):
        assert [log.ended(ended()) for _ in range(5)] == [True, True, False, False, False]
        assert [log.ended(ended(duration_s=3.0)) for _ in range(3)] == [True, False, False]
        now_s = 1.0
        assert log.ended(ended())
        assert log.ended(ended(status=503))
    assert [line.get("not_logged") for line in lines(caplog)] == [None, None, None, 3, 2]


def test_an_allowance_of_less_than_one_a_second_gives_one_after_so_long() -> None:
    now_s = 0.0
    allowance = Allowance(0.5, clock=lambda: now_s)
    assert [allowance.take(), allowance.take()] == [True, False]
    now_s = 2.0
    assert [allowance.take(), allowance.take()] == [True, False]
    assert not Allowance(0, clock=lambda: now_s).take()


def test_a_probe_that_fails_is_not_told_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(LogSettings())
    assert not log.ended(ended(503, route="/readyz"))
    assert log.ended(ended(200, 9.0, route="/readyz"))


def exemplars(client: httpx.Client, **labels: str) -> set[str]:
    answer = client.get("/metrics", headers=OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    return {
        sample.exemplar.labels["request_id"]
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.exemplar and labels.items() <= sample.labels.items()
    }


def test_every_exemplar_of_the_durations_leads_to_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, requests_per_s=1) as client:
        for number in range(3):
            headers = {"X-Request-ID": f"asked-{number}"}
            client.post("/search/text", json={"query": "red"}, headers=headers)
        found = exemplars(client, route="/search/text", status="200")
        plain = client.get("/metrics")
    assert found == {line["request_id"] for line in lines(caplog)} == {"asked-0"}
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert "asked-0" not in plain.text

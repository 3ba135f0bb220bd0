"""Metrics: named as documented, routes as templates, nothing a stranger can grow."""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

from hivlp.service.app import create_app
from hivlp.service.metrics import Metrics
from hivlp.service.settings import Settings
from tests.unit.service.fakes_service import NAMES, VERSION, World
from tests.unit.service.serving_app import serving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(client: httpx.Client) -> Samples:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_a_search_is_counted_stage_by_stage(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        for _ in range(2):
            client.post("/search/text", json={"query": "red"})
        client.post("/search/text", json={"query": "red", "max_level": 1})
        client.post("/search/text", json={"query": ""})
        samples = read(client)
    duration = "hivlp_request_duration_seconds_count"
    assert value(samples, duration, route="/search/text", status="200") == 3
    assert value(samples, duration, route="/search/text", status="422") == 1
    assert value(samples, "hivlp_rejected_total", reason="empty_text") == 1
    stage = "hivlp_stage_duration_seconds_count"
    assert value(samples, stage, stage="search", level="1") == 2
    assert value(samples, stage, stage="encode", level="3") == 1
    for name in ("queue", "decode", "metadata"):
        assert value(samples, stage, stage=name, level="") == 2
    cache = "hivlp_cache_requests_total"
    assert value(samples, cache, tier="memory", result="hit") == 1
    assert value(samples, cache, tier="memory", result="miss") == 2
    assert value(samples, "hivlp_exit_level_total", level="3") == 1
    assert value(samples, "hivlp_exit_level_total", level="1") == 1
    assert value(samples, "hivlp_candidates_count", level="1") == 2
    assert value(samples, "hivlp_in_flight") == 0
    assert value(samples, "hivlp_queue_size") == 0


def test_routes_are_templates_and_strangers_share_one_bucket(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        for path in ("/wp-login.php", "/.env", "/a/b/c", "/search"):
            assert client.get(path).status_code == 404
        for name in NAMES:
            client.get(f"/items/{name}")
        client.get("/openapi.json")
        samples = read(client)
    routes = {dict(labels)["route"] for name, labels in samples if "route" in dict(labels)}
    assert routes == {"unmatched", "/items/{id:any}", "/readyz", "/openapi.json"}
    duration = "hivlp_request_duration_seconds_count"
    assert value(samples, duration, route="unmatched", status="404") == 4


def test_the_snapshot_being_served_is_named(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        samples = read(client)
    info = {"index": "default", "version": VERSION, "model": "fake"}
    assert value(samples, "hivlp_snapshot_info", **info) == 1
    assert value(samples, "hivlp_snapshot_items", index="default") == len(NAMES)
    assert value(samples, "hivlp_snapshot_age_seconds", index="default") > 0


def test_each_app_has_a_registry_of_its_own() -> None:
    first, second = Metrics(), Metrics()
    first.queue_size.inc()
    assert b"hivlp_queue_size 1.0" in first.exposition()
    assert b"hivlp_queue_size 0.0" in second.exposition()


@pytest.mark.parametrize("unit", ["_ms", "_milliseconds", "_kb", "_megabytes"])
def test_units_are_base_units(unit: str) -> None:
    assert unit.encode() not in Metrics().exposition()


def test_every_gauge_says_how_those_of_several_processes_become_one() -> None:
    told = Metrics().registry._collector_to_names  # no public way leads to what is registered
    gauges = [metric for metric in told if isinstance(metric, Gauge)]
    assert len(gauges) > 3
    modes = {gauge._name: gauge._multiprocess_mode for gauge in gauges}
    assert {name for name, mode in modes.items() if not mode.startswith("live")} == set()


def test_whatever_stops_the_event_loop_shows_as_its_lag(world: World) -> None:
    app = create_app(Settings(), load=world.load)

    @app.get("/stop-the-loop")
    async def stop_the_loop() -> None:
        time.sleep(0.6)  # as a careless route would

    lag = "hivlp_event_loop_lag_seconds_bucket"
    with serving(app) as client:
        while not value(read(client), lag, le="+Inf"):
            time.sleep(0.01)
        client.get("/stop-the-loop")
        end = time.monotonic() + 30
        while True:
            samples = read(client)
            late = value(samples, lag, le="+Inf") - value(samples, lag, le="0.25")
            if late or time.monotonic() > end:
                break
            time.sleep(0.01)
    assert late >= 1

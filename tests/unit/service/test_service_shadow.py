"""Shadow mode: what is compared with what, what is told of it, and that no answer changes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.candidates import Candidates
from hivlp.index.errors import PlanError, SnapshotMissing
from hivlp.service.app import create_app
from hivlp.service.logs import JsonLines
from hivlp.service.serving import Catalogue, ServedModel, ServedVersion
from hivlp.service.settings import Settings, SettingsError, load_settings
from hivlp.service.watch_settings import LogSettings, ShadowSettings, SpareSettings
from tests.unit.service.fakes_service import (
    VERSION,
    FakeEncoder,
    FakeLive,
    FakeSearcher,
    FakeStore,
    World,
    fake_manifest,
)
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_metrics import Samples, read

WAIT_S = 30
NEXT = "20260202T000000-000000"


class Reversed(FakeSearcher):
    """Another model's index: it ranks the other way round."""

    def step(self, searched, stage, queries, previous, *, mask=None):  # type: ignore[no-untyped-def]
        wider = replace(stage, keep=1_000)
        (found,) = super().step(searched, wider, queries, None, mask=mask)
        return [Candidates(found.rows[::-1], -found.scores[::-1]).top(stage.keep)]


def other_version(
    searcher: FakeSearcher | None = None, index: str = "next", space: str = "c" * 64
) -> ServedVersion:
    searcher = searcher or Reversed()
    searcher.info = replace(searcher.info, index=index, version=NEXT)
    manifest = fake_manifest().model_copy(update={"name": "better", "gallery_space": space})
    model = ServedModel(manifest, {"text": FakeEncoder("text"), "image": FakeEncoder("image")})
    return ServedVersion(searcher, model, close_with=searcher.close)


class Settled(FakeStore):
    """Nothing becomes active, and no index comes."""

    root = Path("no such folder")

    def names(self) -> list[str]:
        return ["default"]

    def current(self, name: str) -> str:
        return VERSION

    def folder(self, name: str) -> Path:
        return Path("no such folder")


class Beside:
    """Where the other version is opened from; fails as often as it is told to."""

    def __init__(self, served: ServedVersion) -> None:
        self.served = served
        self.asked: list[tuple[str, str | None]] = []
        self.ready: list[ServedVersion] = []
        self.store: Any = Settled()

    def open(self, name: str, version: str | None = None, like: Any = None) -> ServedVersion:
        self.asked.append((name, version))
        return self.served

    def make_ready(self, served: ServedVersion) -> None:
        self.ready.append(served)


class Shadowed:
    """A client of a world whose answers are compared."""

    def __init__(self, client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
        self.client = client
        self._caplog = caplog

    def ask(self, path: str = "text", **body: Any) -> dict[str, Any]:
        body = {"query": "red", "k": 2, **body} if path == "text" else body
        headers = {"X-Request-ID": f"ask-{body.get('query', path)}"}
        answer = self.client.post(f"/search/{path}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def until(self, count: int) -> Samples:
        end = time.monotonic() + WAIT_S
        while True:
            samples = read(self.client)
            done = samples["hivlp_shadow_overlap_ratio_count", ()]
            skipped = sum(v for (n, _), v in samples.items() if n == "hivlp_shadow_skipped_total")
            if done + skipped >= count:
                return samples
            assert time.monotonic() < end, "nothing was compared"
            time.sleep(0.005)

    def lines(self) -> list[dict[str, Any]]:
        records = [r for r in self._caplog.records if r.name == "hivlp.shadow"]
        return [json.loads(JsonLines().format(record)) for record in records]


@contextmanager
def shadowed(
    caplog: pytest.LogCaptureFixture,
    served: ServedVersion,
    *,
    beside: Beside | None = None,
    queries: bool = False,
    opens: bool = True,
    world: World | None = None,
    **shadow: Any,
) -> Iterator[Shadowed]:
    """A world whose other version is served as index `next`, or opened by `beside`."""
    world = world or World()

    def load(settings: Settings) -> Catalogue:
        lives = {"default": world.live}
        if beside is None:
            lives["next"] = FakeLive(served)
        return Catalogue(lives, FakeStore(), None if beside is None else beside)

    settings = Settings(
        shadow=ShadowSettings(**{"index": "next", "share": 1.0, "max_per_s": 1_000, **shadow}),
        spare=SpareSettings(core_share=1.0),
        log=LogSettings(queries=queries),
        changes=Settings().changes.model_copy(update={"writes": False}),
        scrub_mib_per_s=0,
    )
    app = create_app(settings, load=load)
    with caplog.at_level(logging.INFO), serving(app) as client:
        if opens:
            end = time.monotonic() + WAIT_S
            while not app.state.hivlp.shadow.open:
                assert time.monotonic() < end, "the other version was never opened"
                time.sleep(0.005)
        yield Shadowed(client, caplog)


def test_another_version_answers_too_and_only_the_log_and_metrics_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with shadowed(caplog, other_version()) as live:
        answer = live.ask()
        samples = live.until(1)
        (line,) = live.lines()
    assert (answer["snapshot"], answer["hits"][0]["id"]) == (VERSION, "red")
    assert (line["request_id"], line["snapshot"], line["shadow"]) == ("ask-red", VERSION, NEXT)
    assert line["overlap"] == 0.0
    assert line["only_live"] == [hit["id"] for hit in answer["hits"]]
    assert len(line["only_shadow"]) == 2
    assert line["live_ms"] > 0 < line["shadow_ms"]
    assert samples["hivlp_shadow_overlap_ratio_sum", ()] == 0
    assert samples["hivlp_shadow_same_first_total", ()] == 0
    for side in ("live", "shadow"):
        assert samples["hivlp_shadow_duration_seconds_count", (("side", side),)] == 1
    labels = {"index": "next", "version": NEXT, "model": "better"}
    assert samples["hivlp_shadow_info", tuple(sorted(labels.items()))] == 1
    assert samples["hivlp_shadow_cpu_seconds_total", ()] > 0


def test_answers_that_agree_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with shadowed(caplog, other_version(FakeSearcher())) as live:
        live.ask()
        samples = live.until(1)
        assert live.lines() == []
    assert samples["hivlp_shadow_overlap_ratio_sum", ()] == 1
    assert samples["hivlp_shadow_same_first_total", ()] == 1


@pytest.mark.parametrize("queries", [False, True])
def test_what_was_asked_is_told_only_where_logs_tell_it(
    caplog: pytest.LogCaptureFixture, queries: bool
) -> None:
    with shadowed(caplog, other_version(), queries=queries) as live:
        live.ask(query="unicorn")
        live.until(1)
        (line,) = live.lines()
    assert line.pop("request_id") == "ask-unicorn"
    assert ("unicorn" in json.dumps(line)) is queries


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("similar", {"id": "red", "k": 2}),
        ("text", {"filter": {"field": "length", "range": {"gte": 4}}}),
        ("text", {"modality": "text", "offset": 1, "early_exit": True}),
    ],
)
def test_every_kind_of_search_is_compared(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    with shadowed(caplog, other_version()) as live:
        live.ask(path, **body)
        samples = live.until(1)
    assert samples["hivlp_shadow_overlap_ratio_count", ()] == 1


def test_a_vector_of_one_space_is_not_asked_of_another(caplog: pytest.LogCaptureFixture) -> None:
    for space, compared in (("c" * 64, 0), ("a" * 64, 1)):
        with shadowed(caplog, other_version(space=space)) as live:
            live.ask("vector", vector=[1.0] * 16, k=2)
            samples = live.until(1)
        assert samples["hivlp_shadow_overlap_ratio_count", ()] == compared


def test_what_the_other_version_refuses_is_told_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(FakeSearcher):
        def mask(self, searched: Any, expression: Any) -> Any:
            raise PlanError("no column 'length'", param="filter")

    with shadowed(caplog, other_version(Refusing())) as live:
        assert live.ask(filter={"field": "length", "range": {"gte": 4}})["returned"] > 0
        samples = live.until(1)
        (line,) = live.lines()
    assert samples["hivlp_shadow_skipped_total", (("reason", "refused"),)] == 1
    assert (line["level"], line["request_id"]) == ("warning", "ask-red")
    assert line["error"] == "PlanError"
    assert "length" not in json.dumps(line)


def test_another_version_that_breaks_harms_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeSearcher):
        def step(self, *given: Any, **more: Any) -> Any:
            raise RuntimeError("a bug")

    with shadowed(caplog, other_version(Broken())) as live:
        for number in range(2):
            assert live.ask(query=f"red {number}")["returned"] == 2
            live.until(number + 1)
        samples = live.until(2)
        assert live.client.get("/readyz").status_code == 200
    assert samples["hivlp_shadow_skipped_total", (("reason", "failed"),)] == 2


def test_cached_answers_and_other_indexes_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with shadowed(caplog, other_version()) as live:
        live.ask()
        live.until(1)
        live.ask()
        live.ask(index="next")
        samples = live.until(2)
    assert samples["hivlp_shadow_skipped_total", (("reason", "cached"),)] == 1
    assert samples["hivlp_shadow_overlap_ratio_count", ()] == 1


def test_a_version_that_is_not_served_is_opened_beside_warmed_and_closed_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = other_version(index="default")
    beside = Beside(served)
    asked = {"index": None, "version": NEXT}
    with shadowed(caplog, served, beside=beside, **asked) as live:
        live.ask()
        live.until(1)
        assert beside.asked[-1] == ("default", NEXT)
        assert beside.ready == [served]
        assert not served.searcher.closed  # type: ignore[attr-defined]
        first, second = live.lines()
    assert first["message"] == f"index default, version {NEXT} with better: compared"
    assert second["shadow"] == NEXT
    assert served.searcher.closed  # type: ignore[attr-defined]


def test_one_that_cannot_be_opened_is_told_once_and_the_service_serves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.service.beside.RETRY_S", 0.01)
    tried: list[str] = []

    class Missing(Beside):
        def open(self, name: str, version: str | None = None, like: Any = None) -> ServedVersion:
            tried.append(name)
            raise SnapshotMissing(name, str(version), "no such version")

    missing = Missing(other_version())
    asked = {"version": "x", "opens": False}
    with shadowed(caplog, other_version(), beside=missing, **asked) as live:
        assert live.ask()["returned"] == 2
        skipped = live.until(1)["hivlp_shadow_skipped_total", (("reason", "not_open"),)]
        assert skipped == 1
        end = time.monotonic() + WAIT_S
        while len(tried) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert live.client.get("/readyz").status_code == 200
        (line,) = live.lines()
    assert (line["level"], "no such version" in line["message"]) == ("error", True)


def test_after_the_cut_over_nothing_is_compared_with_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    served = ServedVersion(FakeSearcher(), world.live.served.model)
    with shadowed(caplog, served, world=world) as live:
        live.ask()
        samples = live.until(1)
    assert samples["hivlp_shadow_skipped_total", (("reason", "same"),)] == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (False, "default")),
        ({"index": "next"}, (True, "next")),
        ({"version": NEXT}, (True, "default")),
        ({"artifact": Path("a")}, (True, "default")),
    ],
)
def test_it_is_on_where_another_version_is_named(
    given: dict[str, Any], expected: tuple[bool, str]
) -> None:
    settings = ShadowSettings(**given)
    assert (settings.on, settings.name) == expected


def test_an_index_is_not_compared_with_itself_by_mistake() -> None:
    with pytest.raises(SettingsError, match=r"shadow.*the live one"):
        load_settings(shadow={"index": "default"})

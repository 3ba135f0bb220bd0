"""What watches the service, over a real model, real indexes and real HTTP."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import GalleryKind
from hivlp.service.app import create_app
from hivlp.service.settings import CacheSettings, Settings
from hivlp.service.watch_settings import RecallSettings, ShadowSettings, SpareSettings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.tiny_artifact import make_tiny_artifact
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_metrics import Samples, read

WAIT_S = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def total(samples: Samples, name: str, **wanted: str) -> float:
    return sum(
        value
        for (found, labels), value in samples.items()
        if found == name and wanted.items() <= dict(labels).items()
    )


def until(client: httpx.Client, done: int, name: str) -> Samples:
    end = time.monotonic() + WAIT_S
    while True:
        samples = read(client)
        skipped = total(samples, f"{name}_skipped_total")
        if total(samples, f"{name}_checks_total") + skipped >= done:
            return samples
        assert time.monotonic() < end, f"{done} checks were never done"
        time.sleep(0.01)


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> list[float]:
    """The scores of an answer."""
    if path == "image":
        answer = client.post("/search/image", files={"image": colour_png("red")}, data=body)
    else:
        answer = client.post(f"/search/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return [hit["score"] for hit in answer.json()["hits"]]


@pytest.mark.parametrize("gallery", ["nested", "per_exit"])
def test_every_kind_of_live_query_is_checked_against_exact_search(
    tmp_path: Path, corpus: Path, gallery: GalleryKind
) -> None:
    home = make_home(tmp_path, corpus, gallery)
    settings = Settings(
        home=home,
        recall=RecallSettings(share=1.0, max_per_s=1_000),
        spare=SpareSettings(core_share=1.0),
        cache=CacheSettings(max_bytes=0),
    )
    red = {"field": "name", "eq": "red square"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("text", {"query": "a red square", "k": 3}),
        ("text", {"query": "blue", "k": 12, "plan": "funnel"}),
        ("text", {"query": "green", "modality": "text", "k": 3}),
        ("text", {"query": "green", "filter": red, "k": 5}),
        ("image", {"k": "4"}),
        ("similar", {"id": "blue/24", "k": 3}),
        ("similar", {"id": "blue/24", "modality": "text", "k": 3}),
    ]
    with serving(create_app(settings)) as client:
        assert client.put("/items/new", json={"texts": ["a red thing"]}).status_code == 200
        wanted = found = 0
        for done, (path, body) in enumerate(asked):
            best = ask(client, path, {**body, "plan": "exact"})
            until(client, 2 * done + 1, "hivlp_ann_recall")
            scores = ask(client, path, body)
            samples = until(client, 2 * done + 2, "hivlp_ann_recall")
            wanted += len(best)
            found += sum(score >= best[-1] - 1e-6 for score in scores)
    assert total(samples, "hivlp_ann_recall_checks_total") == len(asked)
    assert total(samples, "hivlp_ann_recall_skipped_total", reason="unfit") == len(asked)
    assert total(samples, "hivlp_ann_recall_wanted_total", k="asked") == wanted
    assert total(samples, "hivlp_ann_recall_found_total", k="asked") == found
    assert wanted - 2 <= found <= wanted
    assert total(samples, "hivlp_ann_recall_wanted_total", k="10") == 10


def test_a_new_models_index_is_opened_beside_and_compared_before_the_cut_over(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path, corpus)
    build_next(home, corpus)
    settings = Settings(
        home=home,
        indexes=("default",),
        shadow=ShadowSettings(index="next", share=1.0, max_per_s=1_000),
        spare=SpareSettings(core_share=1.0),
    )
    with caplog.at_level(logging.INFO), serving(create_app(settings)) as client:
        assert [one["name"] for one in client.get("/indexes").json()["indexes"]] == ["default"]
        until_open(client)
        ask(client, "text", {"query": "a red square", "k": 3})
        until_compared(client, 1)
        ask(client, "similar", {"id": "blue/24", "k": 3})
        samples = until_compared(client, 2)
    assert total(samples, "hivlp_shadow_skipped_total") == 0
    assert total(samples, "hivlp_shadow_info", index="next", model="next") == 1
    assert 0 < samples["hivlp_shadow_overlap_ratio_sum", ()] <= 2
    assert total(samples, "hivlp_snapshot_info", index="next") == 0


def test_a_published_version_is_compared_before_it_is_activated_and_not_after(
    tmp_path: Path, corpus: Path
) -> None:
    home = make_home(tmp_path, corpus)
    store, second = SnapshotStore(home), publish_another(home, corpus)
    settings = Settings(
        home=home,
        shadow=ShadowSettings(version=second, share=1.0, max_per_s=1_000),
        spare=SpareSettings(core_share=1.0),
        cache=CacheSettings(max_bytes=0),
    )
    with serving(create_app(settings)) as client:
        until_open(client)
        ask(client, "text", {"query": "a red square", "k": 3})
        samples = until_compared(client, 1)
        assert samples["hivlp_shadow_overlap_ratio_sum", ()] == 1
        store.activate("default", second)
        end = time.monotonic() + WAIT_S
        while client.get("/indexes/default/snapshots").json()["active"] != second:
            assert time.monotonic() < end, "it never became active"
            time.sleep(0.05)
        ask(client, "text", {"query": "a red square", "k": 3})
        samples = until_compared(client, 2)
        assert total(samples, "hivlp_shadow_skipped_total", reason="same") == 1


def test_no_erasure_waits_for_a_version_that_is_only_compared(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path, corpus)
    store, second = SnapshotStore(home), publish_another(home, corpus)
    settings = Settings(home=home, shadow=ShadowSettings(version=second, share=1.0))
    with caplog.at_level(logging.INFO), serving(create_app(settings)) as client:
        until_open(client)
        report = erase(store, "default", ["blue/24"], wait_s=WAIT_S)
        assert (report.erased, report.left) == (("blue/24",), ())
        assert second in report.removed
        ask(client, "text", {"query": "a red square", "k": 3})
    assert f"version {second}: let go" in caplog.text


def publish_another(home: Path, corpus: Path) -> str:
    """A second version of the same, which isn't active."""
    store = SnapshotStore(home)
    first = store.current("default")
    model = Model.load(home / "artifacts" / "tiny")
    build = BuildSettings(quiet=True, sample=20)
    build_index(open_corpus(corpus), model, store, "default", build)
    second = store.current("default")
    store.activate("default", first)
    return second


def build_next(home: Path, corpus: Path) -> None:
    """Another model with a space of its own, and an index of the same corpus by it."""
    artifact = make_tiny_artifact(home / "artifacts" / "next", gallery="per_exit", name="next")
    settings = BuildSettings(quiet=True, sample=20)
    build_index(open_corpus(corpus), Model.load(artifact), SnapshotStore(home), "next", settings)


def until_open(client: httpx.Client) -> None:
    end = time.monotonic() + WAIT_S
    while not total(read(client), "hivlp_shadow_info"):
        assert time.monotonic() < end, "the other version was never opened"
        time.sleep(0.01)


def until_compared(client: httpx.Client, done: int) -> Samples:
    end = time.monotonic() + WAIT_S
    while True:
        samples = read(client)
        compared = samples["hivlp_shadow_overlap_ratio_count", ()]
        if compared + total(samples, "hivlp_shadow_skipped_total") >= done:
            return samples
        assert time.monotonic() < end, f"{done} answers were never compared"
        time.sleep(0.01)

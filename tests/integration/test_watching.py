"""What watches the service, over a real model, real indexes and real HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.models.levels import GalleryKind
from hivlp.service.app import create_app
from hivlp.service.settings import CacheSettings, Settings
from hivlp.service.watch_settings import RecallSettings, SpareSettings
from tests.integration.served_home import colour_png, make_corpus, make_home
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

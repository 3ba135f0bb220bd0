"""Re-ranking over real HTTP, with a re-ranker that says how alike two colours are."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.reranking import Reranked
from hivlp.service import reranking
from hivlp.service.answers import InfoAnswer, SearchAnswer
from hivlp.service.app import create_app
from hivlp.service.settings import CacheSettings, Limits, Settings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.tiny_artifact import COLOURS, STATES_SPACE, agreement, fail_beyond_one_pair
from tests.unit.service.serving_app import serving

ITEMS = 2 * len(COLOURS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=["states", "pictures"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Iterator[httpx.Client]:
    """An index that keeps states, and one whose pictures are read for each search."""
    states = request.param == "states"
    home = make_home(tmp_path_factory.mktemp("home"), corpus, reranker="unlike", states=states)
    with serving(create_app(Settings(home=home))) as client:
        yield client


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), corpus, reranker="same", states=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[httpx.Client]:
    """A model without a re-ranker."""
    home = make_home(tmp_path_factory.mktemp("plain"), corpus)
    with serving(create_app(Settings(home=home))) as client:
        yield client


def search(client: httpx.Client, kind: str = "text", **fields: Any) -> dict[str, Any]:
    response = client.post(f"/search/{kind}", json=fields)
    assert response.status_code == 200, response.text
    SearchAnswer.model_validate_json(response.content)
    body: dict[str, Any] = response.json()
    return body


def refused(client: httpx.Client, kind: str = "text", **fields: Any) -> dict[str, Any]:
    response = client.post(f"/search/{kind}", json={"rerank": True, **fields})
    assert response.status_code == 422, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def picture(colour: str) -> str:
    return base64.b64encode(colour_png(colour)).decode()


def ids(body: dict[str, Any]) -> list[str]:
    return [hit["id"] for hit in body["hits"]]


def colour_of(hit: dict[str, Any]) -> str:
    name: str = hit["id"].partition("/")[0]
    return name


def stage(body: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [stage for stage in body["stages"] if stage["name"] == name]
    return dict(found)


def metric(client: httpx.Client, line: str) -> float:
    for row in client.get("/metrics").text.splitlines():
        if row.startswith(f"{line} "):
            return float(row.rsplit(" ", 1)[1])
    return 0.0


def test_a_text_query_is_sorted_by_what_the_reranker_says(client: httpx.Client) -> None:
    before = search(client, query="a red square", k=6)
    body = search(client, query="a red square", k=6, rerank=True, rerank_k=6)
    assert sorted(ids(body)) == sorted(ids(before))
    assert ids(body) != ids(before)
    for hit in body["hits"]:
        wanted = 1 - agreement("a red square", COLOURS[colour_of(hit)])
        assert hit["match"] == pytest.approx(wanted, abs=2e-3)
    matches = [hit["match"] for hit in body["hits"]]
    assert matches == sorted(matches, reverse=True)
    assert [hit["rank"] for hit in body["hits"]] == list(range(1, 7))
    assert not body["degraded"]


def test_score_stays_the_finest_levels(client: httpx.Client) -> None:
    plain = search(client, query="blue", k=ITEMS)
    scores = {hit["id"]: (hit["score"], hit["level"]) for hit in plain["hits"]}
    assert all("match" not in hit for hit in plain["hits"])
    body = search(client, query="blue", k=ITEMS, rerank=True, explain=True)
    assert {hit["id"]: (hit["score"], hit["level"]) for hit in body["hits"]} == scores
    for hit in body["hits"]:
        assert hit["explain"][-1]["score"] == pytest.approx(hit["score"], abs=1e-5)


def test_the_stage_says_how_many_were_scored(client: httpx.Client) -> None:
    body = search(client, query="green", k=3, rerank=True, rerank_k=7)
    assert (stage(body, "rerank")["candidates_in"], stage(body, "rerank")["candidates_out"]) == (
        7,
        7,
    )
    assert body["returned"] == 3
    searching = [s for s in body["stages"] if s["name"] == "search"]
    assert stage(body, "rerank")["start_ms"] >= searching[-1]["start_ms"]
    name = 'hivlp_stage_duration_seconds_count{level="",stage="rerank"}'
    assert metric(client, name) >= 1


def test_without_asking_nothing_is_reranked(client: httpx.Client) -> None:
    body = search(client, query="magenta", k=3)
    assert [s["name"] for s in body["stages"]].count("rerank") == 0


def test_a_picture_is_compared_with_the_captions_that_it_found(client: httpx.Client) -> None:
    body = search(client, "image", image=picture("red"), modality="text", k=6, rerank=True)
    assert len(body["hits"]) == 6
    for hit in body["hits"]:
        wanted = 1 - agreement(hit["text"], COLOURS["red"])
        assert hit["match"] == pytest.approx(wanted, abs=2e-3)
    matches = [hit["match"] for hit in body["hits"]]
    assert matches == sorted(matches, reverse=True)
    assert len(set(ids(body))) == 6


@pytest.mark.parametrize("plan", ["auto", "cascade", "funnel", "exact"])
def test_every_plan_can_be_reranked(client: httpx.Client, plan: str) -> None:
    body = search(client, query="white", k=ITEMS, rerank=True, plan=plan)
    assert colour_of(body["hits"][-1]) == "white"
    assert all("match" in hit for hit in body["hits"])


def test_pages_fit_together_and_what_lies_behind_keeps_its_order(client: httpx.Client) -> None:
    found = ids(search(client, query="cyan", k=ITEMS, plan="exact"))
    whole = search(client, query="cyan", k=ITEMS, rerank=True, rerank_k=8, plan="exact")
    assert sorted(ids(whole)[:8]) == sorted(found[:8])
    assert ids(whole)[:8] != found[:8]
    assert ids(whole)[8:] == found[8:]
    assert [("match" in hit) for hit in whole["hits"]] == [True] * 8 + [False] * (ITEMS - 8)
    pages: list[str] = []
    for offset in range(0, ITEMS, 3):
        asked = {"k": 3, "offset": offset, "rerank": True, "rerank_k": 8, "plan": "exact"}
        page = search(client, query="cyan", **asked)
        assert [hit["rank"] for hit in page["hits"]][:1] == [offset + 1]
        pages += ids(page)
    assert pages == ids(whole)


def test_a_page_behind_what_is_reranked_runs_no_reranker(client: httpx.Client) -> None:
    """One hit before, it is run."""
    found = search(client, query="gray", k=ITEMS, plan="exact")
    asked = {"query": "gray", "k": 2, "rerank": True, "rerank_k": 3, "plan": "exact"}
    for offset in (3, ITEMS - 2):
        body = search(client, **asked, offset=offset)
        assert not body["degraded"]
        assert [s["name"] for s in body["stages"]].count("rerank") == 0
        assert ids(body) == ids(found)[offset : offset + 2]
        assert all("match" not in hit for hit in body["hits"])
    astride = search(client, **asked, offset=2)
    assert stage(astride, "rerank")["candidates_in"] == 3


def test_given_widths_decide_how_many_can_be_reranked(client: httpx.Client) -> None:
    widths = [{"level": 1, "keep": 12}, {"level": 2, "keep": 9}, {"level": 3, "keep": 5}]
    body = search(client, query="red", k=4, rerank=True, cascade=widths, plan="cascade")
    assert stage(body, "rerank")["candidates_in"] == 5
    assert len(body["hits"]) == 4


def test_a_filter_comes_first(client: httpx.Client) -> None:
    some = ["red square", "green square", "blue square"]
    wanted = {"field": "name", "in": some}
    body = search(client, query="a red one", k=ITEMS, rerank=True, filter=wanted)
    assert {hit["metadata"]["name"] for hit in body["hits"]} == set(some)
    assert colour_of(body["hits"][-1]) == "red"
    assert stage(body, "rerank")["candidates_in"] == 6


def test_each_search_of_a_batch_is_reranked_or_refused_alone(client: httpx.Client) -> None:
    searches = [
        {"kind": "text", "query": "red", "rerank": True, "k": 3},
        {"kind": "text", "query": "red", "rerank": True, "modality": "text"},
    ]
    first, second = client.post("/search/batch", json={"searches": searches}).json()["results"]
    assert all("match" in hit for hit in first["hits"])
    assert second["error"]["param"] == "rerank"


def test_info_says_what_can_be_reranked(client: httpx.Client, plain: httpx.Client) -> None:
    info = InfoAnswer.model_validate_json(client.get("/info").content)
    (model,), (index,) = info.models, info.indexes
    assert model.reranker is not None
    assert (model.reranker.layers, model.reranker.image_tokens) == (1, 16)
    assert model.reranker.states_space == STATES_SPACE
    assert index.rerank
    assert info.limits["max_rerank_k"] == 100
    without = InfoAnswer.model_validate_json(plain.get("/info").content)
    assert without.models[0].reranker is None
    assert not without.indexes[0].rerank
    assert not without.indexes[0].states


def test_info_says_whether_states_are_kept(home: Path) -> None:
    with serving(create_app(Settings(home=home))) as client:
        assert client.get("/info").json()["indexes"][0]["states"]


def test_a_model_without_a_reranker_says_so(plain: httpx.Client) -> None:
    error = refused(plain, query="red")
    assert (error["code"], error["param"]) == ("not_available", "rerank")
    assert error["message"] == "the model 'tiny' has no re-ranker"


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("text", {"query": "red", "modality": "text"}, "texts are searched with a text"),
        ("image", {"image": picture("red")}, "images are searched with an image"),
        ("similar", {"id": "red/24"}, "a search by similar has no text or picture"),
        ("vector", {"vector": [0.5] * 32}, "a search by vector has no text or picture"),
    ],
)
def test_only_a_text_and_a_picture_are_a_pair(
    client: httpx.Client, kind: str, fields: dict[str, Any], said: str
) -> None:
    error = refused(client, kind, **fields)
    assert (error["code"], error["param"]) == ("invalid_plan", "rerank")
    assert said in error["message"]


def test_more_than_the_limit_is_refused(client: httpx.Client) -> None:
    error = refused(client, query="red", rerank_k=101)
    assert (error["code"], error["param"]) == ("out_of_range", "rerank_k")
    assert "100" in error["message"]


def test_a_deadline_that_passes_leaves_the_order_that_was_found(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = reranking.rerank

    def late(*given: Any, until: float) -> Reranked:
        time.sleep(max(0.0, until - time.perf_counter()))
        return ranked(*given, until=until)

    monkeypatch.setattr(reranking, "rerank", late)
    before = metric(client, 'hivlp_degraded_total{reason="rerank"}')
    found = search(client, query="a purple square", k=9, plan="exact")
    for again in (1, 2):  # never cached
        asked = {"k": 9, "rerank": True, "deadline_ms": 1_000, "plan": "exact"}
        body = search(client, query="a purple square", **asked)
        assert body["degraded"]
        assert not body["cached"]
        assert ids(body) == ids(found)
        assert all("match" not in hit for hit in body["hits"])
        span = stage(body, "rerank")
        assert (span["candidates_in"], span["candidates_out"]) == (20, 0)
        assert metric(client, 'hivlp_degraded_total{reason="rerank"}') == before + again
    monkeypatch.undo()
    whole = search(client, query="a purple square", k=9, rerank=True, deadline_ms=60_000)
    assert not whole["degraded"]
    assert all("match" in hit for hit in whole["hits"])


def test_the_servers_own_limit_counts_without_a_deadline(home: Path) -> None:
    settings = Settings(home=home, limits=Limits(max_rerank_ms=1e-6))
    with serving(create_app(settings)) as client:
        for deadline in ({}, {"deadline_ms": 60_000}):
            assert search(client, query="red", rerank=True, **deadline)["degraded"]
        assert not search(client, query="red")["degraded"]


def test_a_reranker_that_fails_leaves_the_order_that_was_found(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path, corpus, reranker="unlike")
    fail_beyond_one_pair(home / "artifacts" / "tiny")
    with serving(create_app(Settings(home=home))) as client:
        found = search(client, query="red", k=4)
        body = search(client, query="red", k=4, rerank=True)
        assert (body["degraded"], ids(body)) == (True, ids(found))
        assert stage(body, "rerank")["candidates_out"] == 0
        assert not search(client, query="red", k=4, rerank=True)["cached"]
        assert metric(client, 'hivlp_degraded_total{reason="rerank"}') == 2
        assert not search(client, query="red", rerank=True, rerank_k=1)["degraded"]
    assert "re-ranking failed, answered as found" in caplog.text


def test_reranked_answers_are_cached_by_themselves(client: httpx.Client) -> None:
    plain = search(client, query="yellow", k=5)
    fresh = search(client, query="yellow", k=5, rerank=True)
    again = search(client, query="yellow", k=5, rerank=True)
    wider = search(client, query="yellow", k=5, rerank=True, rerank_k=5)
    assert [body["cached"] for body in (fresh, again, wider)] == [False, True, False]
    assert again["hits"] == fresh["hits"]
    assert ids(plain) != ids(fresh) != ids(wider)
    assert search(client, query="yellow", k=5)["hits"] == plain["hits"]


def test_items_whose_picture_is_gone_are_behind_and_the_answer_is_degraded(
    tmp_path: Path,
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    home = make_home(tmp_path / "home", corpus, reranker="same")
    for size in (24, 300):
        (corpus / "squares" / f"red-{size}.png").unlink()
    with serving(create_app(Settings(home=home))) as client:
        body = search(client, query="red", k=ITEMS, rerank=True)
        assert body["degraded"]
        assert [colour_of(hit) for hit in body["hits"][-2:]] == ["red", "red"]
        assert [("match" in hit) for hit in body["hits"]] == [True] * (ITEMS - 2) + [False] * 2
        assert stage(body, "rerank")["candidates_out"] == ITEMS - 2
        assert not search(client, query="red", k=ITEMS, rerank=True)["cached"]


def test_changed_items_are_compared_by_their_own_picture(tmp_path: Path) -> None:
    """They lie beside the levels and have no kept states."""
    corpus = make_corpus(tmp_path / "corpus")
    home = make_home(tmp_path / "home", corpus, reranker="same", states=True)
    settings = Settings(home=home, cache=CacheSettings(max_bytes=0))
    with serving(create_app(settings)) as client:
        files = {"image": ("a.png", colour_png("orange"), "image/png")}
        for item in ("new/one", "red/24"):
            put = client.put(f"/items/{item}", data={}, files=files)
            assert put.status_code in (200, 201), put.text
        body = search(client, query="a red square", k=ITEMS + 1, rerank=True, rerank_k=30)
        assert not body["degraded"]
        by_id = {hit["id"]: hit["match"] for hit in body["hits"]}
        orange = agreement("a red square", COLOURS["orange"])
        assert by_id["new/one"] == pytest.approx(orange, abs=2e-3)
        assert by_id["red/24"] == pytest.approx(orange, abs=2e-3)
        assert by_id["red/300"] == pytest.approx(1.0, abs=2e-3)
        assert ids(body)[0] == "red/300"
        assert client.delete("/items/red/300").status_code == 200
        left = search(client, query="a red square", k=ITEMS, rerank=True, rerank_k=30)
        assert "red/300" not in ids(left)
        best = {"orange/24", "orange/300", "new/one", "red/24"}  # all of one colour now
        assert set(ids(left)[:4]) == best


def test_several_searches_at_once_get_their_own_answers(home: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    settings = Settings(home=home, cache=CacheSettings(max_bytes=0))
    with serving(create_app(settings)) as client, ThreadPoolExecutor(6) as pool:
        asked = [colour for colour in COLOURS for _ in range(3)]
        bodies = pool.map(lambda c: search(client, query=c, k=2, rerank=True), asked)
        for colour, body in zip(asked, bodies, strict=True):
            assert [colour_of(hit) for hit in body["hits"]] == [colour, colour]

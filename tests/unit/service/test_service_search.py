"""What a search answers: hits, plans, levels, metadata, explanations, every kind of query."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from hivlp.service.answers import (
    BatchAnswer,
    EmbedAnswer,
    IndexList,
    InfoAnswer,
    SearchAnswer,
    SnapshotList,
)
from tests.unit.service.fakes_service import FINEST, NAMES, VERSION, vector_of
from tests.unit.service.pictures_service import picture


def search(client: httpx.Client, kind: str = "text", **fields: Any) -> dict[str, Any]:
    response = client.post(f"/search/{kind}", json=fields)
    assert response.status_code == 200, response.text
    return checked(SearchAnswer, response)


def checked(model: type[BaseModel], response: httpx.Response) -> dict[str, Any]:
    """The body, which must be what the API's document promises."""
    assert response.status_code == 200, response.text
    model.model_validate_json(response.content)
    body: dict[str, Any] = response.json()
    assert body["request_id"] == response.headers["x-request-id"]
    return body


def test_a_text_search_answers_every_field_of_the_contract(shared: httpx.Client) -> None:
    body = search(shared, query="red", k=3)
    assert set(body) == {
        "hits", "returned", "took_ms", "index", "snapshot", "model", "plan", "exit_level",
        "degraded", "partial", "truncated", "cached", "stages", "request_id",
    }  # fmt: skip
    assert [hit["rank"] for hit in body["hits"]] == [1, 2, 3]
    assert [hit["level"] for hit in body["hits"]] == [3, 3, 3]
    first = body["hits"][0]
    assert (first["id"], first["metadata"]) == ("red", {"name": "Red", "length": 3})
    assert first["score"] == pytest.approx(1.0, abs=1e-5)
    assert (body["returned"], body["index"], body["snapshot"]) == (3, "default", VERSION)
    assert (body["plan"], body["exit_level"], body["model"]) == ("cascade", 3, "fake")
    assert not any(body[flag] for flag in ("degraded", "partial", "truncated", "cached"))


def test_the_timeline_names_each_stage_once_with_its_candidates(shared: httpx.Client) -> None:
    body = search(
        shared, query="timeline", k=2, cascade=[{"level": 1, "keep": 5}, {"level": 2, "keep": 4}]
    )
    stages = [(s["name"], s["level"]) for s in body["stages"]]
    encode = [("encode", 1), ("encode", 2), ("encode", 3)]
    searches = [("search", 1), ("search", 2), ("search", 3)]
    others = [("queue", None), ("decode", None), ("metadata", None)]
    assert sorted(map(str, stages)) == sorted(map(str, encode + searches + others))
    flow = [
        (s["candidates_in"], s["candidates_out"]) for s in body["stages"] if s["name"] == "search"
    ]
    assert flow == [(6, 5), (5, 4), (4, 2)]
    assert all(s["start_ms"] >= 0 and s["duration_ms"] >= 0 for s in body["stages"])
    assert body["took_ms"] >= max(s["start_ms"] + s["duration_ms"] for s in body["stages"])


@pytest.mark.parametrize("plan", ["auto", "cascade", "funnel", "exact"])
def test_every_plan_finds_the_same_when_it_keeps_all(shared: httpx.Client, plan: str) -> None:
    body = search(shared, query="green", k=6, plan=plan)
    assert body["hits"][0]["id"] == "green"
    exact = search(shared, query="green", k=6, plan="exact")
    assert [h["id"] for h in body["hits"]] == [h["id"] for h in exact["hits"]]
    assert body["plan"] == ("cascade" if plan == "auto" else plan)


@pytest.mark.parametrize("max_level", [1, 2, 3])
def test_max_level_stops_there_and_says_so(shared: httpx.Client, max_level: int) -> None:
    body = search(shared, query="blue", max_level=max_level, k=2)
    assert body["exit_level"] == max_level
    assert {hit["level"] for hit in body["hits"]} == {max_level}
    assert max(s["level"] or 0 for s in body["stages"]) == max_level
    assert body["hits"][0]["id"] == "blue"


def test_offset_pages_through_the_same_order(shared: httpx.Client) -> None:
    whole = search(shared, query="red", k=6)["hits"]
    pages = [search(shared, query="red", k=2, offset=offset)["hits"] for offset in (0, 2, 4, 6)]
    assert [h["id"] for page in pages for h in page] == [h["id"] for h in whole]
    assert [h["rank"] for page in pages for h in page] == [1, 2, 3, 4, 5, 6]
    assert pages[3] == []


def test_more_than_there_is_returns_what_there_is(shared: httpx.Client) -> None:
    body = search(shared, query="red", k=20)
    assert body["returned"] == len(body["hits"]) == len(NAMES)
    assert len({hit["id"] for hit in body["hits"]}) == len(NAMES)


def test_metadata_is_all_or_none_or_the_named(shared: httpx.Client) -> None:
    assert "metadata" not in search(shared, query="red", with_metadata=False)["hits"][0]
    named = search(shared, query="red", with_metadata=["name"])["hits"][0]
    assert named["metadata"] == {"name": "Red"}


def test_explain_gives_score_and_rank_at_every_level_of_the_plan(shared: httpx.Client) -> None:
    hits = search(shared, query="red", explain=True, k=3)["hits"]
    for hit in hits:
        assert [part["level"] for part in hit["explain"]] == [1, 2, 3]
        assert hit["explain"][-1]["score"] == pytest.approx(hit["score"], abs=1e-6)
        assert hit["explain"][-1]["rank"] == hit["rank"]
    funnel = search(shared, query="red", explain=True, plan="funnel")["hits"][0]
    assert [part["level"] for part in funnel["explain"]] == [1, 3]


def test_captions_are_searched_and_the_matching_one_shown(shared: httpx.Client) -> None:
    hit = search(shared, query="café/☕", modality="text")["hits"][0]
    assert (hit["id"], hit["text"]) == ("café/☕", "café/☕")
    assert "text" not in search(shared, query="café/☕")["hits"][0]


def test_a_picture_is_searched_by_form_and_by_json_alike(shared: httpx.Client) -> None:
    data = picture((0, 0, 255))
    form = shared.post("/search/image", files={"image": data}, data={"k": "3"})
    text = shared.post("/search/image", json={"image": base64.b64encode(data).decode(), "k": 3})
    by_form, by_json = checked(SearchAnswer, form), checked(SearchAnswer, text)
    assert by_form["hits"] == by_json["hits"]
    assert by_form["hits"][0]["id"] == "blue"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_down_to_one_pixel_is_a_query(shared: httpx.Client, kind: str) -> None:
    response = shared.post("/search/image", files={"image": picture((0, 255, 0), (1, 1), kind)})
    assert checked(SearchAnswer, response)["hits"][0]["id"] == "green"


@pytest.mark.parametrize("plan", ["auto", "cascade", "funnel", "exact"])
def test_similar_leaves_the_item_itself_out_at_any_offset(shared: httpx.Client, plan: str) -> None:
    whole = search(shared, "similar", id="red", k=20, plan=plan)
    ids = [hit["id"] for hit in whole["hits"]]
    assert "red" not in ids
    assert len(ids) == len(NAMES) - 1
    assert whole["plan"] == ("funnel" if plan == "auto" else plan)
    second = search(shared, "similar", id="red", k=2, offset=2, plan=plan)
    assert [hit["id"] for hit in second["hits"]] == ids[2:4]
    assert [hit["rank"] for hit in second["hits"]] == [3, 4]
    assert not any(stage["name"] == "encode" for stage in whole["stages"])


def test_similar_takes_ids_of_any_characters(shared: httpx.Client) -> None:
    assert search(shared, "similar", id="café/☕", k=1)["returned"] == 1


def test_a_vector_is_searched_whatever_its_length(shared: httpx.Client) -> None:
    unit = vector_of("yellow")[0]
    for scale in (1.0, 1e-30, 1e300):
        vector = [float(x) * scale for x in unit]
        for plan in ("auto", "cascade", "exact"):
            body = search(shared, "vector", vector=vector, plan=plan, k=2)
            assert body["hits"][0]["id"] == "yellow"
    assert len(unit) == FINEST


def test_a_batch_mixes_kinds_in_order(shared: httpx.Client) -> None:
    searches = [
        {"kind": "similar", "id": "red", "k": 1},
        {"kind": "text", "query": "white", "k": 1},
        {"kind": "image", "image": base64.b64encode(picture()).decode(), "k": 1},
        {"kind": "vector", "vector": vector_of("blue")[0].tolist(), "k": 1},
    ]
    response = shared.post("/search/batch", json={"searches": searches})
    results = checked(BatchAnswer, response)["results"]
    assert [one["hits"][0]["id"] for one in results[1:]] == ["white", "red", "blue"]
    alone = search(shared, "similar", id="red", k=1)
    assert results[0]["hits"] == alone["hits"]


def test_embeddings_are_unit_vectors_level_by_level(shared: httpx.Client) -> None:
    text = checked(EmbedAnswer, shared.post("/embed/text", json={"text": "red"}))
    image = checked(EmbedAnswer, shared.post("/embed/image", files={"image": picture()}))
    assert text["levels"] == image["levels"]
    assert [level["dim"] for level in text["levels"]] == [4, 8, 16]
    for level in text["levels"]:
        assert len(level["vector"]) == level["dim"]
        assert sum(x * x for x in level["vector"]) == pytest.approx(1.0, abs=1e-5)
    again = search(shared, "vector", vector=text["levels"][-1]["vector"], k=1)
    assert again["hits"][0]["id"] == "red"


def test_pinning_the_active_version_is_fine(shared: httpx.Client) -> None:
    assert search(shared, query="red", snapshot=VERSION)["snapshot"] == VERSION


def test_info_and_indexes_tell_what_is_served(shared: httpx.Client) -> None:
    info = checked(InfoAnswer, shared.get("/info"))
    assert info["indexes"][0]["items"] == len(NAMES)
    assert info["indexes"][0]["queries"] == ["image", "text"]
    assert info["models"][0]["sources"][0]["licence"] == "CC0-1.0"
    assert info["limits"]["max_k"] == 20
    indexes = checked(IndexList, shared.get("/indexes"))
    assert indexes["indexes"] == info["indexes"]
    versions = checked(SnapshotList, shared.get("/indexes/default/snapshots"))
    assert versions["active"] == VERSION
    assert versions["snapshots"][-1] == VERSION
    assert shared.get("/indexes/nowhere/snapshots").status_code == 404


def test_a_request_id_of_the_caller_is_kept_when_it_is_harmless(shared: httpx.Client) -> None:
    kept = shared.get("/livez", headers={"X-Request-ID": "trace-1.2_3"})
    assert kept.headers["x-request-id"] == "trace-1.2_3"
    made = shared.get("/livez", headers={"X-Request-ID": "a b<script>"})
    assert made.headers["x-request-id"] != "a b<script>"


def test_a_filter_leaves_out_what_it_does_not_allow(shared: httpx.Client) -> None:
    short = {"field": "length", "range": {"lte": 4}}
    body = search(shared, query="green", k=6, filter=short)
    assert {hit["id"] for hit in body["hits"]} == {name for name in NAMES if len(name) <= 4}
    stage = next(s for s in body["stages"] if s["name"] == "filter")
    assert (stage["candidates_in"], stage["candidates_out"]) == (len(NAMES), body["returned"])
    negated = search(shared, query="green", k=6, filter={"not": short})
    assert negated["hits"][0]["id"] == "green"
    assert negated["returned"] + body["returned"] == len(NAMES)
    nothing = search(shared, query="green", filter={"field": "name", "eq": "Nobody"})
    assert (nothing["returned"], nothing["hits"]) == (0, [])


def test_answers_to_other_filters_are_other_answers(shared: httpx.Client) -> None:
    asked = {"query": "a cached filter", "k": 3}
    one = search(shared, **asked, filter={"field": "name", "eq": "Red"})
    other = search(shared, **asked, filter={"field": "name", "eq": "Blue"})
    assert [hit["id"] for hit in one["hits"]] == ["red"]
    assert [hit["id"] for hit in other["hits"]] == ["blue"]
    assert search(shared, **asked, filter={"field": "name", "eq": "Red"})["cached"]

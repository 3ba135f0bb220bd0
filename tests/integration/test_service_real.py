"""The service over a real model, a real index and real HTTP."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.backends.choose import choose_backend
from hivlp.index.backends.exact import ExactLevel
from hivlp.index.early_exit import SIGNALS
from hivlp.index.errors import NoDevice, NoGoodVersion
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot.manifest import ExitRecord, ExitTrial, GateRecord, write_manifest
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import ArtifactError, MissingExtra, SpaceMismatch
from hivlp.service import loading
from hivlp.service.answers import InfoAnswer, SearchAnswer
from hivlp.service.app import create_app
from hivlp.service.loading import NothingToServe, find_artifact, load_catalogue, names_to_serve
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import CacheSettings, Limits, Settings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.tiny_artifact import COLOURS, make_tiny_artifact
from tests.unit.service.serving_app import serving

PLANS = ("auto", "cascade", "funnel", "exact")
BRIGHT = ("red", "green", "blue", "yellow")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), corpus)


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with serving(create_app(Settings(home=home))) as client:
        yield client


@pytest.fixture(scope="module", params=["nested", "per_exit"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Iterator[httpx.Client]:
    """Both kinds of gallery, without a cache."""
    home = make_home(tmp_path_factory.mktemp(request.param), corpus, request.param)
    settings = Settings(home=home, cache=CacheSettings(max_bytes=0))
    with serving(create_app(settings)) as client:
        yield client


def search(client: httpx.Client, kind: str, **fields: Any) -> dict[str, Any]:
    response = client.post(f"/search/{kind}", json=fields)
    assert response.status_code == 200, response.text
    SearchAnswer.model_validate_json(response.content)
    body: dict[str, Any] = response.json()
    return body


def colours(body: dict[str, Any]) -> list[str]:
    return [hit["id"].partition("/")[0] for hit in body["hits"]]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("colour", BRIGHT)
def test_a_word_finds_its_colour(either: httpx.Client, plan: str, colour: str) -> None:
    assert colours(search(either, "text", query=f"a {colour} square", k=2, plan=plan))[0] == colour


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_picture_finds_its_colour_and_its_captions(
    either: httpx.Client, plan: str, modality: str
) -> None:
    image = base64.b64encode(colour_png("blue")).decode()
    body = search(either, "image", image=image, k=2, plan=plan, modality=modality)
    assert colours(body) == ["blue", "blue"]
    assert all(("text" in hit) == (modality == "text") for hit in body["hits"])


@pytest.mark.parametrize("plan", PLANS)
def test_similar_finds_the_twin(either: httpx.Client, plan: str) -> None:
    body = search(either, "similar", id="red/24", k=1, plan=plan)
    assert body["hits"][0]["id"] == "red/300"


def test_all_plans_agree_when_they_keep_everything(either: httpx.Client) -> None:
    everything = len(COLOURS) * 2
    by_plan = [search(either, "text", query="red", k=everything, plan=plan) for plan in PLANS]
    orders = [[hit["id"] for hit in body["hits"]] for body in by_plan]
    assert all(order == orders[-1] for order in orders)
    assert len(set(orders[0])) == everything


@pytest.mark.parametrize("plan", ["cascade", "funnel"])
def test_overlap_and_company_change_no_answer(either: httpx.Client, plan: str) -> None:
    asked = {"explain": True, "plan": plan}
    queries = [f"the {colour} picture" for colour in COLOURS]
    alone = {q: search(either, "text", query=q, **asked)["hits"] for q in queries}
    # A floor that no score is under makes another question: none of these comes from the cache.
    crowd = [(query, -2.0 - again) for again in range(5) for query in queries]

    def ask(one: tuple[str, float]) -> list[dict[str, Any]]:
        hits: list[dict[str, Any]] = search(
            either, "text", query=one[0], min_score=one[1], **asked
        )["hits"]
        return hits

    with ThreadPoolExecutor(8) as pool:
        for (query, _), hits in zip(crowd, pool.map(ask, crowd), strict=True):
            expected = alone[query]
            assert [h["id"] for h in hits] == [h["id"] for h in expected]
            for one, other in zip(hits, expected, strict=True):
                assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_explain_agrees_with_the_score(either: httpx.Client) -> None:
    for hit in search(either, "text", query="red", explain=True)["hits"]:
        assert hit["explain"][-1]["score"] == pytest.approx(hit["score"], abs=1e-5)


def test_a_vector_from_embed_searches_like_its_text(either: httpx.Client) -> None:
    levels = either.post("/embed/text", json={"text": "green"}).json()["levels"]
    vector = levels[-1]["vector"]
    by_vector = search(either, "vector", vector=vector, plan="exact", k=5)
    by_text = search(either, "text", query="green", plan="exact", k=5)
    assert [h["id"] for h in by_vector["hits"]] == [h["id"] for h in by_text["hits"]]


def test_a_long_text_is_cut_and_says_so(client: httpx.Client) -> None:
    assert search(client, "text", query="red " * 100)["truncated"]
    assert not search(client, "text", query="red")["truncated"]


def test_many_items_of_captions_are_each_found_once(client: httpx.Client) -> None:
    body = search(client, "text", query="red", modality="text", k=20)
    ids = [hit["id"] for hit in body["hits"]]
    assert len(ids) == len(set(ids)) == 20


def test_pictures_and_items_are_served_from_the_corpus(client: httpx.Client, corpus: Path) -> None:
    item = client.get("/items/red/300").json()
    assert item["metadata"]["name"] == "red square"
    picture = client.get(item["image"])
    assert picture.content == (corpus / "squares" / "red-300.png").read_bytes()
    small = client.get(item["image"], params={"size": 64})
    assert small.headers["content-type"] == "image/webp"
    assert len(small.content) < 2_000


def test_info_names_model_index_and_sources(client: httpx.Client, home: Path) -> None:
    response = client.get("/info")
    InfoAnswer.model_validate_json(response.content)
    info = response.json()
    store = SnapshotStore(home)
    assert info["indexes"][0]["snapshot"] == store.current("default")
    assert info["indexes"][0]["gallery_space"] == info["models"][0]["gallery_space"]
    assert info["indexes"][0]["items"] == len(COLOURS) * 2
    versions = client.get("/indexes/default/snapshots").json()
    assert versions["snapshots"] == store.versions("default")
    exposed = client.get("/metrics").text
    assert f'version="{store.current("default")}"' in exposed


def test_a_broken_file_keeps_the_service_from_being_ready(tmp_path: Path, corpus: Path) -> None:
    home = make_home(tmp_path, corpus)
    store = SnapshotStore(home)
    target = store.path("default", store.current("default")) / "items.arrow"
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    with pytest.raises(NoGoodVersion, match=r"items\.arrow"):
        load_catalogue(Settings(home=home))


def test_a_version_is_read_through_before_it_serves_as_far_as_there_is_room(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> list[str]:
        found = [record.message for record in caplog.records if "read through" in record.message]
        caplog.clear()
        return found

    with caplog.at_level("INFO", logger="hivlp.service"):
        load_catalogue(Settings(home=home))
        (line,) = lines()
        assert "left to the disk" not in line
        monkeypatch.setattr(loading, "available_memory", lambda: 0)
        load_catalogue(Settings(home=home))
        (line,) = lines()
        assert "0 files" in line
        assert "image/rows.npy" in line
        load_catalogue(Settings(home=home, warm=False))
        assert lines() == []

        def unreadable(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(loading, "prefault", unreadable)
        load_catalogue(Settings(home=home))
        (line,) = lines()
        assert "not read through: [Errno 13] Permission denied" in line


def test_a_backend_can_be_asked_for_and_an_absent_one_is_an_error(home: Path) -> None:
    catalogue = load_catalogue(Settings(home=home, backend="numpy", warm=False))
    with catalogue.lease("default") as served:
        assert isinstance(served.searcher, LocalSearcher)
        levels = served.searcher.snapshot.sides["image"].levels
        assert {type(level) for level in levels.values()} == {ExactLevel}
    if choose_backend("auto") == "faiss-cpu":
        with pytest.raises((MissingExtra, NoDevice)):
            load_catalogue(Settings(home=home, backend="faiss-gpu"))


def test_an_index_of_another_model_is_refused(home: Path, tmp_path: Path) -> None:
    other = make_tiny_artifact(tmp_path / "other", seed=7)
    with pytest.raises(SpaceMismatch):
        load_catalogue(Settings(home=home, artifact=other))


def test_an_index_that_cannot_be_served_keeps_no_other_from_it(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home"
    shutil.copytree(home, own)
    for name in ("broken", "odd"):
        shutil.copytree(own / "indexes/default", own / "indexes" / name)
    usual = loading.Loader.open

    def opened(self: loading.Loader, name: str, *rest: object) -> object:
        if name == "odd":
            raise OverflowError("date value out of range")
        return usual(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loading.Loader, "open", opened)
    catalogue = load_catalogue(Settings(home=own, warm=False))
    assert tuple(catalogue.indexes) == ("default",)
    loud = [
        r.message for r in caplog.records if r.levelname == "ERROR" and "NOT SERVED" in r.message
    ]
    assert any("index broken: NOT SERVED:" in line for line in loud)
    assert any("index odd: NOT SERVED" in line and "out of range" in line for line in loud)
    with pytest.raises(OverflowError):
        load_catalogue(Settings(home=own, warm=False, indexes=("default", "odd")))
    shutil.rmtree(own / "indexes/default")
    with pytest.raises(loading.NoneServed, match=r"broken: .*default.*; odd: date value"):
        load_catalogue(Settings(home=own, warm=False))


def test_an_index_whose_first_search_fails_is_left_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home"
    shutil.copytree(home, own)
    shutil.copytree(own / "indexes/default", own / "indexes/odd")
    usual, searched = loading.Loader.open, loading.warm
    opened = []

    def open_default(self: loading.Loader, name: str) -> ServedVersion:
        opened.append(usual(self, "default"))
        return opened[-1]

    def warmed(served: ServedVersion, limits: Limits) -> None:
        if served is opened[1]:
            raise ValueError("no such number")
        searched(served, limits)

    monkeypatch.setattr(loading.Loader, "open", open_default)
    monkeypatch.setattr(loading, "warm", warmed)
    assert tuple(load_catalogue(Settings(home=own)).indexes) == ("default",)


def test_the_newest_fitting_artifact_is_taken_whatever_its_name(home: Path, tmp_path: Path) -> None:
    manifest = SnapshotStore(home).manifest("default")
    make_tiny_artifact(tmp_path / "artifacts" / "stranger", seed=7)
    moved = manifest.model_copy(update={"artifact": "/moved/away"})
    settings = Settings(home=tmp_path)
    with pytest.raises(SpaceMismatch):
        find_artifact(settings, moved)
    fitting = make_tiny_artifact(tmp_path / "artifacts" / "renamed")
    assert find_artifact(settings, moved) == fitting
    (tmp_path / "artifacts" / "broken").mkdir()
    (tmp_path / "artifacts" / "broken" / "manifest.json").write_text("{")
    assert find_artifact(settings, moved) == fitting
    with pytest.raises(ArtifactError, match="broken"):
        find_artifact(settings, moved.model_copy(update={"gallery_space": "f" * 64}))
    with pytest.raises(ArtifactError):
        find_artifact(Settings(home=tmp_path / "empty"), moved)


def test_an_empty_home_says_how_to_fill_it(tmp_path: Path, home: Path) -> None:
    with pytest.raises(NothingToServe, match=r"hivlp demo.*hivlp build"):
        names_to_serve(Settings(home=tmp_path))
    with pytest.raises(NothingToServe, match="'shoes'"):
        names_to_serve(Settings(home=home, indexes=("shoes",)))


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[httpx.Client]:
    """An index whose calibration says: level 1 is always sure of what a text finds."""
    home = make_home(tmp_path_factory.mktemp("hasty"), corpus)
    store = SnapshotStore(home)
    manifest = store.manifest("default")
    recalls = {"r1": 1.0, "r10": 1.0, "ann10": 1.0}
    exits = ExitRecord(
        searched="image",
        query="text",
        signal="margin",
        loss="retrieval",
        most_lost=0.005,
        threshold=0.5,
        gates=(GateRecord(level=1, weights=(0.0,) * len(SIGNALS), bias=9.0),),
        queries=200,
        full=recalls,
        tried=(ExitTrial(signal="margin", shares={1: 1.0}, saved=0.6, recalls=recalls),),
    )
    changed = manifest.model_copy(update={"exits": (exits,), "paces": ()})
    write_manifest(store.path("default", manifest.version), changed)
    with serving(create_app(Settings(home=home))) as client:
        yield client


def test_an_early_exit_answers_from_the_level_that_was_sure(hasty: httpx.Client) -> None:
    whole = search(hasty, "text", query="a red square", k=3)
    assert (whole["exit_level"], whole["plan"]) == (3, "cascade")
    early = search(hasty, "text", query="a red square", k=3, early_exit=True)
    assert (early["exit_level"], early["plan"], early["cached"]) == (1, "cascade", False)
    assert early["returned"] == 3
    assert {hit["level"] for hit in early["hits"]} == {1}
    assert {s["level"] for s in early["stages"] if s["name"] == "search"} == {1}
    capped = search(hasty, "text", query="a red square", k=3, max_level=1)
    assert [h["id"] for h in early["hits"]] == [h["id"] for h in capped["hits"]]
    again = search(hasty, "text", query="a red square", k=3, early_exit=True)
    assert (again["cached"], again["hits"]) == (True, early["hits"])


def test_an_early_exit_where_none_was_calibrated_runs_through(hasty: httpx.Client) -> None:
    image = base64.b64encode(colour_png("blue")).decode()
    assert search(hasty, "image", image=image, k=3, early_exit=True)["exit_level"] == 3


@pytest.mark.parametrize(
    ("kind", "body"), [("similar", {"id": "red/24"}), ("vector", {"vector": [1.0] * 32})]
)
def test_a_search_that_encodes_nothing_has_no_early_exit(
    hasty: httpx.Client, kind: str, body: dict[str, Any]
) -> None:
    response = hasty.post(f"/search/{kind}", json={**body, "early_exit": True})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "early_exit"


@pytest.mark.parametrize("plan", PLANS)
def test_a_filter_is_kept_by_every_plan(client: httpx.Client, plan: str) -> None:
    wanted = {"field": "name", "in": ["blue square", "green square"]}
    body = search(client, "text", query="a red square", k=20, plan=plan, filter=wanted)
    assert set(colours(body)) == {"blue", "green"}
    assert body["returned"] == 4
    image = base64.b64encode(colour_png("red")).decode()
    both = {"and": [wanted, {"not": {"field": "name", "eq": "blue square"}}]}
    for modality in ("image", "text"):
        found = search(
            client, "image", image=image, k=20, plan=plan, modality=modality, filter=both
        )
        assert set(colours(found)) == {"green"}


def test_filters_reach_similar_and_vector_searches(client: httpx.Client) -> None:
    wanted = {"field": "name", "eq": "green square"}
    similar = search(client, "similar", id="red/24", filter=wanted)
    assert set(colours(similar)) == {"green"}
    vector = search(client, "vector", vector=[1.0] * 32, filter=wanted)
    assert set(colours(vector)) == {"green"}
    form = client.post(
        "/search/image",
        files={"image": ("x.png", colour_png("red"), "image/png")},
        data={"filter": '{"field": "name", "eq": "green square"}'},
    )
    assert set(colours(form.json())) == {"green"}

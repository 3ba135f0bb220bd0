"""Items that come and go under a running service, by HTTP and by command; a real tiny model."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.cli_items import items
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.app import create_app
from hivlp.service.settings import ChangeSettings, Settings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.unit.service.serving_app import serving


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changes")
    return make_home(folder / "home", make_corpus(folder / "corpus"))


@pytest.fixture
def client(home: Path) -> Iterator[httpx.Client]:
    """A service over the home as it was built, whatever the test before changed."""
    store = SnapshotStore(home)
    store.activate("default", built(store))
    settings = Settings(home=home, changes=ChangeSettings(poll_s=0.02, publish_s=0.05))
    with serving(create_app(settings)) as found:
        yield found


def built(store: SnapshotStore) -> str:
    return next(
        v for v in store.versions("default") if store.manifest("default", v).changes is None
    )


def ids(client: httpx.Client, query: str, **options: Any) -> list[str]:
    answer = client.post("/search/text", json={"query": query, "k": 50, **options})
    assert answer.status_code == 200, answer.text
    return [hit["id"] for hit in answer.json()["hits"]]


def until(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def put(client: httpx.Client, item_id: str, **body: Any) -> dict[str, Any]:
    answer = client.put(f"/items/{item_id}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_item_put_is_found_at_once_by_what_it_is_and_served_whole(client: httpx.Client) -> None:
    picture = colour_png("red")
    changed = put(
        client,
        "sale%2F1",
        texts=["zebra crossing", "a second text"],
        metadata={"name": "New one", "price": 9.5, "sizes": ["s", "m"]},
        image=base64.b64encode(picture).decode(),
    )
    assert (changed["id"], changed["created"], changed["searchable"]) == ("sale/1", True, True)
    found = client.post(
        "/search/text", json={"query": "zebra crossing", "modality": "text", "k": 2}
    ).json()
    assert found["snapshot"] == changed["snapshot"]
    assert found["hits"][0]["id"] == "sale/1"
    assert found["hits"][0]["text"] == "zebra crossing"
    assert found["hits"][0]["score"] == pytest.approx(1.0, abs=1e-4)
    assert found["hits"][0]["metadata"] == {"name": "New one", "price": 9.5, "sizes": ["s", "m"]}
    assert sum(hit["id"] == "sale/1" for hit in found["hits"]) == 1
    assert "sale/1" in ids(client, "red")[:4]
    shown = client.get("/items/sale%2F1").json()
    assert shown["metadata"]["price"] == 9.5
    assert client.get(shown["image"]).content == picture
    assert client.get(shown["image"], params={"size": 16}).headers["content-type"] == "image/webp"
    explained = client.post(
        "/search/similar", json={"id": "sale/1", "k": 3, "explain": True}
    ).json()
    assert "sale/1" not in [hit["id"] for hit in explained["hits"]]
    again = put(client, "sale%2F1", texts=["a tunnel"])
    assert again["created"] is False
    replaced = client.get("/items/sale%2F1").json()
    assert (replaced["metadata"], replaced["image"]) == ({}, None)
    assert replaced["snapshot"] == again["snapshot"]
    assert client.get("/items/sale%2F1/image").status_code == 404


def test_an_item_can_be_put_as_a_form(client: httpx.Client) -> None:
    answer = client.put(
        "/items/form",
        files={"image": ("x.png", colour_png("blue"))},
        data={"texts": '["sapphire"]', "metadata": '{"name": "by form"}'},
    )
    assert answer.status_code == 200, answer.text
    assert ids(client, "sapphire", modality="text")[0] == "form"
    assert client.get("/items/form").json()["metadata"] == {"name": "by form"}


def test_an_item_deleted_is_found_no_longer_and_comes_back_when_put(client: httpx.Client) -> None:
    assert {"red/24", "red/300"} <= set(ids(client, "red"))
    assert client.delete("/items/red%2F24").json()["deleted"] is True
    assert "red/24" not in ids(client, "red")
    assert "red/24" not in ids(client, "red", plan="exact")
    assert client.get("/items/red%2F24").status_code == 404
    assert client.get("/items/red%2F24/image").status_code == 404
    assert client.post("/search/similar", json={"id": "red/24"}).status_code == 404
    again = client.delete("/items/red%2F24")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "no_such_item")
    put(client, "red%2F24", texts=["red"])
    assert ids(client, "red", modality="text")[0] in ("red/24", "red/300")
    assert "red/24" in ids(client, "red", modality="text")


def test_k_hits_come_back_though_much_was_deleted(client: httpx.Client) -> None:
    every = ids(client, "red")
    for item_id in every[:-3]:
        client.delete(f"/items/{item_id.replace('/', '%2F')}").raise_for_status()
    for plan in ("auto", "cascade", "funnel", "exact"):
        answer = client.post("/search/text", json={"query": "red", "k": 3, "plan": plan}).json()
        assert [hit["id"] for hit in answer["hits"]] == every[-3:]
    assert client.get("/info").json()["indexes"][0]["items"] == 3


def test_filters_see_new_values_and_new_columns(client: httpx.Client) -> None:
    put(client, "a", texts=["apple"], metadata={"name": "first", "stock": 3})
    put(client, "b", texts=["bear"], metadata={"name": "second", "stock": 5})
    stock = {"field": "stock", "range": {"gte": 4}}
    assert ids(client, "anything", modality="text", filter=stock) == ["b"]
    without = {"not": {"field": "stock", "exists": True}}
    assert {"a", "b"}.isdisjoint(ids(client, "anything", modality="text", filter=without))
    assert ids(client, "bear", modality="text", filter={"field": "name", "eq": "first"}) == ["a"]
    wrong = client.post(
        "/search/text",
        json={"query": "x", "modality": "text", "filter": {"field": "stock", "eq": "three"}},
    )
    assert wrong.json()["error"]["param"] == "filter.eq"


BAD = [
    ({}, "texts", "nothing_to_search"),
    ({"texts": []}, "texts", "nothing_to_search"),
    ({"texts": ["ok", "  "]}, "texts.1", "empty_text"),
    ({"texts": ["x"] * 65}, "texts", "out_of_range"),
    ({"texts": ["x"], "colour": "red"}, "colour", "unknown_field"),
    ({"texts": ["x"], "metadata": {"name": 5}}, "metadata.name", "invalid_metadata"),
    ({"texts": ["x"], "metadata": {"id": "y"}}, "metadata.id", "invalid_metadata"),
    ({"texts": ["x"], "metadata": {"deep": {"a": 1}}}, "metadata.deep", "invalid_metadata"),
    ({"texts": ["x"], "metadata": {"l": ["a", 1]}}, "metadata.l", "invalid_metadata"),
    ({"image": "not base64!"}, "image", "invalid_value"),
    ({"image": base64.b64encode(b"no picture").decode()}, "image", "unsupported_image"),
    ({"vector": [1.0, 2.0]}, "vector", "invalid_vector"),
    ({"vector": [0.0] * 32}, "vector", "invalid_vector"),
    ({"vector": [1.0] * 32, "modality": "text", "texts": ["a", "b"]}, "texts", "out_of_range"),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD)
def test_bad_items_are_refused_by_name_and_change_nothing(
    client: httpx.Client, body: dict[str, Any], param: str, code: str
) -> None:
    before = client.get("/info").json()["indexes"]
    answer = client.put("/items/bad", json=body)
    assert answer.status_code in (415, 422), answer.text
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    assert client.get("/items/bad").status_code == 404
    assert client.get("/info").json()["indexes"] == before
    assert put(client, "good", texts=["fine"])["created"] is True


def test_an_id_that_is_too_long_is_refused(client: httpx.Client) -> None:
    answer = client.put(f"/items/{'x' * 600}", json={"texts": ["x"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "id")


def test_one_bad_change_among_many_harms_no_other(client: httpx.Client) -> None:
    outcomes: dict[int, int] = {}

    def change(i: int) -> None:
        metadata = {"name": i} if i % 5 == 0 else {"name": f"thing {i}"}
        body = {"texts": [f"thing number {i}"], "metadata": metadata}
        outcomes[i] = client.put(f"/items/t{i}", json=body).status_code

    threads = [threading.Thread(target=change, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {i: 422 if i % 5 == 0 else 200 for i in range(40)}
    for i in range(40):
        assert client.get(f"/items/t{i}").status_code == (404 if i % 5 == 0 else 200)


def test_changes_of_one_id_are_made_in_the_order_they_came(client: httpx.Client) -> None:
    for i in range(6):
        put(client, "one", texts=[f"text {i}"], metadata={"turn": i})
    assert client.get("/items/one").json()["metadata"] == {"turn": 5}


def test_a_version_of_another_command_is_served_within_a_second(
    client: httpx.Client, home: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "more.jsonl"
    (tmp_path / "x.png").write_bytes(colour_png("green"))
    rows = [{"id": "cmd/1", "image": "x.png", "caption": "emerald", "name": "by command"}]
    corpus.write_text("\n".join(json.dumps(row) for row in rows))
    assert items(["upsert", str(corpus), "--home", str(home)]) == 0
    until(lambda: client.get("/items/cmd%2F1").status_code == 200, 1.0)
    assert client.get("/items/cmd%2F1/image").content == colour_png("green")
    assert items(["delete", "cmd/1", "--home", str(home)]) == 0
    until(lambda: client.get("/items/cmd%2F1").status_code == 404, 1.0)


def test_the_command_names_what_it_could_not_do(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "rows.csv"
    corpus.write_text("id,caption,name\nok,a fine text,one\nbad,,two\n")
    assert items(["upsert", str(corpus), "--home", str(home), "--max-failures", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "1 items new" in out
    assert "left out 1" in out
    (failure,) = (home / "cache/builds/default.upsert-failures.jsonl").read_text().splitlines()
    assert json.loads(failure)["id"] == "bad"
    ids_file = tmp_path / "ids.txt"
    ids_file.write_text("ok\nnever-there\n")
    assert items(["delete", "--from", str(ids_file), "--home", str(home)]) == 1
    captured = capsys.readouterr()
    assert "1 items deleted" in captured.out
    assert "'never-there'" in captured.err
    assert items(["delete", "--home", str(home)]) == 2


def test_a_service_that_others_can_reach_takes_no_changes_unless_told_to(home: Path) -> None:
    for writes, host, status in ((None, "0.0.0.0", 403), (False, "127.0.0.1", 403),
                                 (True, "0.0.0.0", 200)):  # fmt: skip
        changes = ChangeSettings(writes=writes, publish_s=0.0)
        with serving(create_app(Settings(home=home, host=host, changes=changes))) as client:
            answer = client.put("/items/w", json={"texts": ["w"]})
            assert answer.status_code == status, answer.text
            if status == 403:
                assert answer.json()["error"]["code"] == "read_only"
            assert client.delete("/items/nothing").status_code == (403 if status == 403 else 404)


def test_superseded_versions_do_not_pile_up(client: httpx.Client, home: Path) -> None:
    store = SnapshotStore(home)
    before = len(store.versions("default"))
    for i in range(12):
        put(client, "pile", texts=[f"heap {i}"])
    assert len(store.versions("default")) <= before + 3 + ChangeSettings().keep_versions
    manifest = store.manifest("default")
    assert manifest.changes is not None
    assert len(manifest.changes.segments) <= 4
    assert store.rollback("default") == built(store)

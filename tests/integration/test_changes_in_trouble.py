"""Items that come and go while something else goes wrong: other writers, locks, encoders, disks."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.build.erase import erase
from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.amend import LOCK, amend
from hivlp.index.snapshot.changes import Delete
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.app import create_app
from hivlp.service.settings import ChangeSettings, Limits, Settings
from hivlp.service.state import ServingState
from hivlp.service.swap import Swapper
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.unit.service.serving_app import serving

WIDTH = 32


@pytest.fixture(scope="module")
def built_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trouble")
    return make_home(folder / "home", make_corpus(folder / "corpus"))


@pytest.fixture
def home(built_home: Path, tmp_path: Path) -> Path:
    """A home of one's own, as it was built."""
    shutil.copytree(built_home, tmp_path / "home")
    return tmp_path / "home"


def settings(home: Path, limits: Limits | None = None, **changes: Any) -> Settings:
    quick = {"poll_s": 0.02, "publish_s": 0.0, **changes}
    return Settings(home=home, limits=limits or Limits(), changes=ChangeSettings(**quick))


def state_of(app: Any) -> ServingState:
    state = app.state.hivlp
    assert isinstance(state, ServingState)
    return state


def until(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


@contextmanager
def turn_taken(home: Path) -> Iterator[None]:
    """Another process changes the index, and takes its time."""
    with (home / "indexes" / "default" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Crowd:
    """Requests sent at once, each from a thread of its own, in order."""

    def __init__(self, client: httpx.Client, app: Any) -> None:
        self.answers: dict[str, httpx.Response] = {}
        self._client, self._app = client, app
        self._threads: list[threading.Thread] = []

    def send(self, name: str, method: str, path: str, *, waits: bool = True, **given: Any) -> None:
        """Send it; returns once it waits in the queue, unless it isn't to wait."""
        writer = state_of(self._app).writer("default")
        before = len(writer._queue)

        def run() -> None:
            self.answers[name] = self._client.request(method, path, **given)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        until(lambda: not waits or len(writer._queue) > before)

    def join(self) -> dict[str, httpx.Response]:
        for thread in self._threads:
            thread.join(30)
        return self.answers


def at_work(app: Any) -> bool:
    """Whether a change was taken out of the queue. For an app that was sent none before."""
    writer = state_of(app).writer("default")
    return bool(writer._thread._threads) and not writer._queue


@contextmanager
def together(home: Path, client: httpx.Client, app: Any) -> Iterator[Crowd]:
    """Whatever is sent in the block is published in one batch, after it."""
    crowd = Crowd(client, app)
    with turn_taken(home):
        first = threading.Thread(target=client.delete, args=("/items/nothing-to-delete",))
        first.start()
        until(lambda: at_work(app))  # and waiting for its turn: what comes now waits in the queue
        yield crowd
    first.join(30)
    crowd.join()


def test_two_services_write_at_once_and_each_change_is_answered_as_what_it_is(home: Path) -> None:
    codes: Counter[int] = Counter()
    wrong: list[str] = []

    def write(client: httpx.Client, name: str) -> None:
        for turn in range(25):
            answer = client.put(f"/items/{name}-{turn}", json={"texts": [f"{name} {turn}"]})
            codes[answer.status_code] += 1
            if answer.status_code != 200 or not answer.json()["searchable"]:
                wrong.append(answer.text)

    with serving(create_app(settings(home))) as one, serving(create_app(settings(home))) as other:
        writers = [
            threading.Thread(target=write, args=(client, f"{place}{turn}"))
            for place, client in (("a", one), ("b", other))
            for turn in range(2)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(120)
        assert (codes, wrong) == ({200: 100}, [])
        until(lambda: one.get("/items/b1-24").status_code == 200)
        until(lambda: other.get("/items/a0-0").status_code == 200)


def test_a_version_that_another_service_supersedes_while_it_is_opened_is_not_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(settings(home, keep_versions=0, poll_s=60))
    with serving(app) as client:
        client.put("/items/first", json={"texts": ["x"]}).raise_for_status()
        source = state_of(app).catalogue.source
        assert source is not None
        opened, others = source.open, [Delete("red/24")]

        def after_another(name: str, version: str | None = None, like: Any = None) -> Any:
            if others:
                amend(SnapshotStore(home), "default", [others.pop()])
                assert version not in SnapshotStore(home).versions("default")
            return opened(name, version, like)

        monkeypatch.setattr(source, "open", after_another)
        answer = client.delete("/items/red%2F300")
        assert (answer.status_code, answer.json()["searchable"]) == (200, True)
        assert client.get("/items/red%2F300").status_code == 404
        assert client.get("/items/red%2F24").status_code == 404


@pytest.mark.parametrize("error", [SnapshotError("default", "v", "unreadable"), RuntimeError("?")])
def test_what_is_published_is_never_said_not_to_be(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> bool:
        raise error

    with serving(create_app(settings(home, poll_s=60))) as client:
        monkeypatch.setattr(Swapper, "adopt", fail)
        answer = client.put("/items/there", json={"texts": ["x"]})
        assert (answer.status_code, answer.json()["searchable"]) == (200, False)
        assert SnapshotStore(home).current("default") == answer.json()["snapshot"]


def test_an_index_that_another_process_changes_is_waited_for_only_so_long(home: Path) -> None:
    with serving(create_app(settings(home, wait_s=0.3))) as client:
        with turn_taken(home):
            began = time.monotonic()
            answer = client.put("/items/late", json={"texts": ["x"]})
            assert 0.3 <= time.monotonic() - began < 5.0
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "not_writable"
            assert "another process" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "5"
        assert client.put("/items/late", json={"texts": ["x"]}).status_code == 200


def test_stopping_refuses_what_waits_at_once_and_publishes_none_of_it(home: Path) -> None:
    app = create_app(settings(home, wait_s=600))
    with serving(app) as client:
        crowd = Crowd(client, app)
        with turn_taken(home):
            crowd.send("under way", "PUT", "/items/one", waits=False, json={"texts": ["x"]})
            until(lambda: at_work(app))
            crowd.send("waiting", "PUT", "/items/two", json={"texts": ["x"]})
            began = time.monotonic()
            state_of(app).stop_changes()
            answers = crowd.join()
            assert time.monotonic() - began < 10.0
            assert {name: a.status_code for name, a in answers.items()} == {
                "under way": 503,
                "waiting": 503,
            }
            assert "being stopped" in answers["waiting"].json()["error"]["message"]
            late = client.delete("/items/red%2F24")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "not_writable")
    assert len(SnapshotStore(home).versions("default")) == 1


def test_a_publication_under_way_is_finished_when_the_service_stops(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivlp.service import turn

    begun, go_on = threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return amend(*given, **named)

    monkeypatch.setattr(turn, "amend", slow)
    app = create_app(settings(home))
    with serving(app) as client:
        crowd = Crowd(client, app)
        crowd.send("put", "PUT", "/items/finished", waits=False, json={"texts": ["x"]})
        assert begun.wait(20)
        state = state_of(app)
        state.stop_changes()
        loop = next(iter(state._tasks._tasks.values())).get_loop()
        stopped = asyncio.run_coroutine_threadsafe(state._tasks.stop(), loop)
        time.sleep(0.1)
        assert not stopped.done()  # it waits for what is under way
        go_on.set()
        stopped.result(20)
        assert crowd.join()["put"].status_code == 200
        assert client.get("/items/finished").status_code == 200


def test_one_busy_index_does_not_hold_up_another(home: Path) -> None:
    folder = home / "indexes"
    shutil.copytree(folder / "default", folder / "second")
    for manifest in folder.glob("second/*/manifest.json"):
        rename_index(manifest, "second")
    with serving(create_app(settings(home, wait_s=20))) as client:
        held = threading.Thread(target=client.delete, args=("/items/red%2F24",))
        with turn_taken(home):
            held.start()
            time.sleep(0.1)
            answer = client.put("/items/free?index=second", json={"texts": ["x"]})
            assert answer.status_code == 200, answer.text
            assert held.is_alive()
        held.join(20)


def rename_index(manifest: Path, name: str) -> None:
    from hivlp.index.snapshot.manifest import SnapshotManifest, write_manifest

    found = SnapshotManifest.model_validate_json(manifest.read_bytes())
    write_manifest(manifest.parent, found.model_copy(update={"index": name}))


def test_a_hot_id_does_not_hold_up_other_changes(home: Path) -> None:
    app = create_app(settings(home))
    with serving(app) as client:
        with together(home, client, app) as crowd:
            for turn in range(20):
                crowd.send(f"hot {turn}", "PUT", "/items/hot", json={"texts": [f"text {turn}"]})
            crowd.send("other", "PUT", "/items/other", json={"texts": ["other"]})
        answers = crowd.answers
        assert {answer.status_code for answer in answers.values()} == {200}
        # All of it was one version, the last text of the hot item among it.
        assert len({answer.json()["snapshot"] for answer in answers.values()}) == 1
        assert [answers[f"hot {turn}"].json()["created"] for turn in range(3)] == [
            True,
            False,
            False,
        ]
        found = client.post("/search/text", json={"query": "text 19", "modality": "text", "k": 1})
        assert found.json()["hits"][0]["text"] == "text 19"


Step = tuple[str, Any, int, bool | None]


def put(body: Any, created: bool | None = None) -> Step:
    return "PUT", body, 422 if created is None else 200, created


def delete(status: int) -> Step:
    return "DELETE", None, status, None


def test_changes_of_one_id_in_one_batch_are_answered_as_if_made_one_by_one(home: Path) -> None:
    app = create_app(settings(home))
    good, bad = {"texts": ["x"]}, {"texts": ["x"], "metadata": {"name": 5}}
    cases = {
        "a": [put(good, created=True), delete(200), delete(404)],
        "b": [delete(404), put(good, created=True), put(good, created=False)],
        "c": [put(good, created=True), delete(200), put(good, created=True)],
        "d": [put(bad), put(good, created=True)],
        "e": [put(good, created=True), put(bad)],
        "f": [put({"texts": [" "]}), delete(404)],
        "red%2F24": [delete(200), put(good, created=True)],
    }
    left = {"a": 404, "b": 200, "c": 200, "d": 200, "e": 200, "f": 404, "red%2F24": 200}
    with serving(app) as client:
        with together(home, client, app) as crowd:
            for turn in range(3):
                for item_id, steps in cases.items():
                    if turn < len(steps):
                        method, body, _, _ = steps[turn]
                        given = {} if body is None else {"json": body}
                        crowd.send(f"{item_id} {turn}", method, f"/items/{item_id}", **given)
        for item_id, steps in cases.items():
            for turn, (_, _, status, created) in enumerate(steps):
                answer = crowd.answers[f"{item_id} {turn}"]
                assert answer.status_code == status, (item_id, turn, answer.text)
                if created is not None:
                    assert answer.json()["created"] is created, (item_id, turn)
            assert client.get(f"/items/{item_id}").status_code == left[item_id]


def test_a_column_keeps_the_kind_of_its_first_value_within_one_batch(home: Path) -> None:
    app = create_app(settings(home))
    with serving(app) as client:
        with together(home, client, app) as crowd:
            for turn, value in enumerate((1, "two", 3)):
                body = {"texts": ["x"], "metadata": {"stock": value}}
                crowd.send(str(turn), "PUT", "/items/kinds", json=body)
            crowd.send(
                "3", "PUT", "/items/kinds", json={"texts": ["x"], "metadata": {"stock": "y"}}
            )
        codes = [crowd.answers[str(turn)].status_code for turn in range(4)]
        assert codes == [200, 422, 200, 422]
        assert client.get("/items/kinds").json()["metadata"] == {"stock": 3}


def test_a_cache_that_cannot_be_used_refuses_items_and_lets_deletions_through(home: Path) -> None:
    app = create_app(settings(home))
    cache = home / "cache" / "embeddings"
    shutil.rmtree(cache)
    cache.write_text("in the way")
    with serving(app) as client:
        with together(home, client, app) as crowd:
            crowd.send("put", "PUT", "/items/new", json={"texts": ["x"]})
            crowd.send("delete", "DELETE", "/items/red%2F24")
        refused = crowd.answers["put"]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_writable")
        assert "can't be encoded now" in refused.json()["error"]["message"]
        assert crowd.answers["delete"].status_code == 200
        cache.unlink()
        assert client.put("/items/new", json={"texts": ["x"]}).status_code == 200


def test_a_vector_counts_instead_of_the_picture_beside_it(home: Path) -> None:
    own = [0.0] * (WIDTH - 1) + [1.0]
    picture = colour_png("red")
    image = base64.b64encode(picture).decode()
    with serving(create_app(settings(home))) as client:
        body = {"vector": own, "modality": "image", "image": image}
        client.put("/items/both", json=body).raise_for_status()
        found = client.post("/search/vector", json={"vector": own, "k": 1}).json()["hits"][0]
        assert (found["id"], found["score"]) == ("both", pytest.approx(1.0, abs=1e-4))
        assert client.get("/items/both/image").content == picture
        broken = client.put("/items/broken", json={**body, "image": image[:40]})
        assert broken.status_code in (415, 422)
        assert broken.json()["error"]["param"] == "image"


def test_a_picture_that_is_put_anew_is_shown_at_once(home: Path) -> None:
    with serving(create_app(settings(home))) as client:
        tags = []
        for colour in ("red", "blue", "red"):
            image = base64.b64encode(colour_png(colour)).decode()
            client.put("/items/shown", json={"image": image}).raise_for_status()
            answer = client.get("/items/shown/image")
            assert answer.content == colour_png(colour)
            assert answer.headers["cache-control"] == "no-cache"
            tags.append(answer.headers["etag"])
            for tag in tags:
                again = client.get("/items/shown/image", headers={"If-None-Match": tag})
                assert again.status_code == (304 if tag == tags[-1] else 200)
        assert tags[1] not in (tags[0], tags[2])


@pytest.mark.parametrize("path", ["", "%20", "%20a", "a%20", "%E2%80%83a"])
def test_an_id_that_is_empty_or_has_blanks_at_its_edges_is_refused(home: Path, path: str) -> None:
    with serving(create_app(settings(home))) as client:
        answer = client.put(f"/items/{path}", json={"texts": ["x"]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (422, "invalid_id", "id")
        assert client.put("/items/a%20b", json={"texts": ["x"]}).status_code == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_path_that_is_not_utf8_names_no_item(home: Path, method: str) -> None:
    with serving(create_app(settings(home))) as client:
        given = {"json": {"texts": ["x"]}} if method == "PUT" else {}
        answer = client.request(method, "/items/%ff", **given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_id")


def test_the_limit_of_texts_is_the_one_that_was_set(home: Path) -> None:
    limits = Limits(max_item_texts=3)
    with serving(create_app(settings(home, limits))) as client:
        assert client.put("/items/t", json={"texts": ["x", "y", "z"]}).status_code == 200
        answer = client.put("/items/t", json={"texts": ["x", "y", "z", "w"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "texts")
        assert client.get("/info").json()["limits"]["max_item_texts"] == 3


def stalled(client: httpx.Client, length: int, sent: int) -> socket.socket:
    """A PUT whose body stops coming."""
    connection = socket.create_connection(("127.0.0.1", client.base_url.port or 80))
    head = (
        f"PUT /items/slow HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode() + b"{" + b" " * (sent - 1))
    return connection


def test_bodies_that_do_not_come_keep_nobody_out_and_time_out(home: Path) -> None:
    limits = Limits(max_changes=4, body_timeout_s=1.0)
    with serving(create_app(settings(home, limits))) as client:
        slow = [stalled(client, 10, 1) for _ in range(8)]
        time.sleep(0.1)
        assert client.put("/items/quick", json={"texts": ["x"]}).status_code == 200
        for connection in slow:
            connection.settimeout(20)
            answer = connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"body_timeout"' in answer
            connection.close()
        metrics = client.get("/metrics").text
        assert 'hivlp_rejected_total{reason="body_timeout"} 8.0' in metrics


def test_what_bodies_on_their_way_hold_is_bounded(home: Path) -> None:
    limits = Limits(max_body_bytes=20_000, max_change_bytes=25_000, max_image_bytes=10_000)
    app = create_app(settings(home, limits))
    with serving(app) as client:
        held = stalled(client, 20_000, 18_000)
        until(lambda: state_of(app).change_room.held == 18_000)
        big = {"texts": ["x"], "metadata": {"name": "n" * 9_000}}
        answer = client.put("/items/big", json=big)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert client.put("/items/small", json={"texts": ["x"]}).status_code == 200
        held.close()
        until(lambda: state_of(app).change_room.held == 0)
        assert client.put("/items/big", json=big).status_code == 200


def page(client: httpx.Client, offset: int, snapshot: str) -> httpx.Response:
    body = {"query": "red", "k": 2, "offset": offset, "snapshot": snapshot}
    return client.post("/search/text", json=body)


def test_pages_of_one_version_go_on_while_items_come_and_go(home: Path) -> None:
    app = create_app(settings(home, keep_versions=3))
    with serving(app) as client:
        first = client.post("/search/text", json={"query": "red", "k": 8}).json()
        whole, pinned = [hit["id"] for hit in first["hits"]], first["snapshot"]
        client.delete(f"/items/{whole[2].replace('/', '%2F')}").raise_for_status()
        client.put("/items/new", json={"texts": ["x"]}).raise_for_status()
        second = page(client, 2, pinned)
        assert second.status_code == 200, second.text
        assert second.json()["snapshot"] == pinned
        assert [hit["id"] for hit in second.json()["hits"]] == whole[2:4]
        for turn in range(3):
            client.put("/items/new", json={"texts": [f"x {turn}"]}).raise_for_status()
        gone = page(client, 4, pinned)  # still on the disk, as what was built
        assert (gone.status_code, gone.json()["error"]["code"]) == (422, "not_available")
        assert gone.json()["error"]["param"] == "snapshot"
        unknown = page(client, 0, "20200101T000000-000000")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_such_snapshot")
        cell: Any = state_of(app).catalogue.live("default")
        assert len(cell._kept) == 3


def test_superseded_versions_are_let_go_of_in_time_and_by_a_thread_of_their_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivlp.service.serving import ServedVersion

    where: list[str] = []
    close = ServedVersion.close

    def told(served: ServedVersion) -> None:
        where.append(threading.current_thread().name)
        close(served)

    monkeypatch.setattr(ServedVersion, "close", told)
    store = SnapshotStore(home)
    with serving(create_app(settings(home, keep_s=0.3))) as client:
        built = store.current("default")
        client.put("/items/new", json={"texts": ["x"]}).raise_for_status()
        assert page(client, 0, built).status_code == 200
        until(lambda: not store.in_use("default", built))
        assert page(client, 0, built).status_code == 422
        assert where == ["hivlp-close_0"]


def test_an_erasure_lets_go_of_every_version_that_has_the_item(home: Path) -> None:
    store = SnapshotStore(home)
    with serving(create_app(settings(home, keep_s=600))) as client:
        client.put("/items/secret", json={"texts": ["x"]}).raise_for_status()
        having = client.put("/items/secret", json={"texts": ["y"]}).json()["snapshot"]
        client.put("/items/other", json={"texts": ["z"]}).raise_for_status()
        assert page(client, 0, having).status_code == 200
        report = erase(store, "default", ["secret"], wait_s=20, quiet=True)
        assert (report.erased, report.left) == (("secret",), ())
        assert page(client, 0, having).status_code == 404
        until(lambda: client.get("/items/secret").status_code == 404)

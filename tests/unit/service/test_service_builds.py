"""/admin/builds over real HTTP, in a service that leaves running them to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.service.answers import BuildAnswer, BuildList
from hivlp.service.app import create_app
from hivlp.service.jobs import builds
from hivlp.service.jobs.records import BuildRecords
from hivlp.service.jobs.settings import JobSettings
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

PATH = "/admin/builds"
PATIENCE_S = 20


class Place:
    """A service, its home, a corpus below an allowed root; the test is what runs builds."""

    def __init__(self, client: httpx.Client, home: Path, corpus: Path) -> None:
        self.client, self.corpus = client, str(corpus)
        self.records = BuildRecords(home)

    def ask(self, **more: Any) -> httpx.Response:
        body = {"corpus": self.corpus, "artifact": "tiny", **more}
        return self.client.post(PATH, json={name: one for name, one in body.items() if one != ""})

    def error(self, answer: httpx.Response) -> tuple[int, str, str | None]:
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """One of a test's own."""
    with served(tmp_path) as place:
        yield place


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One for tests that leave no build."""
    with served(tmp_path_factory.mktemp("place")) as place:
        yield place


@contextmanager
def served(folder: Path) -> Iterator[Place]:
    home, root = folder / "home", folder / "root"
    (home / "artifacts" / "tiny").mkdir(parents=True)
    (home / "artifacts" / "tiny" / "manifest.json").write_text("{}")
    (root / "pictures").mkdir(parents=True)
    settings = SMALL.model_copy(update={"home": home, "jobs": JobSettings(roots=(str(root),))})
    elsewhere = BuildRecords(home).become_runner()
    assert elsewhere is not None
    with serving(create_app(settings, load=World().load)) as client:
        yield Place(client, home, root / "pictures")
    elsewhere.release()


def test_a_build_is_taken_and_the_answer_says_where_to_look(place: Place) -> None:
    answer = place.ask(index="new", metadata_group="concept", key="k")
    assert answer.status_code == 202
    build = BuildAnswer.model_validate(answer.json())
    assert answer.headers["Location"] == f"{PATH}/{build.id}"
    assert (build.state, build.cancelling, build.tries, build.progress) == (
        "queued",
        False,
        0,
        None,
    )
    assert build.asked["corpus"] == place.corpus
    assert (build.asked["index"], build.asked["metadata_group"]) == ("new", "concept")
    assert "key" not in build.asked
    followed = place.client.get(answer.headers["Location"])
    assert followed.status_code == 200
    BuildAnswer.model_validate(followed.json())
    assert place.ask(index="new", metadata_group="concept", key="k").json()["id"] == build.id


def test_its_progress_and_what_came_of_it_are_shown(place: Place) -> None:
    build_id = place.ask().json()["id"]
    place.records.claim(build_id)
    progress = {"step": "encode default", "unit": "item", "done": 3, "total": None}
    place.records.tell(build_id, {**progress, "rate": 1.5, "seconds_left": None})
    shown = BuildAnswer.model_validate(place.client.get(f"{PATH}/{build_id}").json())
    assert shown.state == "running"
    assert shown.progress is not None
    assert (shown.progress.step, shown.progress.done) == ("encode default", 3)
    assert shown.started_at is not None
    place.records.end(build_id, "failed", reason="every picture is broken")
    shown = BuildAnswer.model_validate(place.client.get(f"{PATH}/{build_id}").json())
    assert (shown.state, shown.reason) == ("failed", "every picture is broken")
    assert shown.progress is None
    assert shown.ended_at is not None


def test_builds_are_listed_newest_first_up_to_a_limit(place: Place) -> None:
    ids = [place.ask(index=name).json()["id"] for name in "abc"]
    listed = BuildList.model_validate(place.client.get(PATH).json())
    assert [build.id for build in listed.builds] == ids[::-1]
    few = place.client.get(PATH, params={"limit": 1}).json()["builds"]
    assert [build["id"] for build in few] == ids[2:]
    for limit in (0, 101):
        answer = place.client.get(PATH, params={"limit": limit})
        assert place.error(answer) == (422, "out_of_range", "limit")


def test_a_second_build_of_an_index_is_refused_with_the_id_of_the_first(place: Place) -> None:
    first = place.ask().json()["id"]
    again = place.ask(batch_size=16)
    assert place.error(again) == (409, "build_under_way", "index")
    assert first in again.json()["error"]["message"]
    reused = place.ask(key="k", index="b"), place.ask(key="k", index="c")
    assert place.error(reused[1]) == (409, "key_reused", "key")


def test_a_build_is_cancelled_and_cancelling_it_again_changes_nothing(place: Place) -> None:
    build_id = place.ask().json()["id"]
    for _ in range(2):
        answer = place.client.delete(f"{PATH}/{build_id}")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    running = place.ask().json()["id"]
    hold = place.records.hold(running)
    assert hold is not None
    place.records.claim(running)
    answer = place.client.delete(f"{PATH}/{running}")
    assert (answer.status_code, answer.json()["cancelling"]) == (202, True)
    hold.release()


@pytest.mark.parametrize(
    ("more", "status", "code", "param"),
    [
        ({"corpus": "/etc"}, 422, "outside_roots", "corpus"),
        ({"corpus": "file:///etc/passwd"}, 422, "outside_roots", "corpus"),
        ({"corpus": "http://169.254.169.254/"}, 422, "outside_roots", "corpus"),
        ({"corpus": None}, 422, "invalid_value", "corpus"),
        ({"corpus": ""}, 422, "missing_field", "corpus"),
        ({"corpus": "/a\0b"}, 422, "invalid_text", "corpus"),
        ({"corpus": "/" + "x" * 5_000}, 422, "invalid_value", "corpus"),
        ({"artifact": "../.."}, 422, "outside_roots", "artifact"),
        ({"artifact": "--home=/"}, 422, "invalid_value", "artifact"),
        ({"artifact": ""}, 422, "missing_field", "artifact"),
        ({"index": "../x"}, 422, "invalid_index", "index"),
        ({"index": "Default"}, 422, "invalid_index", "index"),
        ({"batch_size": 0}, 422, "out_of_range", "batch_size"),
        ({"batch_size": "32"}, 422, "invalid_value", "batch_size"),
        ({"max_failures": 1.5}, 422, "out_of_range", "max_failures"),
        ({"family": "tree"}, 422, "invalid_value", "family"),
        ({"must": ["mask", "speed"]}, 422, "invalid_value", "must.1"),
        ({"progress_json": "/etc/x"}, 422, "unknown_field", "progress_json"),
        ({"home": "/"}, 422, "unknown_field", "home"),
        ({"images": "/etc"}, 422, "outside_roots", "images"),
        ({"key": "x" * 300}, 422, "invalid_value", "key"),
    ],
)
def test_what_can_not_be_built_is_refused_by_field(
    refusing: Place, more: dict[str, Any], status: int, code: str, param: str
) -> None:
    assert refusing.error(refusing.ask(**more)) == (status, code, param)
    assert refusing.client.get(PATH).json()["builds"] == []


@pytest.mark.parametrize(
    "bad", ["..", "%2e%2e", "..%2fx", "x", "20260101T000000-000000-abcdef", "%00", "a%0ab"]
)
def test_an_id_that_there_is_none_of_is_404(refusing: Place, bad: str) -> None:
    (refusing.records.folder / "x").mkdir(parents=True, exist_ok=True)
    for method in ("GET", "DELETE"):
        answer = refusing.client.request(method, f"{PATH}/{bad}")
        assert answer.status_code in (404, 405)  # a step to another folder is no id at all
        assert answer.json()["error"]["code"] in (
            "no_such_build",
            "not_found",
            "method_not_allowed",
        )


def test_a_home_that_can_not_be_written_to_is_503(place: Place) -> None:
    place.records.folder.rename(place.records.folder.with_name("gone"))
    place.records.folder.write_text("a file where the folder should be")
    assert place.error(place.ask()) == (503, "not_writable", None)


def test_without_roots_nothing_is_built_and_what_was_is_still_shown() -> None:
    with serving(create_app(SMALL, load=World().load)) as client:
        answer = client.post(PATH, json={"corpus": "/data", "artifact": "tiny"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "builds_off")
        assert "HIVLP_JOBS__ROOTS" in answer.json()["error"]["message"]
        assert client.get(PATH).json()["builds"] == []
        assert client.get("/readyz").status_code == 200


def test_a_body_that_is_none_is_refused_before_anything_else(refusing: Place) -> None:
    answer = refusing.client.post(PATH, content=b"{", headers={"Content-Type": "application/json"})
    assert refusing.error(answer) == (400, "malformed_body", None)
    answer = refusing.client.post(PATH, content=b"corpus=/data")
    assert refusing.error(answer) == (415, "unsupported_media_type", None)


def test_trouble_with_builds_is_none_of_searches_and_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builds, "TROUBLE_S", 0.02)
    home = tmp_path / "home"
    home.mkdir()
    (home / "builds").write_text("a file where the folder should be")
    settings = SMALL.model_copy(update={"home": home, "jobs": JobSettings(roots=("/data",))})
    with serving(create_app(settings, load=World().load)) as client:
        wait(lambda: "builds are not looked after" in caplog.text)
        time.sleep(0.2)
        assert caplog.text.count("builds are not looked after") == 1
        assert client.get("/readyz").status_code == 200
        (home / "builds").unlink()
        records = BuildRecords(home)
        wait(lambda: records.become_runner() is None)
        assert client.get(PATH).json()["builds"] == []
    wait(records.become_runner)


def wait(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)

"""Builds over HTTP, by a service that runs them itself: from the request to what is served."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.client import Client, Conflict, InvalidRequest, NotFound
from tests.integration.builds_served import (
    TEXTS,
    Place,
    ended,
    gone,
    midway,
    wait_for,
)
from tests.integration.served_home import make_corpus, make_home


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    return Place.make(
        tmp_path_factory.mktemp("place"), make_home(tmp_path_factory.mktemp("built"), corpus)
    )


@pytest.fixture(scope="module")
def client(place: Place) -> Iterator[Client]:
    with place.served() as (_, client):
        yield client


def folders(place: Place, index: str = "default") -> set[str]:
    return {path.name for path in (place.home / "indexes" / index).iterdir() if path.is_dir()}


def metric(client: Client, name: str) -> float:
    text = client._http.get("/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_a_build_ends_as_the_version_that_is_served(place: Place, client: Client) -> None:
    before = client.snapshots().active
    build = client.start_build(place.squares, artifact="tiny", key="one")
    assert build.state == "queued"
    build = wait_for(client, build.id, ended)
    assert (build.state, build.reason, build.active, build.left_out) == ("done", None, True, 0)
    assert build.items == client.info().indexes[0].items
    assert build.snapshot is not None
    assert build.snapshot > before
    assert SnapshotStore(place.home).current("default") == build.snapshot
    gone(lambda: client.search_text("red").snapshot != build.snapshot)
    again = client.start_build(place.squares, artifact="tiny", key="one")
    assert (again.id, again.state) == (build.id, "done")
    gone(lambda: metric(client, 'hivlp_build_total{result="done"}') != 1)
    assert metric(client, "hivlp_build_duration_seconds_count") == 1


def test_a_new_index_is_built_and_left_unactivated_where_that_is_asked(
    place: Place, client: Client
) -> None:
    build = client.start_build(
        place.squares, index="new", artifact="tiny", activate=False, must=[], level1="sq8"
    )
    build = wait_for(client, build.id, ended)
    assert (build.state, build.active) == ("done", False)
    store = SnapshotStore(place.home)
    assert store.versions("new") == [build.snapshot]
    assert store.history("new") == []
    assert store.manifest("new", build.snapshot).sides["image"].level1 == "sq8"
    assert [index.name for index in client.indexes().indexes] == ["default"]


def test_a_new_index_is_served_by_the_service_that_built_it_once_it_is_done(
    place: Place, client: Client
) -> None:
    build = client.start_build(place.squares, index="next", artifact="tiny")
    build = wait_for(client, build.id, ended)
    assert (build.state, build.active) == ("done", True)
    gone(lambda: "next" not in [index.name for index in client.indexes().indexes])
    assert client.search_text("red", index="next").snapshot == build.snapshot
    assert client.activation(index="next").snapshot == build.snapshot


def test_a_build_that_is_cancelled_ends_at_once_and_the_next_one_goes_on(
    place: Place, client: Client
) -> None:
    before, versions = client.search_text("red"), folders(place)
    build = client.start_build(place.texts, batch_size=1)  # slow enough to be cancelled
    wait_for(client, build.id, midway)
    with pytest.raises(Conflict, match=build.id):
        client.start_build(place.squares)
    assert place.processes_of_builds()
    assert client.cancel_build(build.id).cancelling
    build = wait_for(client, build.id, ended)
    assert (build.state, build.snapshot, build.cancelling) == ("cancelled", None, False)
    assert place.processes_of_builds() == []
    assert folders(place) == versions
    assert client.search_text("red").snapshot == before.snapshot
    again = client.start_build(place.texts, activate=False, batch_size=8)
    again = wait_for(client, again.id, ended)
    assert again.state == "done"
    assert again.encoded is not None
    assert again.items is not None
    assert again.encoded < TEXTS


def test_a_process_that_is_killed_is_a_failure_with_its_likely_reason(
    place: Place, client: Client
) -> None:
    versions = folders(place, "default")
    build = client.start_build(place.texts, batch_size=8)
    wait_for(client, build.id, lambda build: bool(place.processes_of_builds()))
    (process,) = place.processes_of_builds()
    os.kill(process, signal.SIGKILL)
    build = wait_for(client, build.id, ended)
    assert (build.state, build.snapshot) == ("failed", None)
    assert build.reason is not None
    assert "killed (most likely for want of memory)" in build.reason
    assert folders(place, "default") == versions


def test_a_corpus_that_is_mostly_broken_fails_with_a_count_and_harms_nothing(
    place: Place, client: Client
) -> None:
    serving = client.snapshots().active
    broken = place.root / "broken"
    broken.mkdir()
    for name in range(4):
        (broken / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    build = client.start_build(str(broken), artifact="tiny")
    build = wait_for(client, build.id, ended)
    assert build.state == "failed"
    assert build.reason is not None
    assert build.reason.startswith("4 of 4 items failed, over the allowed share of 0.05")
    assert client.snapshots().active == serving


def test_a_corpus_that_goes_missing_fails_with_its_place(place: Place, client: Client) -> None:
    corpus = place.root / "gone.jsonl"
    corpus.write_text(json.dumps({"id": "1", "caption": "red", "image": "nothing.png"}) + "\n")
    build = client.start_build(place.texts, index="busy", artifact="tiny")
    late = client.start_build(str(corpus), index="late", artifact="tiny")
    assert client.build(late.id).state == "queued"  # one at a time
    corpus.unlink()
    client.cancel_build(build.id)
    late = wait_for(client, late.id, ended)
    assert (late.state, late.reason) == ("failed", f"{corpus}: no such file or folder")


def test_what_can_not_be_built_is_refused(place: Place, client: Client, tmp_path: Path) -> None:
    for corpus in ("/etc", str(tmp_path), f"{place.root}/../x"):
        with pytest.raises(InvalidRequest) as caught:
            client.start_build(corpus, artifact="tiny")
        assert (caught.value.code, caught.value.param) == ("outside_roots", "corpus")
    with pytest.raises(NotFound):
        client.build("../default")
    with pytest.raises(NotFound):
        client.cancel_build("..")


def test_builds_are_listed_newest_first(client: Client) -> None:
    listed = client.builds(limit=100).builds
    assert [build.id for build in listed] == sorted((b.id for b in listed), reverse=True)
    assert len(client.builds(limit=1).builds) == min(1, len(listed))

"""Builds whose service, worker or Redis dies midway: each ends once, and what was encoded counts.

Slow (a build a test, over real processes and a real Redis): `make builds`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hivlp.index.snapshot.activation_files import FOLDER
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.answers import BuildAnswer
from hivlp.service.client import Client, Unavailable
from hivlp.service.jobs.records import BuildRecords
from tests.faults.mounts import tmpfs
from tests.integration.builds_served import (
    MANY,
    TEXTS,
    Place,
    ended,
    environment,
    gone,
    midway,
    wait_for,
)
from tests.integration.served_home import make_corpus, make_home
from tests.redis_server import RedisServer, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(
        tmp_path_factory.mktemp("built"), make_corpus(tmp_path_factory.mktemp("corpus"))
    )


@pytest.fixture
def place(tmp_path: Path, built: Path) -> Place:
    return Place.make(tmp_path, built)


@pytest.fixture
def redis(redis_path: str) -> Iterator[RedisServer]:
    with running(redis_path) as server:
        yield server


def begin(client: Client, place: Place) -> str:
    """A build of many texts, some of which are encoded."""
    build = client.start_build(place.texts, index="many", artifact="tiny", batch_size=8)
    wait_for(client, build.id, midway)
    return build.id


def check_done(place: Place, build: BuildAnswer, *, tries: int) -> None:
    """It made one version, and didn't begin from nothing."""
    assert (build.state, build.items, build.reason) == ("done", MANY, None)
    assert build.tries == tries
    assert build.encoded is not None
    assert build.encoded < TEXTS
    folder = place.home / "indexes" / "many"
    made = [path.name for path in folder.iterdir() if path.is_dir()]
    assert [name for name in made if name != FOLDER] == [build.snapshot]
    assert SnapshotStore(place.home).current("many") == build.snapshot
    SnapshotStore(place.home).verify("many")


def test_a_service_that_is_told_to_stop_lets_go_and_its_next_start_goes_on(place: Place) -> None:
    with place.served() as (process, client):
        build_id = begin(client, place)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert place.processes_of_builds() == []
    record = BuildRecords(place.home).get(build_id)
    assert (record.state, record.tries) == ("queued", 0)
    with place.served() as (_, client):
        check_done(place, wait_for(client, build_id, ended), tries=1)


def test_a_service_that_is_killed_takes_its_build_along_and_its_next_start_goes_on(
    place: Place,
) -> None:
    with place.served() as (process, client):
        build_id = begin(client, place)
        process.kill()
    gone(place.processes_of_builds)
    assert BuildRecords(place.home).get(build_id).state == "running"
    with place.served() as (_, client):
        check_done(place, wait_for(client, build_id, ended), tries=2)


def test_of_several_processes_one_builds_and_another_takes_over_when_it_dies(
    place: Place,
) -> None:
    with place.served() as (first, client), place.served() as (_, other):
        build_id = begin(client, place)
        assert other.build(build_id).state == "running"
        assert len(place.processes_of_builds()) == 1
        first.kill()
        check_done(place, wait_for(other, build_id, ended), tries=2)


def test_a_full_disk_is_the_reason_as_soon_as_there_is_room_to_write_it(
    tmp_path: Path, built: Path
) -> None:
    with tmpfs(tmp_path / "small", 64 * 2**20) as folder:
        place = Place.make(folder, built)
        filler = folder / "filler"
        with place.served() as (_, client):
            fill(filler)
            with pytest.raises(Unavailable) as caught:
                client.start_build(place.texts, index="many", artifact="tiny")
            assert caught.value.code == "not_writable"
            filler.unlink()
            build = client.start_build(place.texts, index="many", artifact="tiny", batch_size=8)
            wait_for(client, build.id, midway)
            fill(filler)
            gone(place.processes_of_builds)
            assert client.build(build.id).state == "running"  # nobody could write that it isn't
            assert client.search_text("red").hits
            filler.unlink()
            build = wait_for(client, build.id, ended)
            assert build.state == "failed"
            assert build.reason is not None
            full = "No space left on device|disk is full|needs .* on the disk of"
            assert re.search(full, build.reason)
            again = client.start_build(place.texts, index="many", artifact="tiny")
            check_done(place, wait_for(client, again.id, ended), tries=1)


def test_a_disk_without_room_is_the_reason_and_the_version_before_serves(
    tmp_path: Path, built: Path
) -> None:
    with tmpfs(tmp_path / "small", 64 * 2**20) as folder:
        place = Place.make(folder, built)
        filler = folder / "filler"
        with place.served() as (_, client):
            fill(filler)
            os.truncate(filler, filler.stat().st_size - (8 << 20))
            build = client.start_build(place.squares, artifact="tiny")
            build = wait_for(client, build.id, ended)
            assert (build.state, build.tries) == ("failed", 1)
            assert build.reason is not None
            assert re.search(
                r"index 'default', at least 20 items: needs .* on the disk", build.reason
            )
            assert client.search_text("red").snapshot != build.snapshot
            filler.unlink()
            again = client.start_build(place.squares, artifact="tiny")
            assert wait_for(client, again.id, ended).state == "done"


def fill(file: Path) -> None:
    """Write until no more can be written."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4_096))


@pytest.mark.redis
def test_a_worker_builds_what_the_service_is_asked_for(place: Place, redis: RedisServer) -> None:
    url = {"HIVLP_JOBS__URL": redis.url}
    with place.served(**url) as (_, client), place.worker(**url) as worker:
        build = client.start_build(place.squares, artifact="tiny")
        build = wait_for(client, build.id, ended)
        assert (build.state, build.tries, build.reason) == ("done", 1, None)
        gone(lambda: client.search_text("red").snapshot != build.snapshot)
        begun = begin(client, place)
        assert client.cancel_build(begun).cancelling
        assert wait_for(client, begun, ended).state == "cancelled"
        assert place.processes_of_builds() == []
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


@pytest.mark.redis
def test_the_build_of_a_killed_worker_is_finished_by_another(
    place: Place, redis: RedisServer
) -> None:
    url = {"HIVLP_JOBS__URL": redis.url, "HIVLP_JOBS__HEARTBEAT_S": "4"}
    with place.served(**url) as (_, client), place.worker(**url) as worker:
        build_id = begin(client, place)
        worker.kill()
        gone(place.processes_of_builds)
        with place.worker(**url):
            check_done(place, wait_for(client, build_id, ended), tries=2)


@pytest.mark.redis
def test_a_worker_that_is_told_to_end_hands_its_build_on(place: Place, redis: RedisServer) -> None:
    url = {"HIVLP_JOBS__URL": redis.url}
    with place.served(**url) as (_, client), place.worker(**url) as worker:
        build_id = begin(client, place)
        with place.worker(**url):
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
            check_done(place, wait_for(client, build_id, ended), tries=1)


@pytest.mark.redis
def test_a_redis_that_dies_and_comes_back_empty_loses_no_build(
    place: Place, redis: RedisServer
) -> None:
    url = {"HIVLP_JOBS__URL": redis.url}
    with place.served(**url) as (_, client), place.worker(**url):
        build_id = begin(client, place)
        redis.kill()
        waiting = client.start_build(place.squares, index="other", artifact="tiny")
        check = wait_for(client, build_id, ended)
        assert (check.state, check.tries) == ("done", 1)
        assert client.build(waiting.id).state == "queued"
        assert client.search_text("red").hits
        redis.start()
        assert wait_for(client, waiting.id, ended).state == "done"


@pytest.mark.redis
def test_what_others_put_into_the_queue_is_built_by_nobody(
    place: Place, redis: RedisServer
) -> None:
    url = {"HIVLP_JOBS__URL": redis.url}
    with place.served(**url) as (_, client), place.worker(**url) as worker:
        with redis.client() as raw:
            for number, build_id in enumerate(("../../etc", "20260101T000000-000000-abcdef")):
                job = (
                    f'{{"function": "build", "kwargs": {{"build_id": "{build_id}"}}, '
                    f'"queue": "hivlp-builds", "key": "k{number}", "status": "queued"}}'
                )
                raw.set(f"saq:job:hivlp-builds:k{number}", job)
                raw.rpush("saq:hivlp-builds:queued", f"saq:job:hivlp-builds:k{number}")
            raw.set("saq:job:hivlp-builds:bad", "no json")
            raw.rpush("saq:hivlp-builds:queued", "saq:job:hivlp-builds:bad")
        build = client.start_build(place.squares, artifact="tiny")
        assert wait_for(client, build.id, ended).state == "done"
        assert worker.poll() is None
        assert len(client.builds().builds) == 1


def test_a_worker_without_a_redis_says_which_setting_names_one(place: Place) -> None:
    command = [sys.executable, "-m", "hivlp.service.main", "worker", "--home", str(place.home)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 1
    assert "jobs.url" in done.stderr
    assert "Traceback" not in done.stderr

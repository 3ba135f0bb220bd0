"""Builds on disk: asked for once, one at a time an index, and in no state without a way out."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hivlp.service.jobs.errors import BuildUnderWay, KeyReused, NoSuchBuild, TooManyBuilds
from hivlp.service.jobs.records import MAX_TRIES, Build, BuildRecords
from hivlp.service.schemas import StartBuild


@pytest.fixture
def records(tmp_path: Path) -> BuildRecords:
    return BuildRecords(tmp_path)


def submit(records: BuildRecords, index: str = "a", corpus: str = "/c", **more: object) -> Build:
    asked = StartBuild.model_validate({"index": index, "corpus": corpus, **more})
    return records.submit(asked, keep=3, max_waiting=4)


def test_the_same_request_is_one_build_while_it_waits_and_a_new_one_afterwards(
    records: BuildRecords,
) -> None:
    first = submit(records)
    assert submit(records).id == first.id
    records.claim(first.id)
    assert submit(records).id == first.id
    records.end(first.id, "done")
    assert submit(records).id != first.id


def test_a_key_names_one_build_for_good_and_never_something_else(records: BuildRecords) -> None:
    first = submit(records, key="monday")
    again = submit(records, key="again")  # the same build, and from now on by this key too
    assert again.id == first.id
    records.claim(first.id)
    records.end(first.id, "failed", reason="x")
    assert submit(records, key="monday").id == submit(records, key="again").id == first.id
    with pytest.raises(KeyReused, match=first.id):
        submit(records, key="monday", corpus="/other")


def test_an_index_has_one_build_that_waits_or_runs_and_another_index_its_own(
    records: BuildRecords,
) -> None:
    first = submit(records, "a")
    with pytest.raises(BuildUnderWay, match=f"queued already: {first.id}") as caught:
        submit(records, "a", corpus="/other")
    assert (caught.value.status, caught.value.param) == (409, "index")
    records.claim(first.id)
    with pytest.raises(BuildUnderWay, match="running already"):
        submit(records, "a", corpus="/other")
    assert submit(records, "b").id != first.id
    records.end(first.id, "cancelled")
    assert submit(records, "a", corpus="/other").id != first.id


def test_only_so_many_wait(records: BuildRecords) -> None:
    for index in "abcd":
        submit(records, index)
    with pytest.raises(TooManyBuilds) as caught:
        submit(records, "e")
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    assert "Retry-After" in caught.value.headers


def test_many_at_once_begin_one_build(tmp_path: Path) -> None:
    def one(number: int) -> str:
        try:
            return submit(BuildRecords(tmp_path), corpus=f"/{number % 4}").id
        except BuildUnderWay as error:
            return error.message.rpartition(": ")[2]

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(one, range(64)))) == 1


def test_builds_are_listed_newest_first_and_the_oldest_that_ended_are_forgotten(
    records: BuildRecords,
) -> None:
    ids = []
    for number in range(6):
        build = submit(records, f"index{number}")
        ids.append(build.id)
        if number:
            records.end(build.id, "done")
    kept = [build.id for build in records.all()]
    assert kept == sorted(kept, reverse=True)
    assert kept == [ids[5], ids[4], ids[3], ids[0]]  # the first one still waits
    assert [build.id for build in records.all(2)] == ids[:3:-1]
    with pytest.raises(NoSuchBuild):
        records.get(ids[1])


def test_an_id_is_later_than_all_before_it_whatever_the_clock_says(records: BuildRecords) -> None:
    first = submit(records, "a")
    future = f"29990101T000000-000000-{first.id[-6:]}"
    (records.folder / first.id).rename(records.folder / future)
    record = (records.folder / future / "build.json").read_text().replace(first.id, future)
    (records.folder / future / "build.json").write_text(record)
    assert submit(records, "b").id.startswith("29990101T000000-000001-")


@pytest.mark.parametrize(
    "bad",
    ["", ".", "..", "../x", "a/b", "%2e%2e", "20260101T000000-000000-00000g", "x" * 5_000, "\0"],
)
def test_an_id_that_is_none_is_not_looked_for(records: BuildRecords, bad: str) -> None:
    (records.folder.parent / "x").mkdir()
    for ask in (records.get, records.cancel):
        with pytest.raises(NoSuchBuild) as caught:
            ask(bad)
        assert caught.value.status == 404


def test_a_record_that_can_not_be_read_harms_no_other(records: BuildRecords) -> None:
    broken, other = submit(records, "a"), submit(records, "b")
    (records.folder / broken.id / "build.json").write_text('{"id": 1}')
    (records.folder / "20260101T000000-000000-000000").write_text("a file")
    with pytest.raises(NoSuchBuild):
        records.get(broken.id)
    assert [build.id for build in records.all()] == [other.id]


def test_what_waits_is_cancelled_at_once_and_what_runs_by_whoever_runs_it(
    records: BuildRecords,
) -> None:
    waiting, running = submit(records, "a"), submit(records, "b")
    assert records.cancel(waiting.id).state == "cancelled"
    hold = records.hold(running.id)
    assert hold is not None
    records.claim(running.id)
    told = records.cancel(running.id)
    assert (told.state, told.cancelling) == ("running", True)
    ended = records.end(running.id, "cancelled")
    assert (ended.state, ended.cancelling) == ("cancelled", False)
    hold.release()
    assert records.cancel(running.id) == ended


def test_a_build_whose_process_and_service_died_is_cancelled_at_once(
    records: BuildRecords,
) -> None:
    build = submit(records)
    records.claim(build.id)
    assert not records.held(build.id)
    assert records.cancel(build.id).state == "cancelled"


def test_a_build_told_to_end_before_its_turn_never_begins(records: BuildRecords) -> None:
    build = submit(records)
    hold = records.hold(build.id)
    assert hold is not None
    assert records.cancel(build.id).cancelling
    assert records.claim(build.id) is None
    hold.release()
    assert records.get(build.id).state == "cancelled"
    assert records.claim(build.id) is None


def test_a_build_that_dies_again_and_again_is_given_up_with_the_reason(
    records: BuildRecords,
) -> None:
    build = submit(records)
    for _ in range(MAX_TRIES):
        assert records.claim(build.id) is not None
    assert records.claim(build.id) is None
    ended = records.get(build.id)
    assert ended.state == "failed"
    assert ended.reason == "its process, or the service's, died 3 times midway"


def test_a_build_that_was_let_go_of_in_order_is_not_counted_as_dead(records: BuildRecords) -> None:
    build = submit(records)
    for _ in range(2 * MAX_TRIES):
        assert records.claim(build.id) is not None
        assert records.let_go(build.id, counted=False).state == "queued"
    assert records.get(build.id).tries == 0


def test_a_lock_ends_with_the_process_that_has_it(records: BuildRecords) -> None:
    build = submit(records)
    code = (
        "import sys; from pathlib import Path\n"
        "from hivlp.service.jobs.records import BuildRecords\n"
        f"records = BuildRecords(Path({str(records.folder.parent)!r}))\n"
        f"kept = records.hold({build.id!r}), records.become_runner()\n"
        "assert all(kept)\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert records.held(build.id)
        assert records.become_runner() is None
        other.kill()
        other.wait()
    assert not records.held(build.id)
    assert records.become_runner() is not None


def test_progress_that_can_not_be_written_is_no_failure(records: BuildRecords) -> None:
    build = submit(records)
    assert records.progress(build.id) is None
    records.tell(build.id, {"step": "encode", "done": 3})
    assert records.progress(build.id) == {"step": "encode", "done": 3}
    (records.folder / build.id / "progress.json").write_text("{half")
    assert records.progress(build.id) is None
    records.tell("gone", {"step": "encode"})

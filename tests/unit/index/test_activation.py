"""Activations in two phases: who is waited for, who isn't, and what moves the pointer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.errors import (
    ActivationUnderWay,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotQuarantined,
)
from hivlp.index.snapshot import activation as module
from hivlp.index.snapshot.activate_now import Activated, activate_now
from hivlp.index.snapshot.activation import GONE, Activations
from hivlp.index.snapshot.activation_files import FOLDER, Canary, Request, read_canaries
from hivlp.index.snapshot.members import Member
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot

# A process that serves an index: it joins, says that it stages what is asked for, and waits.
SERVES = """
import sys, time
from pathlib import Path
from hivlp.index.snapshot.activation import Activations
from hivlp.index.snapshot.store import SnapshotStore
activations = Activations(SnapshotStore(Path(sys.argv[1])), "default")
member = activations.join(serves=True)
print("joined", flush=True)
while (request := activations.pending()) is None:
    time.sleep(0.005)
member.report(request.id, sys.argv[2])
print("told", flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """Three versions, of which the last is active."""
    store = SnapshotStore(tmp_path)
    for seed in range(3):
        write_snapshot(store, images=unit_vectors(10, 16, seed))
    return store


@pytest.fixture
def activations(store: SnapshotStore) -> Activations:
    return Activations(store, "default")


@pytest.fixture
def both(activations: Activations) -> Iterator[tuple[Member, Member]]:
    """Two that serve."""
    members = activations.join(serves=True), activations.join(serves=True)
    yield members
    for member in members:
        if (activations._path / f"{member.name}.lock").exists():
            member.leave()


def asked(activations: Activations, version: str, member: Member, **more: Any) -> Request:
    request = activations.ask("activate", version, member, **more)
    assert request is not None
    return request


def die(member: Member) -> None:
    """As its process would: the lock ends, the files stay."""
    os.close(member._lock)


def ended(activations: Activations) -> tuple[bool, str]:
    activations.settle()
    last = activations.last()
    assert last is not None
    assert activations.pending() is None
    return last.active, last.reason


def test_the_pointer_moves_once_every_member_has_it_staged(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, second, third = store.versions("default")
    request = asked(activations, first, both[0])
    for member in both:
        activations.settle()
        assert (store.current("default"), activations.pending()) == (third, request)
        member.report(request.id, "staged")
    assert ended(activations) == (True, "")
    assert store.history("default") == [second, third, first]


def test_one_that_can_not_stage_it_ends_it_with_its_reason(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, _, third = store.versions("default")
    request = asked(activations, first, both[0])
    both[0].report(request.id, "staged")
    both[1].report(request.id, "failed", "no memory")
    assert ended(activations) == (False, "no memory")
    assert store.current("default") == third


def test_a_report_about_another_request_counts_for_nothing(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, second, third = store.versions("default")
    before = asked(activations, first, both[0])
    for member in both:
        member.report(before.id, "staged")
    activations.drop(before, "for this test")
    asked(activations, second, both[0])
    activations.settle()
    assert store.current("default") == third
    assert activations.pending() is not None


def test_one_that_died_holds_nothing_up_and_leaves_nothing(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first = store.versions("default")[0]
    request = asked(activations, first, both[0])
    both[0].report(request.id, "staged")
    activations.settle()
    assert activations.pending() is not None
    die(both[1])
    assert ended(activations) == (True, "")
    left = {path.name for path in (store.folder("default") / FOLDER).iterdir()}
    assert left == {"OUTCOME", f"{both[0].name}.lock", f"{both[0].name}.json"}


def test_processes_that_die_while_they_stage_it_end_it(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, _, third = store.versions("default")
    request = asked(activations, first, both[0])
    for _ in range(module.MAX_LOSSES):
        other = activations.join(serves=True)
        other.report(request.id, "staging")
        die(other)
        activations.settle()
    assert ended(activations) == (False, "2 processes died while they staged it")
    assert store.current("default") == third


def test_one_that_is_too_slow_ends_it_and_is_named(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first = store.versions("default")[0]
    request = asked(activations, first, both[0], timeout_s=1e-6)
    both[0].report(request.id, "staged")
    active, reason = ended(activations)
    assert not active
    assert reason == f"not staged within 1e-06 s by the processes {os.getpid()}"


def test_the_same_version_may_be_asked_for_again_another_may_not(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, second, third = store.versions("default")
    request = asked(activations, first, both[0])
    assert asked(activations, first, both[1]) == request
    with pytest.raises(ActivationUnderWay, match="is being activated") as told:
        activations.ask("activate", second, both[1])
    assert told.value.version == first
    with pytest.raises(ActivationUnderWay):
        activations.ask("rollback", None, both[1])
    activations.drop(request, "for this test")
    assert activations.ask("activate", third, both[0]) is None  # it is active


def test_asked_again_with_the_same_key_it_is_not_done_twice(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    request = activations.ask("rollback", None, both[0], key="once")
    assert request is not None
    for member in both:
        member.report(request.id, "staged")
    assert ended(activations) == (True, "")
    second = store.versions("default")[1]
    assert store.current("default") == second
    assert activations.ask("rollback", None, both[1], key="once") == request
    assert (activations.pending(), store.current("default")) == (None, second)


def test_what_is_not_there_or_failed_is_refused(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first = store.versions("default")[0]
    with pytest.raises(SnapshotMissing):
        activations.ask("activate", "20200101T000000-000000", both[0])
    store.quarantine("default").add(first, "image/rows.npy", "damaged")
    with pytest.raises(SnapshotQuarantined):
        activations.ask("activate", first, both[0])
    assert activations.pending() is None


def test_a_version_quarantined_while_it_is_staged_does_not_become_active(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first, _, third = store.versions("default")
    request = asked(activations, first, both[0])
    store.quarantine("default").add(first, "image/rows.npy", "damaged")
    for member in both:
        member.report(request.id, "staged")
    active, reason = ended(activations)
    assert (active, store.current("default")) == (False, third)
    assert "damaged" in reason


def test_a_rollback_goes_where_it_led_when_it_was_asked_for_or_nowhere(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    request = activations.ask("rollback", None, both[0])
    assert request is not None
    newest = write_snapshot(store, images=unit_vectors(10, 16, 9))  # a build, meanwhile
    for member in both:
        member.report(request.id, "staged")
    active, reason = ended(activations)
    assert (active, store.current("default")) == (False, newest)
    assert "moved meanwhile" in reason


@pytest.mark.parametrize("moved", [False, True])
def test_whatever_dies_in_between_one_of_the_two_versions_is_active(
    store: SnapshotStore, activations: Activations, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the pointer moves, and right after."""
    first, _, third = store.versions("default")
    member = activations.join(serves=True)
    request = asked(activations, first, member)
    member.report(request.id, "staged")
    step = "_end" if moved else "write_history"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Activations if moved else module, step, killed)
        with pytest.raises(KeyboardInterrupt):
            activations.settle()
    die(member)
    assert store.current("default") == (first if moved else third)
    other = activations.join(serves=True)  # the next service that starts
    last = activations.last()
    assert last is not None
    assert (last.active, last.reason) == (moved, GONE)
    assert activations.pending() is None
    assert store.current("default") == (first if moved else third)
    other.leave()


def test_a_process_that_is_killed_is_seen_to_be_gone(
    store: SnapshotStore, activations: Activations
) -> None:
    first, _, third = store.versions("default")
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, str(store.home), "staging"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        member = activations.join(serves=True)
        request = asked(activations, first, member)
        member.report(request.id, "staged")
        assert process.stdout.readline() == "told\n"
        activations.settle()
        assert store.current("default") == third
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert ended(activations) == (True, "")
    assert store.current("default") == first
    member.leave()


def test_what_the_dead_left_half_written_goes_when_another_joins(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    folder = store.folder("default") / FOLDER
    request = asked(activations, store.versions("default")[0], both[0])
    own = folder / f".{both[1].name}.json.{os.getpid()}-1.tmp"  # being written
    left = [".REQUEST.1-1.tmp", ".OUTCOME.1-1.tmp", "1-dead.json", ".1-dead.json.1-1.tmp"]
    for name in (own.name, *left):
        (folder / name).touch()
    activations.join(serves=True).leave()
    mine = {f"{member.name}{suffix}" for member in both for suffix in (".lock", ".json")}
    assert {path.name for path in folder.iterdir()} == {"REQUEST", own.name, *mine}
    assert activations.pending() == request


def test_a_command_alone_verifies_and_activates(
    store: SnapshotStore, activations: Activations
) -> None:
    first, second, third = store.versions("default")
    assert activate_now(activations, "activate", first) == Activated(first)
    assert store.history("default") == [second, third, first]
    assert activate_now(activations, "rollback") == Activated(third)
    assert activate_now(activations, "activate", third) == Activated(third, already=True)
    file = store.path("default", second) / "image/rows.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(SnapshotCorrupt):
        activate_now(activations, "activate", second)
    assert store.current("default") == third
    assert activations.pending() is None
    assert [path.name for path in (store.folder("default") / FOLDER).iterdir()] == ["OUTCOME"]


def test_a_command_waits_for_who_serves_and_says_how_many_do(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    first = store.versions("default")[0]
    waited: list[int] = []

    def serve() -> None:
        while (request := activations.pending()) is None:
            time.sleep(0.005)
        for member in both:
            member.report(request.id, "staged")
        while store.current("default") != first:
            time.sleep(0.005)
        for member in both:
            member.report(request.id, "serving")

    serving = threading.Thread(target=serve)
    serving.start()
    done = activate_now(activations, "activate", first, tell=waited.append)
    serving.join()
    assert done == Activated(first, processes=2, serving=2)
    assert waited == [2]


def test_canaries_that_nobody_can_try_are_not_passed_over(
    store: SnapshotStore, activations: Activations
) -> None:
    first, _, third = store.versions("default")
    canary = Canary(query="red", expected=["a"])
    with pytest.raises(SnapshotError, match="nobody serves the index"):
        activate_now(activations, "activate", first, canaries=[canary])
    assert store.current("default") == third


def test_a_damaged_request_is_named_and_moves_nothing(
    store: SnapshotStore, activations: Activations, both: tuple[Member, Member]
) -> None:
    (store.folder("default") / FOLDER / "REQUEST").write_text("{")
    for step in (activations.settle, activations.pending):
        with pytest.raises(SnapshotError, match=r"\.activation/REQUEST.*unreadable"):
            step()
    with pytest.raises(SnapshotError, match="unreadable"):
        activations.ask("activate", store.versions("default")[0], both[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"expected": ["a"]}, "needs one of query and id"),
        ({"query": "red", "id": "a", "expected": ["a"]}, "needs one of query and id"),
        ({"query": "red", "expected": []}, "expected: "),
        ({"query": "red", "expected": ["a", "b"], "k": 1}, "wants 2 of 2 expected ids among 1"),
        ({"query": "red", "expected": ["a", "a"], "at_least": 2}, "wants 2 of 1"),
        ({"query": "red", "expected": ["a"], "k": "3"}, "k: "),
        ({"query": "red", "expected": ["a"], "kk": 3}, "kk: "),
    ],
)
def test_a_wrong_canary_is_named_by_its_line(
    tmp_path: Path, line: dict[str, object], said: str
) -> None:
    file = tmp_path / "canary.jsonl"
    good = {"query": "red", "k": 3, "expected": ["a", "b"], "at_least": 1}
    file.write_text(f"{json.dumps(good)}\n\n{json.dumps(line)}\n")
    with pytest.raises(SnapshotError, match="line 3: ") as told:
        read_canaries(file)
    assert said in str(told.value)
    file.write_text(json.dumps(good))
    assert [canary.needed for canary in read_canaries(file)] == [1]
    assert read_canaries(tmp_path / "none.jsonl") == []

"""An index that those who serve every index don't serve yet: ready in all before any serves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hivlp.index.snapshot.activation import GONE, MOVED, Activations
from hivlp.index.snapshot.activation_files import FOLDER, Request
from hivlp.index.snapshot.members import Everywhere, Member, living_everywhere, member_name
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot
from tests.unit.index.test_activation import asked, die, ended

NAMES = ("7-one", "8-two")


@dataclass(frozen=True, slots=True)
class Scene:
    """An index of two versions, of which the last is active, that two processes are to serve."""

    store: SnapshotStore
    activations: Activations
    present: tuple[Everywhere, Everywhere]

    @property
    def active(self) -> str:
        return self.store.current("default")

    def join(self, name: str, *, new: bool = True) -> Member:
        return self.activations.join(serves=True, name=name, new=new)

    def states(self, request: Request) -> dict[int, str]:
        return {report.pid: report.state for report in self.activations.reports(request)}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    store = SnapshotStore(tmp_path)
    for seed in range(2):
        write_snapshot(store, images=unit_vectors(10, 16, seed))
    present = Everywhere(store.root, NAMES[0]), Everywhere(store.root, NAMES[1])
    yield Scene(store, Activations(store, "default"), present)
    living = living_everywhere(store.root)
    for name, one in zip(NAMES, present, strict=True):
        if name in living:
            one.leave()


def test_one_that_has_not_found_the_index_yet_is_waited_for(scene: Scene) -> None:
    one = scene.join(NAMES[0])
    request = asked(scene.activations, scene.active, one)
    assert (request.previous, request.moves, request.served) == (scene.active, False, False)
    one.report(request.id, "staged")
    scene.activations.note_verified(request)
    scene.activations.settle()
    assert scene.activations.pending() is not None
    assert scene.states(request) == {os.getpid(): "staged", 8: "staging"}
    two = scene.join(NAMES[1])
    two.report(request.id, "staged")
    assert ended(scene.activations) == (True, "")
    assert scene.store.history("default") == scene.store.versions("default")
    for member in (one, two):
        member.leave()


@pytest.mark.parametrize("leaves", [False, True])
def test_one_that_is_gone_before_it_found_the_index_holds_nothing_up(
    scene: Scene, leaves: bool
) -> None:
    one = scene.join(NAMES[0])
    request = asked(scene.activations, scene.active, one)
    one.report(request.id, "staged")
    if leaves:
        scene.present[1].leave()
    else:
        os.close(scene.present[1]._lock)
    assert ended(scene.activations) == (True, "")
    assert living_everywhere(scene.store.root) == [NAMES[0]]
    one.leave()
    other = Everywhere(scene.store.root, member_name())  # tidies
    assert len(list((scene.store.root / FOLDER).iterdir())) == 2
    other.leave()


def test_what_is_active_is_asked_for_only_while_some_are_to_serve_it_and_do_not(
    scene: Scene,
) -> None:
    one, two = scene.join(NAMES[0], new=False), scene.join(NAMES[1])
    request = asked(scene.activations, scene.active, one)
    one.report(request.id, "serving")  # it does already
    two.report(request.id, "staged")
    assert ended(scene.activations) == (True, "")
    two.begin()
    assert scene.activations.ask("activate", scene.active, one) is None
    for member in (one, two):
        member.leave()


def test_a_pointer_that_moves_meanwhile_is_not_moved_back(scene: Scene) -> None:
    one, two = scene.join(NAMES[0]), scene.join(NAMES[1])
    request = asked(scene.activations, scene.active, one)
    later = write_snapshot(scene.store, images=unit_vectors(10, 16, 9))
    for member in (one, two):
        member.report(request.id, "staged")
    assert ended(scene.activations) == (False, MOVED)
    assert scene.active == later
    for member in (one, two):
        member.leave()


def test_when_all_are_gone_it_was_not_taken_up(scene: Scene) -> None:
    one = scene.join(NAMES[0])
    asked(scene.activations, scene.active, one)
    die(one)
    for present in scene.present:
        os.close(present._lock)
    command = scene.activations.join(serves=False)
    last = scene.activations.last()
    assert last is not None
    assert (last.active, last.reason) == (False, GONE)
    assert scene.activations.taken_up(but="") is None
    command.leave()
    later = scene.join(NAMES[0], new=False)  # begun beside nobody: it serves what is active
    assert scene.activations.taken_up(but=NAMES[1]) is True
    assert scene.activations.ask("activate", scene.active, later) is None
    later.leave()


def test_whoever_comes_later_serves_what_the_others_do_and_nothing_else(scene: Scene) -> None:
    taken_up = scene.activations.taken_up
    assert taken_up(but="") is False  # found by nobody
    one, two = scene.join(NAMES[0]), scene.join(NAMES[1])
    assert taken_up(but="") is False
    request = asked(scene.activations, scene.active, one)
    one.report(request.id, "staged")
    assert taken_up(but="") is False
    two.report(request.id, "staged")
    assert ended(scene.activations) == (True, "")
    assert taken_up(but="") is True  # they are about to
    one.begin()
    assert taken_up(but=NAMES[1]) is True
    failed = asked(scene.activations, scene.store.versions("default")[0], one)
    two.report(failed.id, "failed", "no memory")
    assert ended(scene.activations) == (False, "no memory")
    assert taken_up(but="") is True  # another version of it
    scene.present[0].leave()
    one.leave()
    assert taken_up(but="") is False
    scene.present[1].leave()
    two.leave()
    assert taken_up(but="") is None


def test_how_it_ended_in_an_earlier_life_does_not_make_those_who_live_serve_it(
    scene: Scene,
) -> None:
    one, two = scene.join(NAMES[0]), scene.join(NAMES[1])
    request = asked(scene.activations, scene.active, one)
    for member in (one, two):
        member.report(request.id, "staged")
    assert ended(scene.activations) == (True, "")
    for member in (one, two):
        member.begin()
        die(member)
    for present in scene.present:
        os.close(present._lock)
    assert scene.activations.taken_up(but="") is None
    third, fourth = scene.join("9-three"), scene.join("10-four")  # both left it out
    assert scene.activations.taken_up(but=third.name) is False
    assert scene.activations.taken_up(but=fourth.name) is False
    command = scene.activations.join(serves=False)
    command.report(request.id, "staged")  # it serves nothing
    assert scene.activations.taken_up(but=third.name) is False
    for member in (third, fourth, command):
        member.leave()


def test_a_request_tells_whether_anybody_served_the_index_when_it_was_asked(
    scene: Scene,
) -> None:
    one, two = scene.join(NAMES[0]), scene.join(NAMES[1])
    first = scene.store.versions("default")[0]
    begun = asked(scene.activations, first, one)
    assert (begun.moves, begun.served) == (True, False)
    scene.activations.drop(begun, "for this test")
    two.begin()
    assert asked(scene.activations, first, one).served
    older = begun.model_dump()
    del older["served"]  # of a version of this program that didn't tell
    assert Request.model_validate(older).served
    for member in (one, two):
        member.leave()

"""What else happens while a version is activated: a verifier dies, or the pointer moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.activation import MAX_LOSSES, UNVERIFIED, Activations
from hivlp.index.snapshot.activation_files import FOLDER, Canary, Kind, Request
from hivlp.index.snapshot.amend import hold
from hivlp.index.snapshot.erasures import add_erased, short_hash
from hivlp.index.snapshot.members import Member
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot
from tests.unit.index.test_activation import asked, die, ended


@dataclass(frozen=True, slots=True)
class Scene:
    """An index of three versions, of which the last is active, and two that serve it."""

    store: SnapshotStore
    activations: Activations
    members: tuple[Member, Member]

    @property
    def active(self) -> str:
        return self.store.current("default")

    def build(self, seed: int) -> str:
        return write_snapshot(self.store, images=unit_vectors(10, 16, seed))

    def done(self, kind: Kind, version: str | None, key: str = "") -> Request:
        """A request that came to its end."""
        request = self.activations.ask(kind, version, self.members[0], key=key)
        assert request is not None
        for member in self.members:
            member.report(request.id, "staged")
        assert ended(self.activations) == (True, "")
        return request


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    store = SnapshotStore(tmp_path)
    activations = Activations(store, "default")
    for seed in range(3):
        write_snapshot(store, images=unit_vectors(10, 16, seed))
    members = activations.join(serves=True), activations.join(serves=True)
    yield Scene(store, activations, members)
    for member in members:
        if (activations._path / f"{member.name}.lock").exists():
            member.leave()


def one_id(scene: Scene, version: str) -> str:
    """Of an item that the version has."""
    table = hold(scene.store, "default", version).catalogue.table
    return str(table.column("id")[0].as_py())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_version_that_nobody_verified_does_not_become_active(scene: Scene, leaves: bool) -> None:
    first, _, third = scene.store.versions("default")
    verifier, other = scene.members
    request = asked(scene.activations, first, verifier)
    verifier.report(request.id, "staging")
    other.report(request.id, "staged")
    if leaves:
        verifier.leave()
    else:
        die(verifier)
    assert ended(scene.activations) == (False, UNVERIFIED)
    assert scene.active == third


def test_a_verifier_that_dies_once_it_is_done_holds_nothing_up(scene: Scene) -> None:
    first = scene.store.versions("default")[0]
    verifier, other = scene.members
    request = asked(scene.activations, first, verifier)
    scene.activations.note_verified(request)
    die(verifier)
    other.report(request.id, "staged")
    assert ended(scene.activations) == (True, "")
    assert scene.active == first


def test_the_same_key_does_not_make_another_request_the_one_before(scene: Scene) -> None:
    """As a proxy's, or a user's, that names all its requests alike."""
    first, second, third = scene.store.versions("default")
    scene.done("activate", first, "k")
    scene.done("activate", second, "k")
    scene.done("rollback", None, "k")
    assert scene.active == first
    scene.done("activate", third, "k")
    scene.done("activate", first, "k")
    assert scene.active == first


def test_a_rollback_with_the_same_key_is_done_once_more_when_the_pointer_has_moved_since(
    scene: Scene,
) -> None:
    _, second, _ = scene.store.versions("default")
    request = scene.done("rollback", None, "k")
    assert scene.active == second
    assert scene.activations.ask("rollback", None, scene.members[1], key="k") == request
    scene.build(9)
    assert scene.done("rollback", None, "k") != request
    assert scene.active == second


def test_what_is_asked_for_because_of_a_version_is_refused_when_another_is_active(
    scene: Scene,
) -> None:
    first, _, third = scene.store.versions("default")
    newest = scene.build(9)
    with pytest.raises(SnapshotError, match=f"is active by now, not {third}"):
        scene.activations.ask("rollback", None, scene.members[0], expected=third)
    assert scene.activations.pending() is None
    request = asked(scene.activations, first, scene.members[0], expected=newest)
    assert request.previous == newest


def test_a_version_with_items_that_were_erased_since_is_not_asked_for(scene: Scene) -> None:
    first, second, third = scene.store.versions("default")
    add_erased(scene.store.folder("default"), [short_hash(one_id(scene, first))], time.time_ns())
    for kind, version in (("activate", first), ("rollback", None)):
        with pytest.raises(SnapshotError, match="items in it were erased"):
            scene.activations.ask(kind, version, scene.members[0])  # type: ignore[arg-type]
    assert (scene.active, scene.activations.pending()) == (third, None)
    newest = scene.build(9)  # the item was put again: it may be rolled back to
    scene.build(10)
    scene.done("activate", newest)
    assert scene.store.history("default")[:2] == [first, second]


@pytest.mark.parametrize("noticed", [False, True])
def test_a_version_whose_items_are_erased_while_it_is_staged_does_not_become_active(
    scene: Scene, noticed: bool
) -> None:
    first, _, third = scene.store.versions("default")
    asked(scene.activations, first, scene.members[0])
    add_erased(scene.store.folder("default"), [short_hash(one_id(scene, first))], time.time_ns())
    if noticed:  # by the erasure itself
        scene.activations.drop_erased()
        assert scene.activations.pending() is None
    else:
        request = scene.activations.pending()
        assert request is not None
        for member in scene.members:
            member.report(request.id, "staged")
        scene.activations.settle()
    last = scene.activations.last()
    assert last is not None
    assert (last.active, scene.active) == (False, third)
    assert "items in it were erased" in last.reason


def test_canaries_lie_beside_the_request_as_long_as_it_is_under_way(scene: Scene) -> None:
    """Every member reads the request at every look, and need not parse them each time."""
    first, second, _ = scene.store.versions("default")
    folder = scene.store.folder("default") / FOLDER
    canary = Canary(query="red", expected=["a"])
    request = asked(scene.activations, first, scene.members[0], canaries=[canary] * 1_000)
    assert "red" not in (folder / "REQUEST").read_text()
    scene.activations.join(serves=True).leave()  # and tidies
    assert list(scene.activations.canaries(request)) == [canary] * 1_000
    scene.activations.drop(request, "for this test")
    assert not (folder / "CANARIES").exists()
    asked(scene.activations, second, scene.members[0], canaries=[])
    with pytest.raises(SnapshotError, match="has ended"):
        scene.activations.canaries(request)


@pytest.mark.parametrize("how", ["looks", "joins"])
def test_a_death_is_counted_whoever_notices_it_first(scene: Scene, how: str) -> None:
    """As another process that takes the place of the dead one does, or who asks how far it is."""
    request = asked(scene.activations, scene.store.versions("default")[0], scene.members[0])
    for _ in range(MAX_LOSSES):
        other = scene.activations.join(serves=True)
        other.report(request.id, "staging")
        die(other)
        if how == "looks":
            assert len(scene.activations.reports(request)) == 2
        else:
            scene.activations.join(serves=True).leave()
    assert ended(scene.activations) == (False, "2 processes died while they staged it")

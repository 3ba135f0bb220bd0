"""Indexes that are new to a process: asked for, begun, left alone, and what goes wrong at it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.errors import ActivationUnderWay
from hivlp.index.snapshot.activation import GONE, UNVERIFIED, Activations
from hivlp.index.snapshot.activation_files import FOLDER, Request
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.errors import NotWritable
from hivlp.service.metrics import Metrics
from hivlp.service.newcomers import Newcomers
from hivlp.service.serving import Catalogue, Live, NoModel, ServedVersion
from hivlp.service.settings import Settings
from hivlp.service.staging import Stager
from hivlp.service.swap import Swapper
from tests.fakes import unit_vectors, write_snapshot
from tests.unit.service.fakes_service import FakeSearcher

NEW = "art"
MODEL = NoModel("fake", "a" * 64, "b" * 64)


def nothing() -> None:
    """What happens where nothing does."""


class Interrupted(Stager):
    """Something happens right before each ask."""

    before: Callable[[], None] = staticmethod(nothing)

    def ask(self, *given: Any, **more: Any) -> Request | None:
        self.before()
        return super().ask(*given, **more)


class Opening:
    """Opens fakes of what is in a store."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.opened: list[FakeSearcher] = []

    def open(self, name: str, version: str | None = None, like: Any = None) -> ServedVersion:
        searcher = FakeSearcher()
        known = version or self.store.current(name)
        searcher.info = replace(searcher.info, index=name, version=known)
        self.opened.append(searcher)
        return ServedVersion(searcher, MODEL, close_with=searcher.close)

    def make_ready(self, served: ServedVersion) -> None:
        pass


class Process:
    """One process that serves every index, without its tasks: a test says when they look."""

    def __init__(self, store: SnapshotStore, left_out: frozenset[str] = frozenset()) -> None:
        settings = Settings(home=store.home)
        self.source = Opening(store)
        self.catalogue = Catalogue({}, store, self.source, left_out)
        given = self.catalogue, self.source
        self.swapper = Swapper(*given, Metrics(), lambda _: None, settings.changes.poll_s)
        self.stager = Interrupted(*given, self.swapper, settings, Metrics())
        self.stager.join()
        self.prepare: Callable[[], None] = nothing
        self.newcomers = Newcomers(*given, self.swapper, self.stager, settings, self._prepare)
        self.lives = True

    def _prepare(self, _: str, __: Live) -> None:
        self.prepare()

    def look(self) -> None:
        """See once to what is new."""
        with ThreadPoolExecutor(1) as thread:
            asyncio.run(self.newcomers.look(thread))

    def work(self) -> None:
        """Stage what is asked for, and flip to what was settled."""
        for name in list(self.stager._members):
            request = self.stager._asked(name)
            if request is not None:
                self.stager._stage(name, request)
            self.stager._look(name)

    def serves(self) -> bool:
        return NEW in self.catalogue.indexes

    def die(self) -> None:
        """As the system ends it: its locks end, its files stay."""
        assert self.stager._everywhere is not None
        for held in (self.stager._everywhere, *self.stager._members.values()):
            os.close(held._lock)
        self.lives = False


def all_work(*processes: Process) -> None:
    """Both phases."""
    for _ in range(2):
        for process in processes:
            process.work()


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """An index with one version, which is active."""
    store = SnapshotStore(tmp_path)
    write_snapshot(store, NEW, images=unit_vectors(10, 16))
    return store


@pytest.fixture
def activations(store: SnapshotStore) -> Activations:
    return Activations(store, NEW)


Begin = Callable[..., Process]


@pytest.fixture
def begin(store: SnapshotStore) -> Iterator[Begin]:
    """Begins processes, which leave in the end."""
    with ExitStack() as leaving:

        def process(**more: Any) -> Process:
            one = Process(store, **more)
            leaving.callback(lambda: one.stager.leave() if one.lives else None)
            return one

        yield process


def test_one_that_could_not_join_serves_nothing_alone_and_joins_at_a_later_look(
    store: SnapshotStore, begin: Begin
) -> None:
    one, two = begin(), begin()
    in_the_way = store.folder(NEW) / FOLDER
    in_the_way.touch()
    for _ in range(2):
        one.look()
        one.work()
    assert not one.serves()
    assert one.source.opened == []
    in_the_way.unlink()
    for process in (one, two):
        process.look()
    all_work(one, two)
    assert [one.serves(), two.serves()] == [True, True]


@pytest.mark.parametrize("error", [NotWritable("no room"), ActivationUnderWay(NEW, "another")])
def test_an_ask_that_failed_is_made_again(
    activations: Activations, begin: Begin, error: Exception
) -> None:
    def fails() -> None:
        raise error

    one = begin()
    one.stager.before = fails
    one.look()
    assert activations.pending() is None
    one.stager.before = nothing
    one.look()
    assert activations.pending() is not None
    one.work()
    assert one.serves()


def test_when_another_asked_just_before_and_died_of_it_it_is_asked_for_again(
    store: SnapshotStore, activations: Activations, begin: Begin
) -> None:
    one, two = begin(), begin()
    two.stager.admit(NEW)
    one.stager.before = lambda: two.stager.ask("activate", NEW, store.current(NEW)) and None
    one.look()
    others = activations.pending()
    assert others is not None
    assert not one.stager.asked(NEW, others)
    two.die()
    one.stager.before = nothing
    one.work()
    last = activations.last()
    assert last is not None
    assert (last.active, last.reason) == (False, UNVERIFIED)
    one.look()
    one.work()
    assert one.serves()


def test_what_failed_here_is_asked_for_once(
    store: SnapshotStore, activations: Activations, begin: Begin
) -> None:
    (store.folder(NEW) / "canary.jsonl").write_text("no canary\n")
    one, two = begin(), begin()
    asked = set()
    for _ in range(3):
        for process in (one, two):
            process.look()
        all_work(one, two)
        last = activations.last()
        assert last is not None
        assert not last.active
        asked.add(last.request.id)
    assert len(asked) == 1
    assert not one.serves()


def test_what_is_staged_and_can_not_begin_stays_open_and_begins_at_a_later_look(
    begin: Begin,
) -> None:
    def fails() -> None:
        raise OSError("no room")

    one = begin()
    one.prepare = fails
    one.look()
    all_work(one)
    (searcher,) = one.source.opened
    assert not one.serves()
    one.prepare = nothing
    one.look()
    one.work()
    assert one.serves()
    assert one.source.opened == [searcher]
    assert not searcher.closed


def test_what_was_loaded_and_can_not_begin_is_closed(begin: Begin) -> None:
    def fails() -> None:
        raise OSError("no room")

    one = begin()
    one.prepare = fails
    one.swapper.follow(NEW)
    assert not one.serves()
    assert [searcher.closed for searcher in one.source.opened] == [True]
    assert "no room" in str(one.swapper.trouble(NEW))
    one.prepare = nothing
    one.swapper.load(NEW)
    assert one.serves()
    assert [searcher.closed for searcher in one.source.opened] == [True, False]


def test_what_all_left_out_is_not_taken_for_served_by_how_it_ended_in_an_earlier_life(
    activations: Activations, begin: Begin
) -> None:
    before = begin()
    before.look()
    before.work()
    assert before.serves()
    before.die()
    left_out = begin(left_out=frozenset({NEW})), begin(left_out=frozenset({NEW}))
    for _ in range(2):
        for process in left_out:
            process.look()
            process.work()
    assert activations.pending() is None
    assert [process.source.opened for process in left_out] == [[], []]
    third = begin()  # knows nothing of what they found, and has no more say than they
    third.look()
    assert activations.pending() is not None
    all_work(*left_out, third)
    assert all(process.serves() for process in (*left_out, third))


def test_while_it_is_about_to_begin_nobody_asks_again(
    store: SnapshotStore, activations: Activations, begin: Begin
) -> None:
    """A command asked, so this process doesn't know by itself."""
    one = begin()
    one.stager.admit(NEW)
    command = activations.join(serves=False)
    asked = activations.ask("activate", store.current(NEW), command)
    assert asked is not None
    command.report(asked.id, "staged")
    activations.note_verified(asked)
    request = one.stager._asked(NEW)
    assert request is not None
    one.stager._stage(NEW, request)
    activations.settle()
    one.look()
    assert activations.pending() is None
    one.work()
    assert one.serves()
    command.leave()


def test_when_all_that_were_at_it_are_gone_one_that_begins_later_asks_again(
    activations: Activations, begin: Begin
) -> None:
    gone = begin()
    gone.look()
    gone.die()
    activations.join(serves=False).leave()
    last = activations.last()
    assert last is not None
    assert (last.active, last.reason) == (False, GONE)
    later = begin()
    later.look()
    later.work()
    assert later.serves()

"""What is killed: a table of operations on a store, and the process that runs one until it dies.

Another operation is another entry of `OPERATIONS`: it is then killed at random moments and before
each of its changes to the disk, and what it leaves is checked as for all others.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.upsert_corpus import upsert_corpus
from hivlp.index.cascade import PlanRequest
from hivlp.index.plans import run_plan
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.activation import Activations
from hivlp.index.snapshot.activation_files import Kind
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete
from hivlp.index.snapshot.manifest import MANIFEST_NAME, write_manifest
from hivlp.index.snapshot.pull import pull, push
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

NAME = "default"
QUIET = BuildSettings(quiet=True, sample=20)
CHANGES = frozenset({"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"})
"""Audit events of Python that change a folder; opening to write is one more."""
BY_FOLDER = frozenset({"os.remove", "os.rmdir"})
"""Those that removing a tree names by a folder's descriptor and a name in it."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Operation:
    """`run` is killed; `prepare` comes before it, in a copy of the template.

    `again`: whoever runs it once more afterwards, by hand say, sees it end well.
    """

    run: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda root: None
    again: bool = True


def make_template(root: Path) -> Path:
    """A model, a corpus, a store of two versions, and a bucket whose newest version it lacks."""
    pictures = root / "corpus"
    pictures.mkdir(parents=True)
    for name in COLOURS:
        _draw(pictures, name)
    make_tiny_artifact(root / "home" / "artifacts" / "tiny")
    for _ in range(2):
        build(root)
    elsewhere = root.with_name("elsewhere")
    shutil.copytree(root, elsewhere)
    _draw(elsewhere / "corpus", "green", 9)  # so that there is something to fetch
    build(elsewhere)
    push(store_of(elsewhere), str(root / "bucket"), NAME, quiet=True)
    return root


def _draw(folder: Path, name: str, shade: int = 0) -> None:
    pixels = tuple(max(0, part - shade) for part in COLOURS[name])
    (folder / f"{name}-{shade}.png").write_bytes(png(solid(pixels)))  # type: ignore[arg-type]
    (folder / f"{name}-{shade}.txt").write_text(f"a {name} square\n")


def store_of(root: Path) -> SnapshotStore:
    return SnapshotStore(root / "home")


def model_of(root: Path) -> Model:
    return Model.load(root / "home" / "artifacts" / "tiny")


def build(root: Path) -> str:
    """Build a version; returns it."""
    corpus = open_corpus(root / "corpus")
    return build_index(corpus, model_of(root), store_of(root), NAME, QUIET).manifest.version


def search(root: Path, colour: str) -> str:
    """The item that the active version finds first for a colour."""
    store, model = store_of(root), model_of(root)
    snapshot = store.open(NAME)
    searcher = open_searcher(snapshot)
    plan = searcher.plan(PlanRequest("image", "text", 1, "cascade"))
    assert model.text is not None
    outputs = query_outputs(model.text, model.text.prepare([f"a {colour} square"]))
    (found,) = run_plan(searcher, "image", plan, outputs)
    (item,) = searcher.items("image", found, 1, 0)
    snapshot.close()
    return item.id


def _publish(root: Path, *, shared: bool) -> None:
    """The active version once more: copied and appended, or linked and in its place."""
    store = store_of(root)
    active = store.current(NAME)
    manifest, folder = store.manifest(NAME, active), store.path(NAME, active)
    with store.stage(NAME) as staging:
        links = None
        if shared:
            links = share_files(folder, staging.path, manifest.files)
        else:
            ignored = shutil.ignore_patterns(MANIFEST_NAME)
            shutil.copytree(folder, staging.path, dirs_exist_ok=True, ignore=ignored)
        write_manifest(staging.path, manifest.model_copy(update={"version": staging.version}))
        expected = active if shared else None
        store.publish(staging, shared=links, supersede=shared, expected=expected)
    if shared:
        store.remove(NAME, active)


def _first(root: Path) -> str:
    return store_of(root).versions(NAME)[0]


def _leave(root: Path) -> None:
    """Leftovers for gc to find."""
    for kind in ("building", "removing", "pulling"):
        folder = store_of(root).folder(NAME) / f".{kind}-20200101T000000-000000"
        shutil.copytree(store_of(root).path(NAME, _first(root)), folder)


def _gc(root: Path) -> None:
    store_of(root).gc(NAME, keep=1, older_than=timedelta(0))


def _in_two_phases(root: Path, kind: Kind, version: str | None) -> None:
    """As a process that serves does it; nobody else does."""
    activations = Activations(store_of(root), NAME)
    member = activations.join(serves=True)
    request = activations.ask(kind, version, member)
    if request is not None:
        member.report(request.id, "staging")
        member.report(request.id, "staged")
        activations.settle()
        member.report(request.id, "serving")
    member.leave()


def _upsert(root: Path) -> None:
    corpus = open_corpus(root / "more")
    upsert_corpus(corpus, model_of(root), store_of(root), NAME, quiet=True)


def _more(root: Path) -> None:
    """Items to put, of which one replaces one of the corpus."""
    (root / "more").mkdir(exist_ok=True)
    _draw(root / "more", "red", 5)
    _draw(root / "more", "blue", 5)
    _draw(root / "more", "green", 0)


def _changed(root: Path) -> None:
    """Changes that wait already, and new ones to make."""
    _more(root)
    _upsert(root)
    _draw(root / "more", "black", 0)


OPERATIONS = {
    "build": Operation(build, lambda root: _draw(root / "corpus", "red", 9)),
    "publish": Operation(lambda root: _publish(root, shared=False)),
    "supersede": Operation(lambda root: _publish(root, shared=True)),
    "activate": Operation(lambda root: store_of(root).activate(NAME, _first(root))),
    "rollback": Operation(lambda root: store_of(root).rollback(NAME), again=False),
    "activate in two phases": Operation(
        lambda root: _in_two_phases(root, "activate", _first(root))
    ),
    "rollback in two phases": Operation(
        lambda root: _in_two_phases(root, "rollback", None), again=False
    ),
    "quarantine": Operation(
        lambda root: store_of(root).quarantine(NAME).add(_first(root), "image/rows.npy", "a test")
    ),
    "gc": Operation(_gc, _leave),
    "upsert": Operation(_upsert, _more),
    "upsert again": Operation(_upsert, _changed),
    "delete": Operation(lambda root: amend(store_of(root), NAME, [Delete("red-0.png")])),
    "fold": Operation(build, _changed),
    "erase": Operation(
        lambda root: erase(store_of(root), NAME, ["red-5.png", "red-0.png"], wait_s=0, quiet=True),
        _changed,
    ),
    "remove": Operation(lambda root: store_of(root).remove(NAME, _first(root)), again=False),
    "pull": Operation(lambda root: pull(store_of(root), str(root / "bucket"), NAME, quiet=True)),
    "push": Operation(lambda root: push(store_of(root), str(root / "bucket"), NAME, quiet=True)),
}


def child(root: Path, name: str, last: int | None, pipe: Connection) -> None:
    """Run an operation, in a process of its own; with `last`, die before its change number `last`.

    Sends one word when it begins and the number of changes when it ends.
    """
    changes = [0]

    def count(event: str, given: tuple[Any, ...]) -> None:
        if event not in CHANGES and not (event == "open" and given[2] & WRITING):
            return
        inside = event in BY_FOLDER and given[-1] >= 0
        if not inside and str(root) not in f"{given}":
            return
        changes[0] += 1
        if changes[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    pipe.send("began")
    sys.addaudithook(count)  # never taken off again: for a process that is about to end only
    OPERATIONS[name].run(root)
    pipe.send(changes[0])

"""kill -9 at random moments and before each change to the disk: the store opens every time.

Afterwards the active version is whole and is searched, every published version is whole, a new
build ends well, and nothing is left lying about. `make kills` runs 50 rounds and every change.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hivlp.index.snapshot.activation_files import FOLDER as ACTIVATION
from hivlp.index.snapshot.amend import LOCK as TURN
from hivlp.index.snapshot.names import ERASED, LOCK, POINTER, QUARANTINE
from hivlp.index.snapshot.pull import pull
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import FOLDER as UPLOADS
from tests.faults.kill_operations import (
    NAME,
    OPERATIONS,
    build,
    child,
    make_template,
    search,
    store_of,
)

ROUNDS = int(os.environ.get("HIVLP_KILL_ROUNDS") or 5)
SPREAD = 6
"""Of an operation's changes, so many are tried where not all are."""
SURE_S = 0.05
"""A machine under load may be late for a shorter operation every time."""
KILLED = -9
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("kills") / "template")


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Iterator[Path]:
    """Where each round's copy of the template lies."""
    yield tmp_path / "round"
    shutil.rmtree(tmp_path / "round", ignore_errors=True)


def prepare(template: Path, root: Path, name: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    OPERATIONS[name].prepare(root)


def run(
    root: Path, name: str, *, kill_after_s: float | None = None, last: int | None = None
) -> tuple[int | None, int, float]:
    """Run an operation in a process; its exit code, its changes where it ended, and its seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.kill_operations"])
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(root, name, last, theirs))
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    assert ours.recv() == "began"
    began = time.perf_counter()
    process.join(PATIENCE_S if kill_after_s is None else kill_after_s)
    process.kill()
    process.join(PATIENCE_S)
    seconds = time.perf_counter() - began
    try:
        changes = ours.recv() if ours.poll() else 0
    except EOFError:
        changes = 0
    ours.close()
    return process.exitcode, changes, seconds


def state(root: Path, before: tuple[list[str], list[str]]) -> str:
    """How far it had come, in words."""
    store = store_of(root)
    entries = (path.name for path in store.folder(NAME).iterdir())
    dotted = (e.partition("-")[0] for e in entries if e.startswith(".") and e not in (LOCK, TURN))
    hidden = sorted({e.rstrip(".0123456789") for e in dotted})
    moved = ["pointer moved"] if store.history(NAME) != before[1] else []
    new = ["version there"] if set(store.versions(NAME)) - set(before[0]) else []
    gone = ["version gone"] if set(before[0]) - set(store.versions(NAME)) else []
    return ", ".join([*hidden, *new, *gone, *moved]) or "as before"


def check_whole(root: Path, before: tuple[list[str], list[str]]) -> None:
    """What is active and what is published is whole, nothing is in use, and it is searched."""
    store = store_of(root)
    versions, history = before
    now = store.history(NAME)
    assert now[-1] in store.versions(NAME)
    new = set(store.versions(NAME)) - set(versions)
    assert len(new) <= 1
    assert now[-1] in {*history, *new}
    for version in store.versions(NAME):
        store.open(NAME, version).close()
        assert not store.in_use(NAME, version)
    assert search(root, "blue").startswith("blue")
    store.quarantine(NAME).entries()


def check_goes_on(root: Path) -> None:
    """A build and a pull end well, and then nothing lies about."""
    store = store_of(root)
    built = build(root)
    assert store.current(NAME) == built
    store.verify(NAME)
    assert search(root, "yellow").startswith("yellow")
    store.gc(NAME)
    entries = {path.name for path in store.folder(NAME).iterdir()}
    beside = {QUARANTINE, ERASED, UPLOADS, TURN, ACTIVATION}
    assert entries - beside == {LOCK, POINTER, *store.versions(NAME)}
    pulled = pull(SnapshotStore(root / "puller"), str(root / "bucket"), NAME, quiet=True)
    assert pulled.active


def attempt(template: Path, root: Path, name: str, **how: float | int) -> tuple[int | None, str]:
    """One kill and the checks after it; how it ended and how far it had come."""
    prepare(template, root, name)
    before = (store_of(root).versions(NAME), store_of(root).history(NAME))
    code, _, _ = run(root, name, **how)  # type: ignore[arg-type]
    reached = state(root, before)
    check_whole(root, before)
    if OPERATIONS[name].again:
        OPERATIONS[name].run(root)
    check_goes_on(root)
    return code, reached


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_at_a_random_moment_leaves_a_store_that_opens(
    template: Path, root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = []
    for _ in range(3):  # the first of a process's kind reads its code from the disk
        prepare(template, root, name)
        code, changes, seconds = run(root, name)
        assert code == 0
        assert changes > 0
        lengths.append(seconds)
    usual = statistics.median(lengths)
    rng = random.Random(f"{name} {ROUNDS}")
    found: Counter[str] = Counter()
    killed = 0
    for number in range(ROUNDS):
        # One moment in each of as many equal parts of the operation.
        moment = (number + rng.random()) / ROUNDS * usual
        code, reached = attempt(template, root, name, kill_after_s=moment)
        assert code in (0, KILLED)
        killed += code == KILLED
        found[reached] += 1
    if usual > SURE_S:
        assert killed, f"none of {ROUNDS} rounds came before the end"
    with capsys.disabled():
        states = "; ".join(f"{count} {reached}" for reached, count in found.most_common())
        print(f"\n{name}: {killed} of {ROUNDS} killed within {usual:.3f} s: {states}")


def changes_of(template: Path, root: Path, name: str) -> int:
    prepare(template, root, name)
    code, changes, _ = run(root, name)
    assert code == 0
    return changes


def die_before(template: Path, root: Path, name: str, change: int) -> str:
    code, reached = attempt(template, root, name, last=change)
    assert code == KILLED
    return reached


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_before_some_of_its_changes_leaves_a_store_that_opens(
    template: Path, root: Path, name: str
) -> None:
    total = changes_of(template, root, name)
    step = max(1, total // SPREAD)
    for change in {*range(1, total + 1, step), total}:  # the last ones are the pointer's
        die_before(template, root, name, change)


@pytest.mark.slow
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_before_each_of_its_changes_leaves_a_store_that_opens(
    template: Path, root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    total = changes_of(template, root, name)
    found = Counter(die_before(template, root, name, change) for change in range(1, total + 1))
    with capsys.disabled():
        states = "; ".join(f"{count} {reached}" for reached, count in found.most_common())
        print(f"\n{name}: killed before each of {total} changes: {states}")

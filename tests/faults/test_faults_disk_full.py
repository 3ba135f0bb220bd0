"""A disk that fills up while a version is made: an error, nothing half there, the old one served.

With a real small file system where mounting is permitted, and everywhere by a limit on the size of
files: what is written beyond it fails as it would on a full disk.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hivlp.index.errors import BuildError, NoRoom
from hivlp.index.snapshot.amend import LOCK as TURN
from hivlp.index.snapshot.manifest import MANIFEST_NAME
from hivlp.index.snapshot.names import LOCK, POINTER
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import FOLDER as UPLOADS
from tests.faults.kill_operations import NAME, OPERATIONS, build, make_template, search, store_of
from tests.faults.mounts import remount, tmpfs

BUSY = ("build", "publish", "pull")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("full") / "template")


def check(root: Path, before: tuple[list[str], list[str]]) -> None:
    """Nothing changed, the active version is whole, and with room again a build ends well."""
    store = store_of(root)
    assert (store.versions(NAME), store.history(NAME)) == before
    store.verify(NAME)
    assert search(root, "red").startswith("red")


def check_after_room(root: Path) -> None:
    store = store_of(root)
    assert build(root) == store.current(NAME)
    store.gc(NAME)
    entries = {path.name for path in store.folder(NAME).iterdir()} - {TURN, UPLOADS}
    assert entries == {LOCK, POINTER, *store.versions(NAME)}


def _limited(root: Path, name: str, limit: int, pipe: Connection) -> None:
    """Run an operation while no file may grow beyond `limit`; sends what went wrong, or nothing."""
    # Python ignores SIGXFSZ, so that a write beyond the limit is an OSError (EFBIG).
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        OPERATIONS[name].run(root)
    except (BuildError, OSError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("")


def run_limited(root: Path, name: str, limit: int) -> str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.kill_operations"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_limited, args=(root, name, limit, theirs))
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    try:
        said = str(ours.recv())
    finally:
        process.join(PATIENCE_S)
        ours.close()
    assert process.exitcode == 0
    return said


def sizes_written(root: Path) -> list[int]:
    """Sizes of the files of a version, without equals, the smallest first.

    A manifest of another version has some digits more or less: it counts as a tenth smaller.
    """
    folder = store_of(root).path(NAME, store_of(root).current(NAME))
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    sizes[folder / MANIFEST_NAME] = sizes[folder / MANIFEST_NAME] * 9 // 10
    return sorted(set(sizes.values()))


@pytest.mark.parametrize("name", BUSY)
def test_a_file_that_cant_grow_fails_the_operation_and_changes_nothing(
    template: Path, tmp_path: Path, name: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(template, root)
    OPERATIONS[name].prepare(root)
    store = store_of(root)
    before = (store.versions(NAME), store.history(NAME))
    for size in sizes_written(root):  # each file is the first that doesn't fit, once
        said = run_limited(root, name, size - 1)
        assert said, f"{name} ended well though no file may have more than {size - 1} bytes"
        check(root, before)
    check_after_room(root)


def test_the_pointer_stays_where_a_new_one_cant_be_written(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(template, root)
    store = store_of(root)
    before = (store.versions(NAME), store.history(NAME))
    for name in ("activate", "rollback"):
        assert "File too large" in run_limited(root, name, 5)
        check(root, before)
    entries = {path.name for path in store.folder(NAME).iterdir()} - {TURN}
    assert entries == {LOCK, POINTER, *before[0]}
    store.activate(NAME, before[0][0])


@pytest.fixture
def small_disk(template: Path, tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "mount", 64 << 20) as folder:
        shutil.copytree(template, folder / "root")
        yield folder


def used(folder: Path) -> int:
    total, _, free = shutil.disk_usage(folder)
    return total - free


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*BUSY, "upsert"])
def test_a_disk_that_is_full_at_any_point_fails_the_operation_and_changes_nothing(
    small_disk: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others fill the disk after it was asked for its room.
    monkeypatch.setattr("hivlp.index.snapshot.room.free_bytes", lambda folder: 1 << 40)
    root = small_disk / "root"
    OPERATIONS[name].prepare(root)
    store = store_of(root)
    before = (store.versions(NAME), store.history(NAME))
    failed = 0
    for room in range(0, 1 << 20, 4 << 10 if name == "upsert" else 16 << 10):
        remount(small_disk, f"size={used(small_disk) + room}")
        said = run_to_end(lambda: OPERATIONS[name].run(root))
        remount(small_disk, f"size={64 << 20}")
        if not said:
            break
        failed += 1
        check(root, before)
        store.gc(NAME)  # what a pull kept would take the room of the next try
    assert failed >= 3
    assert len(store.versions(NAME)) == len(before[0]) + 1
    assert store.current(NAME) == store.versions(NAME)[-1]
    store.verify(NAME)
    check_after_room(root)


@pytest.mark.parametrize("name", ["build", "pull"])
def test_a_disk_without_room_is_told_before_anything_is_written(
    small_disk: Path, name: str
) -> None:
    root = small_disk / "root"
    OPERATIONS[name].prepare(root)
    store = store_of(root)
    before = (store.versions(NAME), store.history(NAME))
    remount(small_disk, f"size={used(small_disk) + (1 << 20)}")
    with pytest.raises(NoRoom, match=r"needs .* on the disk of .*, which has .* free"):
        OPERATIONS[name].run(root)
    remount(small_disk, f"size={64 << 20}")
    check(root, before)
    check_after_room(root)


def run_to_end(run: Callable[[], object]) -> str:
    """What went wrong, or nothing."""
    try:
        run()
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def test_removing_and_collecting_work_on_a_full_disk(small_disk: Path) -> None:
    root = small_disk / "root"
    store = SnapshotStore(root / "home")
    first = store.versions(NAME)[0]
    remount(small_disk, f"size={used(small_disk)}")
    assert store.remove(NAME, first).bytes_freed > 0
    remount(small_disk, f"size={64 << 20}")
    check_after_room(root)

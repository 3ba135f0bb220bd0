"""Figures of several processes as one: each writes its own files, any of them reads all.

prometheus-client's multiprocess mode, with two differences. A process is known by its place among
those that serve, not by its pid: one that takes a dead one's place goes on counting in its files,
so they don't pile up and no counter falls. And the folder is locked by whoever made it: what a
killed service left behind is removed by the next one that starts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from hivlp.index.snapshot.leases import Lease, take

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "hivlp-metrics-"
PARENT = "parent"
_joined: list[Path] = []


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for the figures of this service's processes, under TMPDIR, removed in the end."""
    remove_abandoned()
    folder, lease = _made()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lease.release()


def remove_abandoned() -> None:
    """Remove the folders of services that were killed: nobody holds their lock any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            lease = take(folder)
            if lease is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lease.release()


def _made() -> tuple[Path, Lease]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # taken for an abandoned one
            lease = take(folder)
            if lease is not None:
                return folder, lease


def join(folder: Path, place: str) -> None:
    """Write every figure made from now on to the folder, as the process at this place."""
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]
    _pid_file(folder, place).write_text(f"{os.getpid()}\n")
    _joined[:] = [folder]


def joined() -> Path | None:
    """The folder that this process writes to, where it does."""
    return _joined[0] if _joined else None


def leave(folder: Path, place: str) -> None:
    """Forget what only a live process has, by whoever saw it die. Its counts stay."""
    mark_process_dead(place, str(folder))  # type: ignore[no-untyped-call]
    _pid_file(folder, place).unlink(missing_ok=True)


def live(folder: Path) -> Iterable[tuple[str, int]]:
    """Place and pid of every process that joined and wasn't seen to die."""
    for file in sorted(folder.glob("*.pid")):
        with contextlib.suppress(OSError, ValueError):
            yield file.stem, int(file.read_text())


def _pid_file(folder: Path, place: str) -> Path:
    return folder / f"{place}.pid"

"""Hash what opening didn't: the large files of the versions that are served, slowly, in a thread.

    scrubber = Scrubber(store, hash_up_to_bytes=256 << 20, bytes_per_s=50 << 20, on_corrupt=swap)
    scrubber.watch("default", version)     # again after each swap
    scrubber.close()

Notable: what was read is remembered by inode, and a file being read is read on while the version
watched now has the same one. So versions that follow each other every second and share their large
files don't begin the work anew each time. Pages are read through the system's cache, for those are
what is searched, and never dropped from it: the same pages serve queries.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from hivlp.index.snapshot.quarantine import from_error, is_lasting
from hivlp.index.snapshot.snapshot import is_hashed
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import FileRecord

log = logging.getLogger("hivlp.index")

BLOCK = 1 << 20
CATCH_UP_S = 1.0
"""How far behind its rate it may be and still make up for it."""
OnCorrupt = Callable[[str, str, str], None]
"""Called with index, version and file, in the scrubber's thread."""
Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    version: str
    file: str
    path: Path
    record: FileRecord
    identity: Identity


class Pace:
    """Sleeps so that no more than `bytes_per_s` are read, on average, and never in a burst."""

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], object]
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._due = clock()

    def after(self, count: int) -> None:
        """`count` bytes were read."""
        self._due = max(self._due, self._clock() - CATCH_UP_S) + count / self._rate
        ahead = self._due - self._clock()
        if ahead > 0:
            self._sleep(ahead)


class Scrubber:
    """One thread that reads served versions through once. Safe to use from several threads."""

    def __init__(
        self,
        store: SnapshotStore,
        *,
        hash_up_to_bytes: int,
        bytes_per_s: float,
        on_corrupt: OnCorrupt,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        assert bytes_per_s > 0, f"bytes_per_s is {bytes_per_s}"
        self._store, self._hash_up_to, self._on_corrupt = store, hash_up_to_bytes, on_corrupt
        self._stop = threading.Event()
        self._pace = Pace(bytes_per_s, clock, sleep or self._stop.wait)
        self._changed = threading.Condition()
        self._wanted: dict[str, str] = {}
        self._waiting: set[str] = set()
        self._busy = False
        self._clean: dict[str, set[Identity]] = {}
        self._thread: threading.Thread | None = None

    def watch(self, name: str, version: str) -> None:
        """Read this version of an index through, in place of the one watched before."""
        with self._changed:
            if self._stop.is_set():
                return
            self._wanted[name] = version
            self._waiting.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hivlp-scrub", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything watched was read through; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._waiting), timeout_s)

    def close(self) -> None:
        """Stop within a block's reading, and wait for it unless called by the thread itself."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._scrub(name)
            except Exception:  # of the callback, or one nobody thought of: the next index goes on
                log.exception("index %s: scrubbing failed", name)

    def _next(self) -> str | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._waiting) or self._stop.is_set())
            if self._stop.is_set():
                return None
            self._busy = True
            return self._waiting.pop()

    def _scrub(self, name: str) -> None:
        """Read the files of the version wanted now, one after the other."""
        while not self._stop.is_set():
            version = self._wanted[name]
            try:
                task = self._first_unread(name, version)
                if task is None:
                    log.info("index %s, version %s: scrubbed", name, version)
                    return
                self._check(task)
            except SnapshotMissing:
                if self._wanted[name] == version:  # removed; whoever did so watches another
                    return
            except (SnapshotError, OSError) as error:
                if not is_lasting(error):
                    log.warning("index %s, version %s: not scrubbed: %s", name, version, error)
                    return
                self._condemn(name, error)
                return

    def _first_unread(self, name: str, version: str) -> _Task | None:
        manifest = self._store.manifest(name, version)
        folder = self._store.path(name, version)
        clean = self._clean.setdefault(name, set())
        known: set[Identity] = set()
        task = None
        for file, record in manifest.files.items():
            if is_hashed(file, record.size_bytes, self._hash_up_to):
                continue
            identity = self._identity(name, version, file)
            known.add(identity)
            if task is None and identity not in clean:
                task = _Task(name, version, file, folder / file, record, identity)
        clean &= known  # inodes of other versions may come back as other files
        return task

    def _identity(self, name: str, version: str, file: str) -> Identity:
        folder = self._store.path(name, version)
        try:
            found = (folder / file).stat()
        except FileNotFoundError:
            self._store.path(name, version)  # raises where all of it is gone
            raise SnapshotCorrupt(name, version, file, "missing") from None
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def _check(self, task: _Task) -> None:
        """Hash one file. Raises SnapshotCorrupt for the version wanted by then."""
        digest, size = hashlib.sha256(), 0
        with task.path.open("rb", buffering=0) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                size += len(block)
                self._pace.after(len(block))
                if self._stop.is_set() or not self._still_wanted(task):
                    return
        if (digest.hexdigest(), size) != (task.record.sha256, task.record.size_bytes):
            reason = "its sha256 differs from the manifest"
            raise SnapshotCorrupt(task.name, self._wanted[task.name], task.file, reason)
        self._clean[task.name].add(task.identity)

    def _still_wanted(self, task: _Task) -> bool:
        version = self._wanted[task.name]
        if version == task.version:
            return True
        try:
            return self._identity(task.name, version, task.file) == task.identity
        except SnapshotError:
            return False

    def _condemn(self, name: str, error: SnapshotError | OSError) -> None:
        version = error.version if isinstance(error, SnapshotError) else self._wanted[name]
        entry = from_error(version, error)
        self._store.quarantine(name).add(version, entry.file, entry.reason)
        self._on_corrupt(name, version, entry.file)

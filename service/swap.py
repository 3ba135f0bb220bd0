"""Another version takes the served one's place, while requests go on.

`watch` looks at each index's pointer, whoever moves it: a build, a command, another process of this
service. A version over the same levels takes a few milliseconds (`adopt`). Any other is verified,
read through and searched once in a thread of its own first (`load`), and only then flips in; if it
can't be opened, the one that is served stays. Whatever was opened is compared with the pointer
again before it flips in: what was superseded meanwhile is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from hivlp.index.errors import SnapshotError, SnapshotMissing, SnapshotQuarantined
from hivlp.index.snapshot.carrying import carry_over
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.quarantine import from_error, is_lasting
from hivlp.models.errors import HivlpError
from hivlp.models.stopping import Stopped, until
from hivlp.service.erased import erased_s
from hivlp.service.metrics import Metrics
from hivlp.service.serving import Catalogue, ServedVersion, Source

log = logging.getLogger("hivlp.service")
RETRY_S = 30.0
"""After so long a version that could not be opened is tried again, and the same trouble told."""
ATTEMPTS = 10
"""So often a version that is superseded while it is opened is given up for the one after it."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What kept a version from being served; `version` is empty where the pointer is unreadable."""

    version: str
    text: str
    when_s: float

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.when_s < RETRY_S


class Swapper:
    """Keeps what is served at what is active. `adopt` and `load` block: call them in threads."""

    def __init__(
        self,
        catalogue: Catalogue,
        source: Source,
        metrics: Metrics,
        shown: Callable[[str], None],
        poll_s: float,
    ) -> None:
        self._catalogue = catalogue
        self._source = source
        self._metrics = metrics
        self._shown = shown
        self._poll_s = poll_s
        self._loading = threading.Lock()  # of whole versions: one at a time, memory holds no more
        self._locks: dict[str, threading.Lock] = {}
        self.take_staged: Callable[[str], bool] = lambda _: False
        """Serves the active version of an index, if it was made ready before it was active."""
        self.begin: Callable[[str, ServedVersion], None] = lambda *_: None  # with one not served
        self.stopping = threading.Event()  # then what is being made ready is given up
        self._failed: dict[str, _Trouble] = {}
        self._said: dict[str, _Trouble] = {}

    async def watch(self, thread: Executor) -> None:
        """Look for other versions, for ever; those that must be loaded are so in `thread`.

        Whatever that thread is at, changes of items are followed: nobody waits for it here.
        """
        loop = asyncio.get_running_loop()
        loads: dict[str, asyncio.Future[None]] = {}
        while True:
            for name in self._catalogue.indexes:
                near = await asyncio.to_thread(self.keep_up, name)
                if not near and (name not in loads or loads[name].done()):
                    loads[name] = loop.run_in_executor(thread, self.follow, name)
            await asyncio.sleep(self._poll_s)

    async def expire(self) -> None:
        """Let go of superseded versions that were kept for long enough, for ever."""
        while True:
            await asyncio.to_thread(self._expire)
            await asyncio.sleep(min(1.0, self._poll_s))

    def _expire(self) -> None:
        for name, live in self._catalogue.indexes.items():
            live.expire(keep=partial(_is_younger, erased_s=self._erased_s(name)))

    def serving(self, name: str) -> str:
        """The version that is served; none of an index that isn't."""
        if name not in self._catalogue.indexes:
            return ""
        with self._catalogue.lease(name) as served:
            return served.searcher.info.version

    def trouble(self, name: str) -> str | None:
        """Why the active version isn't served, where that was tried and failed."""
        failed = self._failed.get(name)
        return None if failed is None else failed.text

    def adopt(self, name: str) -> bool:
        """Serve the active version if it is over the levels that are open. Raises HivlpError.

        Returns whether the active version is served now.
        """
        for _ in range(ATTEMPTS - 1):
            active = self._source.store.current(name)
            try:
                return self._adopt(name, active)
            except SnapshotMissing:  # superseded and removed meanwhile: then look again
                if self._source.store.current(name) == active:
                    raise
        return self._adopt(name, self._source.store.current(name))

    def load(self, name: str) -> None:
        """Open the active version, make it ready, and serve it; quarantine it where it is corrupt.

        Raises HivlpError.
        """
        with self._loading:
            for _ in range(ATTEMPTS):
                active = self._source.store.current(name)
                if self.serving(name) == active:
                    return
                self._source.store.quarantine(name).refuse(active)
                with self._opened(name, active) as opened:
                    if self.take(name, opened):
                        return
        log.warning("index %s: other versions come faster than they can be loaded", name)

    def stage(self, name: str, version: str) -> Opened:
        """Open a version and make it ready, without serving it; quarantine it where it is corrupt.

        Whoever asked closes it unless it is `taken`. Raises HivlpError.
        """
        with self._loading:
            return self._ready(name, version)

    def verify(self, name: str, version: str) -> None:
        """Hash every file of a version; quarantine it where it is corrupt. Raises SnapshotError."""
        try:
            with until(self.stopping):
                self._source.store.open(name, version).close()
        except SnapshotError as error:
            self._quarantine(name, version, error)
            raise

    def fall_back(self, name: str, version: str, file: str) -> None:
        """Serve the last good version in place of one that was found damaged while served.

        Where there is none, the damaged one goes on being searched, and the log says so.
        """
        log.error("index %s, version %s: %s is damaged: falling back", name, version, file)
        try:
            with self._loading:
                self._fall_back(name, version, file)
        except (HivlpError, OSError) as error:
            self._metrics.swaps.labels("failed").inc()
            log.error("index %s: version %s is still searched: %s", name, version, error)

    def _adopt(self, name: str, active: str) -> bool:
        with self._lock(name), self._catalogue.lease(name) as served:
            if served.searcher.info.version == active:
                return True
            self._source.store.quarantine(name).refuse(active)
            if not self._same_levels(name, active, served):
                return False
            self._flip(name, Opened(self._source.open(name, active, served), time.monotonic()))
            return True

    def _same_levels(self, name: str, version: str, served: ServedVersion) -> bool:
        manifest = self._source.store.manifest(name, version)
        own = served.snapshot
        return own is not None and own.manifest.built_files == manifest.built_files

    @contextmanager
    def _opened(self, name: str, version: str | None) -> Iterator[Opened]:
        """A version, ready to be searched; closed in the end unless it was taken."""
        opened = self._ready(name, version)
        try:
            yield opened
        finally:
            if not opened.taken:
                opened.served.close()

    def _ready(self, name: str, version: str | None) -> Opened:
        began = time.monotonic()
        served: ServedVersion | None = None
        try:
            with until(self.stopping):
                served = self._source.open(name, version)
                self._source.make_ready(served)
        except BaseException as error:
            if served is not None:
                served.close()
            self._quarantine(name, version, error)
            raise
        return Opened(served, began)

    def _quarantine(self, name: str, version: str | None, error: BaseException) -> None:
        if version is None or not isinstance(error, SnapshotError):
            return
        if isinstance(error, SnapshotMissing) or not is_lasting(error):
            return
        entry = from_error(version, error)
        self._source.store.quarantine(name).add(version, entry.file, entry.reason)

    def take(self, name: str, opened: Opened) -> bool:
        """Serve what was opened, or what is active by now if it is over the same levels.

        False where what was opened is superseded.
        """
        with self._lock(name):
            active = self._source.store.current(name)
            if self.serving(name) == active:
                return True
            if opened.served.searcher.info.version != active:
                try:
                    if not self._same_levels(name, active, opened.served):
                        return False
                    newer = self._source.open(name, active, opened.served)
                except SnapshotMissing:
                    return False
                older, opened.served = opened.served, newer
                older.close()  # the levels stay: those of the newer one
            self._flip(name, opened)
        self._say_ready(name, opened)
        return True

    def _fall_back(self, name: str, version: str, file: str) -> None:
        for _ in range(ATTEMPTS):
            damaged = self._damaged(name, version, file)
            if damaged is None:
                return  # superseded by levels that don't have this file
            with self._opened(name, None) as opened, self._lock(name):
                if self.serving(name) == damaged:
                    self._flip(name, opened)
            if opened.taken:
                self._say_ready(name, opened)
                self._carry_over(name, damaged, opened.served.searcher.info.version)
                return

    def _carry_over(self, name: str, damaged: str, whole: str) -> None:
        """Items put or deleted upon the damaged version hold upon the whole one too."""
        try:
            count = carry_over(self._source.store, name, damaged, whole)
        except (HivlpError, OSError) as error:
            log.error("index %s: what changed upon %s is not served: %s", name, damaged, error)
            return
        if count:
            log.warning("index %s: %d changes were carried over to %s", name, count, whole)
            self.adopt(name)

    def _damaged(self, name: str, version: str, file: str) -> str | None:
        """The version that is served, quarantined, if it has the file that was found damaged."""
        with self._catalogue.lease(name) as served:
            searched = served.searcher.info.version
            if searched != version and not self._holds_damaged(name, version, file, served):
                return None
        quarantine = self._source.store.quarantine(name)
        known = {entry.version: entry for entry in quarantine.entries()}
        if searched not in known:
            reason = known[version].reason if version in known else "damaged"
            quarantine.add(searched, file, reason)
        return searched

    def _holds_damaged(self, name: str, version: str, file: str, served: ServedVersion) -> bool:
        """Whether what is served shares the file that was found damaged in another version."""
        own = None if served.snapshot is None else served.snapshot.manifest.files.get(file)
        try:
            return own is not None and (
                self._source.store.manifest(name, version).files.get(file) == own
            )
        except SnapshotError:  # removed meanwhile, as a step: those are followed by their like
            return own is not None

    def _say_ready(self, name: str, opened: Opened) -> None:
        took, now = time.monotonic() - opened.began_s, opened.served.searcher.info.version
        log.info("index %s, version %s: serving, made ready in %.1f s", name, now, took)

    def _lock(self, name: str) -> threading.Lock:
        return self._locks.setdefault(name, threading.Lock())

    def _flip(self, name: str, opened: Opened) -> None:
        live, served = self._catalogue.indexes.get(name), opened.served
        if live is None:
            self.begin(name, served)
            opened.taken = True  # only now: what couldn't begin is tried again, or closed
        else:
            now = None if served.snapshot is None else served.snapshot.manifest
            erased = self._erased_s(name)
            opened.taken = True
            live.swap(served, keep=lambda old: _may_stay(old, now) and _is_younger(old, erased))
        self._forget(name)
        self._metrics.swaps.labels("done").inc()
        self._shown(name)

    def follow(self, name: str) -> None:
        """Serve what is active; what can't be is logged, and tried again later."""
        self._follow(name, load=True)

    def keep_up(self, name: str) -> bool:
        """As `follow`, as far as that takes milliseconds; False where a version must be loaded."""
        return self._follow(name, load=False)

    def _follow(self, name: str, *, load: bool) -> bool:
        active = ""
        try:
            active = self._source.store.current(name)
            failed = self._failed.get(name)
            if failed is not None and failed.version == active and failed.fresh:
                return True
            serving = self.serving(name)
            if serving == active:
                self._forget(name)
                return True
            self._source.store.quarantine(name).refuse(active)
            if self.take_staged(name) or (serving and self.adopt(name)):
                return True
            if not load:
                return False
            self.load(name)
        except Stopped:
            return True
        except Exception as error:
            if isinstance(error, SnapshotError) and active and not self._still(name, active):
                return True  # gone again meanwhile: superseded, or rolled back
            self._record(name, active, error)
        return True

    def _record(self, name: str, version: str, error: Exception) -> None:
        """Remember what is wrong; tell it unless it was just told."""
        expected = isinstance(error, (HivlpError, OSError))
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        trouble = _Trouble(version, text, time.monotonic())
        if isinstance(error, SnapshotQuarantined):  # said when it was; looked up again each time
            self._failed[name] = replace(trouble, when_s=-math.inf)
            return
        self._failed[name] = trouble
        said = self._said.get(name)
        if said is not None and said.text == text and said.fresh:
            return
        self._said[name] = trouble
        self._metrics.swaps.labels("failed").inc()
        then = "the version before goes on serving" if self.serving(name) else "not served"
        log.error("index %s: %s: %s", name, then, text, exc_info=None if expected else error)

    def _erased_s(self, name: str) -> float:
        return erased_s(self._source.store, name)

    def _forget(self, name: str) -> None:
        self._failed.pop(name, None)
        self._said.pop(name, None)

    def _still(self, name: str, version: str) -> bool:
        try:
            return self._source.store.current(name) == version
        except (HivlpError, OSError):
            return True


@dataclass(slots=True)
class Opened:
    """A version that is ready to be served; `taken`: it is, or was."""

    served: ServedVersion
    began_s: float
    taken: bool = False


def _may_stay(old: ServedVersion, now: SnapshotManifest | None) -> bool:
    """Whether a superseded version may be kept: one over the same levels.

    Such a version costs a few pages; one of other levels, as much memory as the index itself.
    """
    if old.snapshot is None or now is None:
        return False
    return old.snapshot.manifest.built_files == now.built_files


def _is_younger(old: ServedVersion, erased_s: float) -> bool:
    """Whether a version can have nothing of what was erased; a whole second is left for rounding.

    Erasing waits until nobody has the others open.
    """
    return datetime.fromisoformat(old.searcher.info.created_at).timestamp() > erased_s

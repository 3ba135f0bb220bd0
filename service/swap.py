"""Another version takes the served one's place, while requests go on.

`watch` looks at each index's pointer, whoever moves it: a build, a command, another process of this
service. A version over the same levels takes a few milliseconds (`adopt`). Any other is verified,
read through and searched once in a thread of its own first (`load`), and only then flips in; if it
can't be opened, the one that is served stays.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor

from hivlp.index.errors import SnapshotError, SnapshotMissing, SnapshotQuarantined
from hivlp.index.snapshot.quarantine import from_error, is_lasting
from hivlp.models.errors import HivlpError
from hivlp.service.metrics import Metrics
from hivlp.service.serving import Catalogue, ServedVersion, Source

log = logging.getLogger("hivlp.service")
RETRY_S = 30.0
"""After so long a version that could not be opened is tried again."""


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
        self._locks = {name: threading.Lock() for name in catalogue.indexes}
        self._failed: dict[str, tuple[str, float]] = {}

    async def watch(self, thread: Executor) -> None:
        """Look for other versions, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            for name in self._catalogue.indexes:
                await loop.run_in_executor(thread, self._follow, name)
            await asyncio.sleep(self._poll_s)

    def serving(self, name: str) -> str:
        """The version that is served."""
        with self._catalogue.lease(name) as served:
            return served.searcher.info.version

    def adopt(self, name: str) -> bool:
        """Serve the active version if it is over the levels that are open. Raises HivlpError.

        Returns whether the active version is served now.
        """
        with self._locks[name], self._catalogue.lease(name) as served:
            active = self._source.store.current(name)
            if served.searcher.info.version == active:
                return True
            self._source.store.quarantine(name).refuse(active)
            before = served.snapshot
            manifest = self._source.store.manifest(name, active)
            if before is None or before.manifest.built_files != manifest.built_files:
                return False
            self._flip(name, self._source.open(name, active, served))
            return True

    def load(self, name: str) -> None:
        """Open the active version, make it ready, and serve it; quarantine it where it is corrupt.

        Raises HivlpError.
        """
        active = self._source.store.current(name)
        try:
            self._load(name, active)
        except SnapshotError as error:
            if is_lasting(error) and not isinstance(error, SnapshotMissing):
                entry = from_error(active, error)
                self._source.store.quarantine(name).add(active, entry.file, entry.reason)
            raise

    def fall_back(self, name: str, version: str, file: str) -> None:
        """Serve the last good version in place of one that was found damaged while served.

        Where there is none, the damaged one goes on being searched, and the log says so.
        """
        log.error("index %s, version %s: %s is damaged: falling back", name, version, file)
        try:
            self._load(name, None)
        except (HivlpError, OSError) as error:
            self._metrics.swaps.labels("failed").inc()
            log.error("index %s: version %s is still searched: %s", name, version, error)

    def _load(self, name: str, version: str | None) -> None:
        began = time.monotonic()
        served = self._source.open(name, version)
        try:
            self._source.make_ready(served)
        except BaseException:
            served.close()
            raise
        with self._locks[name]:
            self._flip(name, served)
        took, now = time.monotonic() - began, served.searcher.info.version
        log.info("index %s, version %s: serving, made ready in %.1f s", name, now, took)

    def _flip(self, name: str, served: ServedVersion) -> None:
        self._catalogue.live(name).swap(served)
        self._metrics.swaps.labels("done").inc()
        self._shown(name)

    def _follow(self, name: str) -> None:
        """Serve what is active; what can't be is logged, and tried again later."""
        active = None
        try:
            active = self._source.store.current(name)
            if self.serving(name) == active or self._just_failed(name, active):
                return
            self._source.store.quarantine(name).refuse(active)
            if not self.adopt(name):
                self.load(name)
        except (HivlpError, OSError) as error:
            version = active or ""
            if isinstance(error, SnapshotError) and not self._still(name, version):
                return  # gone again meanwhile: superseded, or rolled back
            if isinstance(error, SnapshotQuarantined):
                return  # said when it was quarantined
            self._failed[name] = (version, time.monotonic())
            self._metrics.swaps.labels("failed").inc()
            log.error("index %s: the version before goes on serving: %s", name, error)

    def _just_failed(self, name: str, version: str) -> bool:
        failed, when = self._failed.get(name, ("", 0.0))
        return failed == version and time.monotonic() - when < RETRY_S

    def _still(self, name: str, version: str) -> bool:
        try:
            return self._source.store.current(name) == version
        except HivlpError:
            return True

"""A version that is open beside those that are served: followed, leased, and let go of.

Notable: erasing items waits for whoever has a version open that has them. So what isn't active is
let go of as soon as items are erased, and opened again only when that had time to remove it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager

from hivlp.index.errors import SnapshotMissing
from hivlp.index.snapshot.live import LiveSnapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import HivlpError
from hivlp.service.erased import erased_s
from hivlp.service.sampling import Left
from hivlp.service.serving import ServedVersion, Source

log = logging.getLogger("hivlp.shadow")
RETRY_S = 30.0
"""After so long a version that could not be opened, or was let go of, is tried again."""


class Beside:
    """One version of an index: the one that is named, or else whichever is active."""

    def __init__(
        self, name: str, version: str | None, poll_s: float, shown: Callable[[ServedVersion], None]
    ) -> None:
        self._name, self._version = name, version
        self._poll_s = poll_s
        self._shown = shown
        self._cell: LiveSnapshot[ServedVersion] | None = None
        self._pointer = ""
        self._erased_s = 0.0
        self._again_s = 0.0

    async def follow(self, source: Source, loading: Executor) -> None:
        """Have it open, for ever. What can't be opened is logged once, and tried again."""
        loop = asyncio.get_running_loop()
        said = ""
        while True:
            try:
                wanted = await asyncio.to_thread(self._look, source.store, loop.time)
                if wanted and loop.time() >= self._again_s:
                    await loop.run_in_executor(loading, self._open, source)
                    said = ""
            except (HivlpError, OSError) as error:
                self._again_s = loop.time() + RETRY_S
                if str(error) != said:
                    what = "nothing is" if self._cell is None else "the version before is still"
                    log.error("%s compared: %s", what, error)
                said = str(error)
            await asyncio.sleep(min(self._poll_s, RETRY_S))

    @contextmanager
    def lease(self) -> Iterator[ServedVersion]:
        """The version, kept open until the block ends. Raises Left while there is none."""
        with ExitStack() as held:
            cell = self._cell
            if cell is None:
                raise Left("not_open")
            try:
                served = held.enter_context(cell.lease())
            except RuntimeError:  # let go of just now
                raise Left("not_open") from None
            yield served

    @property
    def open(self) -> bool:
        """Whether there is one to lease."""
        return self._cell is not None

    def close(self) -> None:
        """Let go of it: it closes with its last lease, and none is given any more. Blocking."""
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()

    def _look(self, store: SnapshotStore, clock: Callable[[], float]) -> bool:
        """Let go of what is to go; whether one is to be opened. Raises HivlpError, OSError."""
        pointer = self._active(store)
        cell = self._cell
        if cell is None:
            return True
        with cell.lease() as served:
            version = served.searcher.info.version
        if version != pointer and erased_s(store, self._name) > self._erased_s:
            log.info("index %s, version %s: let go, items were erased", self._name, version)
            if self._version is not None or pointer == self._pointer:  # it would be the same again
                self._again_s = clock() + RETRY_S
            self.close()
            return True
        return self._version is None and pointer != self._pointer

    def _active(self, store: SnapshotStore) -> str:
        try:
            return store.current(self._name)
        except SnapshotMissing:
            if self._version is None:
                raise
            return ""

    def _open(self, source: Source) -> None:
        """Open it, over what is open already where that is the same. Raises HivlpError."""
        erased = erased_s(source.store, self._name)
        pointer = self._active(source.store)
        with ExitStack() as held:
            like = None if self._cell is None else held.enter_context(self._cell.lease())
            served = source.open(self._name, self._version if like is None else pointer, like)
            if like is None or not _same_levels(like, served):
                try:
                    source.make_ready(served)
                except BaseException:
                    served.close()
                    raise
                info, model = served.searcher.info, served.model.name
                log.info("index %s, version %s with %s: compared", info.index, info.version, model)
        self._shown(served)
        self._pointer, self._erased_s = pointer, erased
        if self._cell is None:  # here: whoever waits for it may be gone, and it is to be closed
            self._cell = LiveSnapshot(served)
        else:
            self._cell.swap(served)


def _same_levels(one: ServedVersion, other: ServedVersion) -> bool:
    """Whether two versions differ in changed items alone, so that what is open of one is shared."""
    if one.snapshot is None or other.snapshot is None:
        return False
    return one.snapshot.manifest.built_files == other.snapshot.manifest.built_files

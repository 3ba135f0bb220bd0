"""The scrubber of an app: what it finds is counted, logged, and handed to whoever can swap."""

from __future__ import annotations

import logging

from hivlp.index.snapshot.scrub import OnCorrupt, Scrubber
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service import loading
from hivlp.service.metrics import Metrics
from hivlp.service.serving import Catalogue, Versions

log = logging.getLogger("hivlp.service")


def _only_say(index: str, version: str, file: str) -> None:
    log.error(
        "index %s: version %s is still searched, though %s is damaged: the last good version is "
        "served from the next start on", index, version, file
    )  # fmt: skip


class Scrubbing:
    """Reads the large files of served versions through. `on_corrupt` may be set to what swaps.

    It is called in the scrubber's thread with index, version and file, after the version was
    quarantined; `open_whole` then opens the last good one, and `watch` goes on with it.
    """

    def __init__(self, mib_per_s: float, metrics: Metrics) -> None:
        self.on_corrupt: OnCorrupt = _only_say
        self._bytes_per_s = mib_per_s * 2**20
        self._metrics = metrics
        self._scrubber: Scrubber | None = None

    def start(self, catalogue: Catalogue) -> None:
        """Begin with the versions that are served; nothing where it is turned off.

        The quarantine of each index is shown in the metrics either way.
        """
        store = catalogue.store
        if not isinstance(store, SnapshotStore):  # of a cluster, or a test
            return
        for name in catalogue.indexes:
            self.begin(name, store)
        if self._bytes_per_s > 0:
            self._scrubber = Scrubber(
                store,
                hash_up_to_bytes=loading.HASH_UP_TO_BYTES,
                bytes_per_s=self._bytes_per_s,
                on_corrupt=self._found,
            )
        for name in catalogue.indexes:
            with catalogue.lease(name) as served:
                self.watch(name, served.searcher.info.version)

    def begin(self, index: str, store: Versions) -> None:
        """Tell the quarantine of an index that is served from now on."""
        if isinstance(store, SnapshotStore):
            self._metrics.show_quarantine(index, store)

    def watch(self, index: str, version: str) -> None:
        """Go on with another version of an index: after each swap."""
        if self._scrubber is not None:
            self._scrubber.watch(index, version)

    def close(self) -> None:
        """Stop, within a block's reading."""
        if self._scrubber is not None:
            self._scrubber.close()

    def _found(self, index: str, version: str, file: str) -> None:
        self._metrics.scrub_failures.labels(index).inc()
        self.on_corrupt(index, version, file)

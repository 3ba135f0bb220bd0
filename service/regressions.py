"""An activation that made answers worse is taken back, once, by whichever process notices.

What is compared is ANN recall of live queries, of all processes, which tell each other while there
is something to look after: of the version activated, with that of the version before, or, where too
few of its answers were checked, with what the build promised. Only an activation that was asked for
is looked after: never a rollback, so two versions can't take turns; nor one of an index that nobody
served, for what was active before may be what all refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from hivlp.index.snapshot.activation import built_from
from hivlp.index.snapshot.activation_files import Outcome, Request, Tally
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.models.errors import HivlpError
from hivlp.service.activation_settings import ActivationSettings
from hivlp.service.metrics import Metrics
from hivlp.service.serving import Catalogue, Source
from hivlp.service.staging import Stager

log = logging.getLogger("hivlp.service")
LOOK_S = 1.0
PROMISED_K = 10


class Recall(Protocol):
    """Mean ANN recall of the last `checks` queries of a version, NaN without any."""

    @property
    def mean(self) -> float:
        """0 to 1."""

    @property
    def checks(self) -> int:
        """How many queries."""


class Watch(Protocol):
    """What checks live queries: `hivlp.service.recall`."""

    def recent(self, index: str, version: str) -> Recall:
        """How a built version did lately, and what changed upon it."""


class Regressions:
    """Looks after the activations of one process."""

    def __init__(
        self,
        stager: Stager,
        watch: Watch,
        catalogue: Catalogue,
        source: Source,
        settings: ActivationSettings,
        metrics: Metrics,
    ) -> None:
        self._stager = stager
        self._watch = watch
        self._catalogue = catalogue
        self._source = source
        self._settings = settings
        self._metrics = metrics
        self._few: dict[str, str] = {}

    async def run(self) -> None:
        """Look every second, for ever."""
        while True:
            for name in self._catalogue.indexes:
                await asyncio.to_thread(self.look, name)
            await asyncio.sleep(LOOK_S)

    def look(self, name: str) -> None:
        """Roll back an index whose last activation made its answers worse. Blocking."""
        try:
            ended = self._recent_activation(name)
            reason = None if ended is None else self._worse(name, ended)
            if ended is None:
                self._tell_few(name)
                return
            if reason is None:
                return
            request = self._back(name, ended.request, reason)
            if request is None or not self._stager.asked(name, request):
                return
        except (HivlpError, OSError) as error:  # nothing to go back to, say
            log.debug("index %s: not looked after: %s", name, error)
            return
        self._metrics.swaps.labels("rolled_back").inc()
        log.error("index %s: rolled back: %s", name, reason)

    def _back(self, name: str, activated: Request, reason: str) -> Request | None:
        """Ask for the way back, from this activation and no other. Raises SnapshotError."""
        built = self._built(name, activated.version)
        return self._stager.ask("rollback", name, activated.previous, reason=reason, expected=built)

    def _recent_activation(self, name: str) -> Outcome | None:
        """The activation whose version is served since lately, if it is to be looked after."""
        found = self._stager.activation(name)
        if found is None or found.ended is None or not found.ended.active:
            return None
        if found.request.kind != "activate":
            return None
        if not found.request.previous or not found.request.moves or not found.request.served:
            return None  # what an index began with: no version before it was found fit to serve
        if time.time() > found.ended.ended_at + self._settings.watch_s:
            return None
        with self._catalogue.lease(name) as served:
            return found.ended if served.built == self._built(name, found.request.version) else None

    def _worse(self, name: str, ended: Outcome) -> str | None:
        """What got worse, in words; None where nothing is known to."""
        request, enough = ended.request, self._settings.recall_checks
        version, previous = (self._built(name, v) for v in (request.version, request.previous))
        own = {v: self._own(name, v) for v in (version, previous)}
        summed = self._stager.recall(name, {v: tally for v, tally in own.items() if tally.checks})
        now, before = summed.get(version), summed.get(previous)
        if now is None or now.checks < enough:
            checks = 0 if now is None else now.checks
            self._few[name] = f"version {request.version}: {checks} of {enough} answers"
            return None
        self._few.pop(name, None)
        if before is not None and before.checks >= enough:
            expected: float | None = before.found / before.checks
        else:
            expected = promised(self._source.store.manifest(name, request.version))
        mean = now.found / now.checks
        if expected is None or mean >= expected - self._settings.recall_drop:
            return None
        return (
            f"ANN recall of {now.checks} queries on version {request.version} is {mean:.3f}; "
            f"{expected:.3f} was expected"
        )

    def _own(self, name: str, version: str) -> Tally:
        recent = self._watch.recent(name, version)
        found = recent.mean * recent.checks if recent.checks else 0.0
        return Tally(found=found, checks=recent.checks)

    def _tell_few(self, name: str) -> None:
        """Say that looking after an activation has ended, and told nothing."""
        few = self._few.pop(name, None)
        if few is not None:
            log.warning("index %s, %s were checked: too few to tell a loss of recall", name, few)

    def _built(self, name: str, version: str) -> str:
        return built_from(self._source.store, name, version)


def promised(manifest: SnapshotManifest) -> float | None:
    """The least ANN recall@10 that was measured of any plan when the version was built."""
    measured = [width.recall_held_out for width in manifest.widths if width.k == PROMISED_K]
    return min(measured, default=None)

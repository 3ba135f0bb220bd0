"""Items put and deleted over HTTP: checked, encoded and published together, a few times a second.

    request ─► queue ─► one thread: encode ─► publish a version ─► serve it ─► answer

An answer is given when the change is on the disk and can be found. What waits is what the next
version holds: no change waits for another longer than one publication takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.errors import BuildError, NoSuchItem, SnapshotError
from hivlp.index.snapshot.amend import Amended, amend
from hivlp.index.snapshot.changes import Change, Delete, Shape, Upsert
from hivlp.models.errors import HivlpError, SpaceMismatch
from hivlp.service.errors import Overloaded, ServiceError
from hivlp.service.metrics import Metrics
from hivlp.service.queries import image_limits
from hivlp.service.serving import Catalogue, ServedVersion, Source
from hivlp.service.settings import Settings
from hivlp.service.swap import Swapper

log = logging.getLogger("hivlp.service")
MOST_AT_ONCE = 256
LOADING_S = 2.0
"""How long an answer waits for a version that must be loaded whole before it can be found in."""


class NotWritable(ServiceError):
    """The store can't be written to now."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, "not_writable", reason, headers={"Retry-After": "5"})


@dataclass(frozen=True, slots=True)
class Changed:
    """One change that was published; `searchable` once this process serves it."""

    version: str
    created: bool
    searchable: bool


@dataclass(slots=True)
class _Waiting:
    change: Draft | Delete
    done: asyncio.Future[Changed]
    outcome: Changed | HivlpError | None = field(default=None)


class ItemWriter:
    """Publishes the changes of one index. Lives on one event loop."""

    def __init__(
        self,
        name: str,
        catalogue: Catalogue,
        source: Source,
        swapper: Swapper,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._catalogue = catalogue
        self._source = source
        self._swapper = swapper
        self._settings = settings
        self._metrics = metrics
        self._next: _Waiting | None = None
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(settings.limits.max_changes)

    async def change(self, change: Draft | Delete) -> Changed:
        """Publish one change. Raises InputError, NoSuchItem, Overloaded, NotWritable."""
        waiting = _Waiting(change, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(waiting)
        except asyncio.QueueFull:
            raise Overloaded(self._settings.limits.max_changes) from None
        return await waiting.done

    async def run(self, thread: Executor) -> None:
        """Publish what waits, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._together()
            began = loop.time()
            try:
                await loop.run_in_executor(thread, self._publish, batch)
            except Exception as error:
                log.exception("index %s: changes could not be published", self._name)
                for waiting in batch:
                    waiting.outcome = waiting.outcome or NotWritable(type(error).__name__)
            for waiting in batch:
                self._settle(waiting)
            await asyncio.sleep(self._settings.changes.publish_s - (loop.time() - began))

    async def _together(self) -> list[_Waiting]:
        """What waits, in order, up to a second change of one id: that one is for the next turn."""
        batch = [self._next or await self._queue.get()]
        self._next = None
        ids = {batch[0].change.id}
        while len(batch) < MOST_AT_ONCE and not self._queue.empty():
            waiting = self._queue.get_nowait()
            if waiting.change.id in ids:
                self._next = waiting
                break
            ids.add(waiting.change.id)
            batch.append(waiting)
        return batch

    def _settle(self, waiting: _Waiting) -> None:
        if waiting.done.done():  # whoever asked has left
            return
        if isinstance(waiting.outcome, Changed):
            kind = "delete" if isinstance(waiting.change, Delete) else "upsert"
            self._metrics.changes.labels(kind).inc()
            waiting.done.set_result(waiting.outcome)
        else:
            waiting.done.set_exception(waiting.outcome or NotWritable("nothing was published"))

    def _publish(self, batch: Sequence[_Waiting]) -> None:
        """Give every change its outcome. In a thread."""
        with self._catalogue.lease(self._name) as served:
            space = served.searcher.info.gallery_space
            ready = self._encoded(batch, served)
        try:
            changes = [ready[place] for place in sorted(ready)]
            amended = amend(self._source.store, self._name, changes, space) if changes else None
        except (BuildError, SnapshotError, SpaceMismatch) as error:
            loading = "a version of another model is being loaded; try again"
            refused = NotWritable(loading if isinstance(error, SpaceMismatch) else str(error))
            for waiting in batch:
                waiting.outcome = waiting.outcome or refused
            return
        searchable = amended is None or self._serve()
        for waiting in batch:
            if waiting.outcome is None:
                waiting.outcome = _outcome(waiting.change.id, amended, searchable)

    def _encoded(self, batch: Sequence[_Waiting], served: ServedVersion) -> dict[int, Change]:
        """The changes that can be made, by place; the others get their error."""
        places = [i for i, waiting in enumerate(batch) if isinstance(waiting.change, Draft)]
        drafts = [w.change for w in batch if isinstance(w.change, Draft)]
        ready: dict[int, Change] = {
            i: w.change for i, w in enumerate(batch) if isinstance(w.change, Delete)
        }
        if drafts:
            made = encode_drafts(drafts, self._workshop(served))
            for place, upsert in zip(places, made, strict=True):
                if isinstance(upsert, Upsert):
                    ready[place] = upsert
                else:
                    batch[place].outcome = upsert
        return ready

    def _serve(self) -> bool:
        """Serve what was published; False where its levels must be loaded first, by the watcher."""
        until = time.monotonic() + LOADING_S
        while not self._swapper.adopt(self._name):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def _workshop(self, served: ServedVersion) -> Workshop:
        info, limits = served.searcher.info, self._settings.limits
        encoders = served.model.encoders
        return Workshop(
            encoders.get("image"),
            encoders.get("text"),
            Shape(info.levels, info.gallery),
            info.gallery_space,
            self._source.store.home / "cache" / "embeddings",
            self._source.store.root / self._name,
            image_limits(limits),
            limits.max_text_chars,
        )


def _outcome(item_id: str, amended: Amended | None, searchable: bool) -> Changed | HivlpError:
    assert amended is not None, "something was to be changed"
    if item_id in amended.unknown:
        return NoSuchItem(item_id)
    if item_id in amended.refused:
        return amended.refused[item_id]
    return Changed(amended.version, item_id in amended.created, searchable)

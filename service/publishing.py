"""A batch of changed items: encoded, published as one version, served. Blocking; for a thread.

Changes of one id are answered as if they had been made one after the other, though only the last
that can be made is published.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.errors import BuildError, NoSuchItem, SnapshotError
from hivlp.index.snapshot.amend import Amended, Held, hold
from hivlp.index.snapshot.changes import Change, Delete, Shape, Upsert
from hivlp.index.snapshot.coded_files import Kind
from hivlp.index.snapshot.metadata import MetadataError, fitted
from hivlp.models.errors import HivlpError, SpaceMismatch
from hivlp.service.errors import NotWritable
from hivlp.service.queries import image_limits
from hivlp.service.serving import Catalogue, ServedVersion, Source
from hivlp.service.settings import Settings
from hivlp.service.swap import ATTEMPTS, Swapper
from hivlp.service.turn import amend_in_turn

log = logging.getLogger("hivlp.service")
ENCODED_AT_ONCE = 16
"""Items that are encoded together: what is wrong with the encoder then harms no more."""
LOADING_S = 2.0
"""How long an answer waits for a version that must be loaded whole before it can be found in."""
STOPPING = "the service is being stopped"


@dataclass(frozen=True, slots=True)
class Changed:
    """One change that was published; `searchable` once this process serves it."""

    version: str
    created: bool
    searchable: bool


@dataclass(slots=True)
class Waiting:
    """One change that is asked for, and what became of it."""

    change: Draft | Delete
    done: asyncio.Future[Changed]
    outcome: Changed | HivlpError | None = field(default=None)


@dataclass(frozen=True, slots=True)
class _Step:
    """One change that can be made."""

    waiting: Waiting
    change: Change


class Publisher:
    """Publishes changes of one index. `stop`, once set, ends every wait."""

    def __init__(
        self,
        name: str,
        catalogue: Catalogue,
        source: Source,
        swapper: Swapper,
        settings: Settings,
        stop: threading.Event,
    ) -> None:
        self._name = name
        self._catalogue = catalogue
        self._source = source
        self._swapper = swapper
        self._settings = settings
        self._stop = stop

    def publish(self, batch: Sequence[Waiting]) -> None:
        """Give every change its outcome. Raises nothing."""
        try:
            self._publish(batch)
        except Exception as error:
            log.exception("index %s: changes could not be published", self._name)
            for waiting in batch:
                waiting.outcome = waiting.outcome or NotWritable(_said(error))

    def _publish(self, batch: Sequence[Waiting]) -> None:
        with self._catalogue.lease(self._name) as served:
            space = served.searcher.info.gallery_space
            steps = self._encoded(batch, served)
        done: list[tuple[list[_Step], Amended]] = []
        try:
            self._change(self._fitting(steps), space, done)
        except (BuildError, SnapshotError, SpaceMismatch, OSError) as error:
            refused = NotWritable(
                self._other_model() if isinstance(error, SpaceMismatch) else str(error)
            )
            published = {id(step.waiting) for chain, _ in done for step in chain}
            for waiting in batch:
                if id(waiting) not in published:
                    waiting.outcome = waiting.outcome or refused
        searchable = bool(done) and self._serve()
        for chain, amended in done:
            _answer(chain, amended, searchable)

    def _change(
        self, steps: Sequence[_Step], space: str, done: list[tuple[list[_Step], Amended]]
    ) -> None:
        """Publish the last step of each id; where it is refused, the one before it."""
        chains: dict[str, list[_Step]] = {}
        for step in steps:
            chains.setdefault(step.change.id, []).append(step)
        while chains:
            changes = [chain[-1].change for chain in chains.values()]
            wait_s = self._settings.changes.wait_s
            amended = amend_in_turn(
                self._source.store, self._name, changes, space, wait_s=wait_s, stop=self._stop
            )
            for item_id in list(chains):
                if item_id not in amended.refused:
                    done.append((chains.pop(item_id), amended))
                    continue
                chains[item_id].pop().waiting.outcome = amended.refused[item_id]
                if not chains[item_id]:
                    del chains[item_id]

    def _fitting(self, steps: Sequence[_Step]) -> Sequence[_Step]:
        """The steps whose metadata fit what those before them leave; the others get their error.

        Where no id comes twice, that is left to whoever publishes.
        """
        if len({step.change.id for step in steps}) == len(steps):
            return steps
        held = self._held()
        kinds: dict[str, Kind] = {**held.changes.columns}  # type: ignore[dict-item]
        good = []
        for step in steps:
            tried = dict(kinds)
            try:
                if isinstance(step.change, Upsert):
                    fitted(step.change.metadata, held.types, tried)
            except MetadataError as error:
                step.waiting.outcome = error
            else:
                kinds = tried
                good.append(step)
        return good

    def _held(self) -> Held:
        """What is active; another process may supersede it while it is read."""
        store, name = self._source.store, self._name
        for _ in range(ATTEMPTS - 1):
            active = store.current(name)
            try:
                return hold(store, name, active)
            except SnapshotError:
                if store.current(name) == active:
                    raise
        return hold(store, name)

    def _encoded(self, batch: Sequence[Waiting], served: ServedVersion) -> list[_Step]:
        """The changes that can be made, in order; the others get their error."""
        ready: dict[int, Change] = {
            i: w.change for i, w in enumerate(batch) if isinstance(w.change, Delete)
        }
        drafts = [(i, w.change) for i, w in enumerate(batch) if isinstance(w.change, Draft)]
        workshop = self._workshop(served)
        for start in range(0, len(drafts), ENCODED_AT_ONCE):
            part = drafts[start : start + ENCODED_AT_ONCE]
            made = self._made([draft for _, draft in part], workshop)
            for (place, _), upsert in zip(part, made, strict=True):
                if isinstance(upsert, Upsert):
                    ready[place] = upsert
                else:
                    batch[place].outcome = upsert
        return [_Step(batch[place], ready[place]) for place in sorted(ready)]

    def _made(self, drafts: list[Draft], workshop: Workshop) -> Sequence[Upsert | HivlpError]:
        if self._stop.is_set():
            return [NotWritable(STOPPING)] * len(drafts)
        try:
            return encode_drafts(drafts, workshop)
        except Exception as error:
            log.exception("index %s: items could not be encoded", self._name)
            return [NotWritable(f"items can't be encoded now: {_said(error)}")] * len(drafts)

    def _serve(self) -> bool:
        """Serve what was published; False where its levels must be loaded first, by the watcher.

        It is on the disk by now: whatever goes wrong here is no reason to say otherwise.
        """
        until = time.monotonic() + LOADING_S
        try:
            while not self._swapper.adopt(self._name):
                if time.monotonic() > until or self._stop.wait(0.05):
                    return False
        except Exception as error:
            log.warning("index %s: published, and not served yet: %s", self._name, _said(error))
            return False
        return True

    def _other_model(self) -> str:
        trouble = self._swapper.trouble(self._name)
        if trouble is None:
            return "a version of another model is being loaded; try again"
        return f"the active version, of another model, could not be loaded: {trouble}"

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
            limits.max_item_texts,
        )


def _answer(chain: Sequence[_Step], amended: Amended, searchable: bool) -> None:
    """What each of an id's changes would have been told, had they been made one after the other."""
    last = chain[-1].change
    absent = amended.unknown if isinstance(last, Delete) else amended.created
    there = last.id not in absent
    for step in chain:
        deletes = isinstance(step.change, Delete)
        if deletes and not there:
            step.waiting.outcome = NoSuchItem(last.id)
        else:
            created = not deletes and not there
            step.waiting.outcome = Changed(amended.version, created, searchable)
        there = not deletes


def _said(error: Exception) -> str:
    """What an error tells whoever asked: its text where somebody wrote it for them."""
    if isinstance(error, (HivlpError, OSError)):
        return str(error)
    return f"{type(error).__name__}; the log says more"

"""Indexes that come while the service runs, where it serves every index of its home.

    no active version            nothing, until one is activated
    active, and nobody serves it an activation of it is asked for, once: it is made ready in all
                                 processes, and then all begin to serve it
    active, and others serve it  it is loaded here, as at a start

Notable: who serves which index agrees in all processes, by the same files as activations do
(`hivlp.index.snapshot.activation`), and not by when each of them was begun. What couldn't be taken
up is left alone by all, also by those begun later, until another version of it is published or one
is activated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from hivlp.index.snapshot.activation import GONE, READY, UNVERIFIED
from hivlp.models.errors import HivlpError
from hivlp.service.errors import ServiceError
from hivlp.service.loading import cell_of
from hivlp.service.serving import Catalogue, Live, ServedVersion, Source
from hivlp.service.settings import Settings
from hivlp.service.staging import Stager
from hivlp.service.swap import RETRY_S, Swapper

log = logging.getLogger("hivlp.service")
TELLS_NOTHING = (UNVERIFIED, GONE)
"""How an activation may end without a word about its version: those who were at it are gone."""


class Newcomers:
    """Takes up the indexes that this process doesn't serve yet.

    `prepare` is called with each before it is served, in the thread that will have it served.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        source: Source,
        swapper: Swapper,
        stager: Stager,
        settings: Settings,
        prepare: Callable[[str, Live], None],
    ) -> None:
        self._catalogue = catalogue
        self._store = source.store
        self._swapper = swapper
        self._stager = stager
        self._settings = settings
        self._prepare = prepare
        # What failed as everything was loaded isn't tried at once again.
        self._asked = {name: (self._store.known(name) or [""])[-1] for name in catalogue.left_out}
        self._said: dict[str, tuple[str, float]] = {}
        swapper.begin = self.begin

    async def run(self, thread: Executor) -> None:
        """Look for new indexes, for ever; those that others serve are loaded in `thread`."""
        while True:
            await self.look(thread)
            await asyncio.sleep(self._settings.changes.poll_s)

    async def look(self, thread: Executor) -> None:
        """See once to each index of the home that isn't served; nothing where they are named."""
        if self._settings.indexes:
            return
        for name in await asyncio.to_thread(self._not_served):
            if await asyncio.to_thread(self._is_to_follow, name):
                await asyncio.get_running_loop().run_in_executor(thread, self._swapper.follow, name)

    def admit(self, name: str) -> None:
        """See to it that an index of the home can be activated here. Blocking.

        Raises SnapshotMissing, InputError for what is no name, ServiceError for one that is not to
        be served.
        """
        if name in self._catalogue.indexes:
            return
        if not self._store.versions(name):
            self._catalogue.live(name)
        named = self._settings.indexes
        if named and name not in named:
            message = (
                f"index {name!r} is in the home and not served here: the setting `indexes` "
                f"(HIVLP_INDEXES) names {', '.join(named)}; add it there, or unset it to serve "
                "every index, and restart"
            )
            raise ServiceError(409, "not_activatable", message, param="name")
        self._stager.admit(name)

    def begin(self, name: str, served: ServedVersion) -> None:
        """Serve an index that wasn't, with this version.

        Where this raises it isn't served, and whoever opened the version has it still.
        """
        cell = cell_of(served, self._settings)
        self._prepare(name, cell)
        self._catalogue.add(name, cell)
        self._stager.begin(name)

    def _not_served(self) -> list[str]:
        try:
            return [name for name in self._store.names() if name not in self._catalogue.indexes]
        except OSError as error:
            self._say("", f"new indexes can't be looked for: {error}")
            return []

    def _is_to_follow(self, name: str) -> bool:
        """Whether an index is to be loaded here alone; where it is for all to do, ask for it."""
        try:
            takes_part = self._stager.admit(name)
            version = self._active(name)
            if not version:
                return False
            if not takes_part:
                return not self._stager.awaited
            if self._stager.taken_up(name):
                return True
            if self._is_to_ask(name, version):
                self._ask(name, version)
        except (HivlpError, OSError) as error:
            self._say(name, f"index {name}: not served: {error}")
        return False

    def _ask(self, name: str, version: str) -> None:
        """Ask for it; once, unless another process asked just before: that one may die of it."""
        request = self._stager.ask("activate", name, version)
        if request is not None and self._stager.asked(name, request):
            self._asked[name] = version

    def _is_to_ask(self, name: str, version: str) -> bool:
        """Whether nobody has asked for this version yet, or who did was gone too soon to tell; or
        it was taken up once, by nobody who lives.
        """
        if self._asked.get(name) == version:
            return False
        found = self._stager.activation(name)
        if found is None:
            return True
        if found.ended is None:
            return False
        if found.request.version != version or found.ended.reason in TELLS_NOTHING:
            return True
        return found.ended.active and not any(said.state in READY for said in found.reports)

    def _active(self, name: str) -> str:
        """The active version; none where there is none. Raises SnapshotError."""
        return (self._store.history(name) or [""])[-1]

    def _say(self, name: str, text: str) -> None:
        """Log trouble that comes back at every look, now and then."""
        before, when_s = self._said.get(name, ("", 0.0))
        if text != before or time.monotonic() - when_s > RETRY_S:
            self._said[name] = (text, time.monotonic())
            log.error("%s", text)

"""Versions that are made ready before they are active: this process's part in an activation.

What an activation is, and how the processes agree, is `hivlp.index.snapshot.activation`. Two tasks
look after it here. `stage` opens, warms and checks what is asked for, in the thread that loads
versions. `flip` looks whether anything has been settled; it never waits for a version to be loaded,
so once the pointer moves every process flips within its `poll_s`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.activation import Activations
from hivlp.index.snapshot.activation_files import (
    CANARY,
    Canary,
    Kind,
    Outcome,
    Report,
    Request,
    State,
    Tally,
    read_canaries,
)
from hivlp.index.snapshot.members import Everywhere, Member, member_name
from hivlp.models.errors import HivlpError
from hivlp.models.stopping import Stopped, until
from hivlp.service.canary import check_canaries
from hivlp.service.errors import NotWritable
from hivlp.service.metrics import Metrics
from hivlp.service.serving import Catalogue, Source
from hivlp.service.settings import Settings
from hivlp.service.swap import RETRY_S, Opened, Swapper

log = logging.getLogger("hivlp.service")


@dataclass(frozen=True, slots=True)
class Activation:
    """The request under way or the last that ended, and what each live process has done about it.

    `ended` None: it is under way.
    """

    request: Request
    ended: Outcome | None = None
    reports: tuple[Report, ...] = ()


def _as_of(ended: Outcome | None, said: Report) -> Report:
    """What a process that came after an activation had ended has done about it: it serves it."""
    late = ended is not None and ended.active and said.state == "staging" and not said.new
    return said.model_copy(update={"state": "serving"}) if late else said


@dataclass(slots=True)
class _Staged:
    request: Request
    opened: Opened


class Stager:
    """Stages and flips the indexes of one process. All but the tasks blocks: call it in threads."""

    def __init__(
        self,
        catalogue: Catalogue,
        source: Source,
        swapper: Swapper,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._swapper = swapper
        self._limits = settings.limits
        self._settings = settings.activation
        self._poll_s = settings.changes.poll_s
        self._activations = {n: Activations(source.store, n) for n in catalogue.indexes}
        self._all = not settings.indexes
        self._name = member_name()
        self._members: dict[str, Member] = {}
        self._everywhere: Everywhere | None = None
        self._admitting = threading.Lock()
        self._lock = threading.Lock()
        self._staged: dict[str, _Staged] = {}
        self._seen: dict[str, str] = {}
        self._said: dict[str, tuple[str, float]] = {}
        swapper.take_staged = self.take

    def join(self) -> None:
        """Take part from now on, where the store can be written to.

        In those of other indexes too, where all are to be served: once it is told what is.
        """
        for name in self._activations:
            self._join(name, new=False)
        if not self._all or len(self._members) < len(self._activations):
            return
        try:
            self._everywhere = Everywhere(self._source.store.root, self._name)
        except (HivlpError, OSError) as error:
            log.warning("new indexes: follows their pointers alone: %s", error)

    @property
    def awaited(self) -> bool:
        """Whether the others wait for this process, whichever index it is: then it follows none of
        them alone, also where it couldn't join that one yet.
        """
        return self._everywhere is not None

    def admit(self, name: str) -> bool:
        """Take part in the activations of an index that isn't served yet; whether it does.

        To be called at each look: joining may fail, on a full disk say, and others wait for it.
        """
        with self._admitting:
            if name not in self._activations:
                self._activations[name] = Activations(self._source.store, name)
            if self.awaited and name not in self._members and not self._swapper.stopping.is_set():
                self._join(name, new=True)
        return name in self._members

    def taken_up(self, name: str) -> bool:
        """Whether an index that isn't served here is by others. Raises SnapshotError, OSError."""
        return bool(self._activations[name].taken_up(self._name))

    def begin(self, name: str) -> None:
        """Tell that an index is served from now on."""
        member = self._members.get(name)
        if member is not None:
            try:
                member.begin()
            except OSError as error:  # a full disk: it is told with what comes next
                self._say(name, str(error))

    def _join(self, name: str, *, new: bool) -> None:
        try:
            self._members[name] = self._activations[name].join(
                serves=True, name=self._name, new=new
            )
        except (HivlpError, OSError) as error:
            if new:
                self._say(name, f"can't take part in it yet, and the others wait for that: {error}")
            else:
                log.warning("index %s: follows its pointer alone: %s", name, error)

    def stop(self) -> None:
        """Give up what is being made ready: the service is to end."""
        self._swapper.stopping.set()

    def leave(self) -> None:
        """Take part no longer, and close what is staged: once no thread stages any more."""
        if self._everywhere is not None:
            self._everywhere.leave()
        for member in list(self._members.values()):
            member.leave()
        with self._lock:
            for name in list(self._staged):
                self._close(name)

    async def stage(self, thread: Executor) -> None:
        """Make ready what is asked for, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            for name in list(self._members):
                request = await asyncio.to_thread(self._asked, name)
                if request is not None:
                    await loop.run_in_executor(thread, self._stage, name, request)
            await asyncio.sleep(self._poll_s)

    async def flip(self) -> None:
        """Settle what can be, and serve what was settled, for ever."""
        while True:
            for name in list(self._members):
                await asyncio.to_thread(self._look, name)
            await asyncio.sleep(self._poll_s)

    def ask(
        self,
        kind: Kind,
        name: str,
        version: str | None = None,
        canaries: Sequence[Canary] | None = None,
        *,
        key: str = "",
        reason: str = "",
        expected: str | None = None,
    ) -> Request | None:
        """Ask for a version of an index to be made active, by all; None where it is.

        `expected`: unless another one is active than this, or what changed upon it.

        Raises SnapshotError, NotWritable.
        """
        member = self._member(name)
        try:
            request = self._activations[name].ask(
                kind,
                version,
                member,
                canaries=canaries,
                timeout_s=self._settings.timeout_s,
                key=key,
                reason=reason,
                expected=expected,
            )
        except OSError as error:
            raise NotWritable(str(error)) from error
        if request is not None:
            log.info("index %s, version %s: to be staged (%s)", name, request.version, kind)
        return request

    def asked(self, name: str, request: Request) -> bool:
        """Whether it was this process that asked first."""
        member = self._members.get(name)
        return member is not None and member.name == request.verifier

    def activation(self, name: str) -> Activation | None:
        """The activation under way, or the last one. Raises SnapshotError, OSError."""
        activations = self._activations[name]
        request, ended = activations.pending(), None
        if request is None:
            ended = activations.last()
            if ended is None:
                return None
            request = ended.request
        reports = activations.reports(request) if name in self._members else []
        return Activation(request, ended, tuple(_as_of(ended, r) for r in reports if r.serves))

    def recall(self, name: str, own: Mapping[str, Tally]) -> dict[str, Tally]:
        """By built version, how the answers of all processes did; `own` is of this one's.

        Raises SnapshotError, OSError, NotWritable.
        """
        self._member(name).tell_recall(own)
        activations, summed = self._activations[name], dict[str, Tally]()
        for said in activations.told():
            for version, tally in said.recall.items():
                before = summed.get(version, Tally(found=0.0, checks=0))
                summed[version] = Tally(
                    found=before.found + tally.found, checks=before.checks + tally.checks
                )
        return summed

    def take(self, name: str) -> bool:
        """Serve what is staged, if it is what is active now. Raises HivlpError."""
        with self._lock:
            staged = self._staged.get(name)
            if staged is None or not self._is_next(name, staged.request):
                return False
            if not self._swapper.take(name, staged.opened):
                return False
            self._close(name)
        self._report(name, staged.request, "serving")
        return True

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise NotWritable("this process takes no part in activations; the log says why")
        return member

    def _is_next(self, name: str, request: Request) -> bool:
        """Whether the pointer has moved to what is staged, or by now to what was made from it.

        While the request is under way, what moves the pointer elsewhere are changes of items of
        what is served, even where that has the levels of what is staged.
        """
        active = (self._source.store.history(name) or [""])[-1]
        if request.moves and active == request.version:
            return True
        ended = self._activations[name].last()
        done = ended is not None and ended.active and ended.request.id == request.id
        return done and active != self._swapper.serving(name)

    def _asked(self, name: str) -> Request | None:
        """The request under way, unless this process has seen to it."""
        try:
            request = self._activations[name].pending()
        except SnapshotError as error:
            self._say(name, str(error))
            return None
        return None if request is None or self._seen.get(name) == request.id else request

    def _stage(self, name: str, request: Request) -> None:
        """Phase 1 here: open the version, make it ready, and try its canaries."""
        member = self._members[name]
        self._seen[name] = request.id
        try:
            member.report(request.id, "staging")
            if request.verifier == member.name:
                self._swapper.verify(name, request.version)
                self._activations[name].note_verified(request)
            if self._swapper.serving(name) == request.version:  # it is others that don't, yet
                self._report(name, request, "serving")
                return
            opened = self._ready(name, request)
        except Stopped:  # and leaves: the others don't wait for it
            return
        except Exception as error:
            expected = isinstance(error, (HivlpError, OSError))
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            log.error(
                "index %s, version %s: not staged: %s", name, request.version, reason,
                exc_info=None if expected else error
            )  # fmt: skip
            self._metrics.swaps.labels("failed").inc()
            self._report(name, request, "failed", reason)
        else:
            with self._lock:
                self._close(name)
                self._staged[name] = _Staged(request, opened)
            self._report(name, request, "staged")

    def _ready(self, name: str, request: Request) -> Opened:
        """The version, warm, and right by its canaries. Raises HivlpError."""
        canaries = self._canaries(name, request)
        opened = self._swapper.stage(name, request.version)
        try:
            with until(self._swapper.stopping):
                check_canaries(opened.served, canaries, self._limits)
        except BaseException:
            opened.served.close()
            raise
        return opened

    def _canaries(self, name: str, request: Request) -> Sequence[Canary]:
        """Those of the request; the index's own hold for what is new, not for a way back."""
        if request.canaries is not None or request.kind == "rollback":
            return self._activations[name].canaries(request)
        return read_canaries(self._source.store.folder(name) / CANARY)

    def _look(self, name: str) -> None:
        """Phase 2 here: settle the request if it can be; flip to its version, or let go of it."""
        try:
            self._activations[name].settle()
            # In this order: a pointer moves before its request is gone.
            request = self._activations[name].pending()
            if self.take(name):
                return
        except (HivlpError, OSError) as error:
            self._say(name, str(error))
            return
        with self._lock:
            staged = self._staged.get(name)
            if staged is not None and (request is None or request.id != staged.request.id):
                log.warning("index %s, version %s: let go of", name, staged.request.version)
                self._close(name)

    def _report(self, name: str, request: Request, state: State, reason: str = "") -> None:
        try:
            self._members[name].report(request.id, state, reason)
        except OSError as error:  # a full disk: the others wait until time is over
            self._say(name, str(error))

    def _close(self, name: str) -> None:
        """Let go of what is staged, unless it is served. Under the lock."""
        staged = self._staged.pop(name, None)
        if staged is not None and not staged.opened.taken:
            staged.opened.served.close()

    def _say(self, name: str, text: str) -> None:
        """Log trouble that comes back at every look, now and then."""
        before, when_s = self._said.get(name, ("", 0.0))
        if text != before or time.monotonic() - when_s > RETRY_S:
            self._said[name] = (text, time.monotonic())
            log.error("index %s: activation: %s", name, text)

"""Several serving processes behind one socket, and the parent that keeps them running.

The parent binds the socket, loads nothing and answers nothing. A child that dies is begun again, at
once or after a pause that doubles while its place keeps dying; connections that the dead one had
not accepted yet wait in the socket's queue for the others. One whose event loop stands still is
killed, and then is one that died. `docs/decisions/` says why uvicorn's own supervisor is not used.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, Counter

from hivlp.models.errors import HivlpError
from hivlp.service import shared_metrics
from hivlp.service.child import FAILED, GO, LOADED, SERVES, Place, run_child
from hivlp.service.cores import SharedCores
from hivlp.service.pulse import LOOK_S, Pulse, Silence
from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")
GRACE_S = 30.0
"""How long a child may take to end beyond `drain_s`, and what a build has, until it is killed."""
AGAIN_S = 1.0
"""A child that has just begun may not heed a signal yet: it is sent again after so long."""
FINE_S = 30.0
"""A child that lived for so long died of something new: the next one is begun at once."""
LONGEST_PAUSE_S = 30.0


class CannotStart(HivlpError):
    """One of the processes can't be loaded; its reason is the message."""


@dataclass(slots=True, eq=False)
class _Child:
    """One process and what is known of it."""

    place: str
    process: SpawnProcess
    link: Connection[bytes, bytes]
    began_s: float
    silence: Silence
    loaded: bool = False
    serves: bool = False
    reason: str | None = None


@dataclass(slots=True, eq=False)
class _Due:
    """A place whose process died, and when the next one begins."""

    place: str
    at_s: float


class Processes:
    """The children of one service. For the main thread of a process that does nothing else."""

    def __init__(
        self,
        settings: Settings,
        bound: socket.socket,
        metrics: Path,
        on_ready: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._bound = bound
        self._metrics = metrics
        self._on_ready = on_ready
        self._spawn = multiprocessing.get_context("spawn")
        count = settings.processes
        self._cores = SharedCores(self._spawn, count, settings.shared_cores)
        self._children: list[_Child] = []
        self._due: list[_Due] = []
        self._pauses = Pauses()
        self._ready = False
        self._told: list[int] = []
        shared_metrics.join(metrics, shared_metrics.PARENT)
        self._deaths = Counter(
            "hivlp_process_deaths_total",
            "Processes that ended without being told to.",
            registry=CollectorRegistry(),
        )

    def run(self) -> int:
        """Begin them all, keep them running until a signal comes, and end them.

        0 where all ended well; raises CannotStart where one can't be begun or loaded at the start.
        """
        with self._signals() as wake:
            try:
                self._begin_all()
                while not self._told:
                    self._tick(wake)
            finally:
                clean = self._end()
        return 0 if clean else 1

    def _begin_all(self) -> None:
        for number in range(self._settings.processes):
            try:
                self._begin(str(number))
            except OSError as error:
                raise CannotStart(f"process {number} can't be begun: {error}") from error

    def _begin(self, place: str) -> None:
        """Raises OSError where the system has no process, memory or descriptor left for it."""
        own, theirs = self._spawn.Pipe()
        listening = any(child.serves for child in self._children)
        pulse = Pulse(self._spawn)
        seat = self._cores.seat(int(place))
        where = Place(place, self._metrics, pulse, seat, load_first=listening)
        process = self._spawn.Process(
            target=run_child,
            args=(self._settings, self._bound, theirs, where),
            name=f"hivlp-{place}",
        )
        try:
            process.start()
        except BaseException:
            own.close()
            raise
        finally:
            theirs.close()
        self._children.append(_Child(place, process, own, time.monotonic(), Silence(pulse)))

    def _begin_again(self, place: str) -> None:
        """Begin what died, now or, where that fails, later: the others serve meanwhile."""
        try:
            self._begin(place)
        except OSError as error:
            pause_s = self._pauses.after(place, 0.0)
            log.error("process %s can't be begun: %s; again in %.0f s", place, error, pause_s)
            self._due.append(_Due(place, time.monotonic() + pause_s))

    def _tick(self, wake: socket.socket) -> None:
        """Wait for something to happen, and see to it."""
        links = {child.link: child for child in self._children if not child.link.closed}
        ends = {child.process.sentinel: child for child in self._children}
        happened = connection.wait([wake, *links, *ends], self._until_next())
        for what in happened:
            if isinstance(what, Connection):
                self._hear(links[what])
        for what in happened:
            if isinstance(what, int):
                self._bury(ends[what])
        self._kill_hung()
        now = time.monotonic()
        for due in [due for due in self._due if due.at_s <= now]:
            self._due.remove(due)
            self._begin_again(due.place)

    def _until_next(self) -> float | None:
        now = time.monotonic()
        waits = [max(0.0, due.at_s - now) for due in self._due]
        waits += [LOOK_S] if self._settings.hung_s else []
        return min(waits, default=None)

    def _kill_hung(self) -> None:
        """End those that serve and give no sign; what becomes of their places, their end decides.

        One that loads isn't watched: nobody waits for it, and its loop may not run yet.
        """
        limit_s = self._settings.hung_s
        for child in self._children:
            if not (limit_s and child.serves and child.reason is None):
                continue
            if child.silence.look(time.monotonic()) >= limit_s:
                child.reason = f"it hung: no sign of its event loop for {limit_s:g} s; killed"
                log.error("process %s (pid %s) hangs", child.place, child.process.pid)
                child.process.kill()

    def _hear(self, child: _Child) -> None:
        try:
            said = child.link.recv_bytes()
        except (EOFError, OSError):
            child.link.close()
            return
        if said.startswith(FAILED):
            child.reason = said.removeprefix(FAILED).decode()
        elif said == LOADED:
            child.loaded = True
            if self._ready:
                self._go(child)
            elif all(other.loaded for other in self._children):
                for other in self._children:
                    self._go(other)
        else:
            assert said == SERVES, said
            child.serves = True
            if not self._ready and all(other.serves for other in self._children):
                self._ready = True
                self._on_ready()

    def _go(self, child: _Child) -> None:
        with contextlib.suppress(OSError):  # it has just died
            child.link.send_bytes(GO)

    def _bury(self, child: _Child) -> None:
        """See to a place whose process ended. Raises CannotStart before all have served."""
        if not child.link.closed and child.link.poll():
            self._hear(child)  # its last words
        child.process.join()
        reason = child.reason or how_it_ended(child.process.exitcode)
        self._children.remove(child)
        child.link.close()
        shared_metrics.leave(self._metrics, child.place)
        self._cores.clear(int(child.place))
        if not self._ready:
            raise CannotStart(reason)
        self._deaths.inc()
        pause_s = self._pauses.after(child.place, time.monotonic() - child.began_s)
        log.error(
            "process %s (pid %s) ended: %s; another one begins in %.0f s",
            child.place, child.process.pid, reason, pause_s
        )  # fmt: skip
        self._due.append(_Due(child.place, time.monotonic() + pause_s))

    def _end(self) -> bool:
        """Have every child stop in good order; whether all did. Those that don't are killed."""
        self._bound.close()  # once the children close theirs too, connecting is refused
        for child in self._children:
            child.link.close()
        jobs = self._settings.jobs
        building_s = jobs.end_s if jobs.here else 0.0
        until_s = time.monotonic() + self._settings.drain_s + building_s + GRACE_S
        left = [child.process for child in self._children]
        while left and time.monotonic() < until_s:
            for process in left:
                process.terminate()
            connection.wait([process.sentinel for process in left], AGAIN_S)
            left = [process for process in left if process.is_alive()]
        for process in left:
            log.error("%s (pid %s) did not end in time: killed", process.name, process.pid)
            process.kill()
        for child in self._children:
            child.process.join()
        # One that heeds no signals yet has answered nobody: ended by it, it ended well.
        well = (0, -signal.SIGTERM)
        return all(child.process.exitcode in well for child in self._children)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """A socket that can be read once a signal to stop has come."""

        def stop(number: int, _: FrameType | None) -> None:
            self._told.append(number)

        woken, waker = socket.socketpair()
        waker.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, stop) for number in numbers}
        before_fd = signal.set_wakeup_fd(waker.fileno())
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, old in before.items():
                signal.signal(number, old)
            woken.close()
            waker.close()


class Pauses:
    """How long to wait before a place gets another process, by how its last ones fared."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}

    def after(self, place: str, lived_s: float) -> float:
        """The pause after one that lived for so long."""
        now_s = 0.0 if lived_s > FINE_S else self._next_s.get(place, 0.0)
        self._next_s[place] = min(LONGEST_PAUSE_S, 2 * now_s or 1.0)
        return now_s


def how_it_ended(exitcode: int | None) -> str:
    """An exit code in words."""
    if exitcode is not None and exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def serve_processes(settings: Settings, bound: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve by `settings.processes` processes until told to stop. Raises CannotStart."""
    with shared_metrics.shared_folder() as metrics:
        before = os.environ.get(shared_metrics.FOLDER_VARIABLE)
        try:
            return Processes(settings, bound, metrics, on_ready).run()
        finally:
            os.environ.pop(shared_metrics.FOLDER_VARIABLE)
            if before is not None:
                os.environ[shared_metrics.FOLDER_VARIABLE] = before

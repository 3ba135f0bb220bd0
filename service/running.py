"""One serving process from its socket to its end: how uvicorn runs, and how it stops.

SIGTERM turns readiness red and goes on for `drain_s`, in which whoever spreads requests looks
elsewhere and answers ask clients to connect anew; then nothing more is accepted, and what was is
finished. SIGINT, from a keyboard, skips the first part.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from hivlp.service.app import OnLoaded, create_app
from hivlp.service.connections import connection_options
from hivlp.service.cores import Cores
from hivlp.service.loading import load_catalogue
from hivlp.service.pulse import Pulse
from hivlp.service.settings import Settings
from hivlp.service.state import LoadCatalogue

FINISH_S = 25
"""How long what was accepted may take until it is given up."""
CLOSE = (b"connection", b"close")


def run_server(
    settings: Settings,
    bound: socket.socket,
    on_loaded: OnLoaded,
    *,
    load: LoadCatalogue = load_catalogue,
    load_first: bool = False,
    pulse: Pulse | None = None,
    cores: Cores | None = None,
) -> BaseException | None:
    """Serve until told to stop; returns what loading failed of, where it did.

    `load_first`: nothing is accepted until everything is loaded. `pulse` beats while it serves;
    `cores` are those of all processes.
    """
    failures: list[BaseException] = []

    def loaded(error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)
            server.should_exit = True
        on_loaded(error)

    with _stops() as told:
        app = create_app(settings, load=load, on_loaded=loaded, load_first=load_first, cores=cores)
        server = Server(app, settings.drain_s, pulse)
        if not told:
            server.run(sockets=[bound])
    return failures[0] if failures else None


class Server(uvicorn.Server):
    """uvicorn's, with a first part of the stop; changes that wait are refused in the second."""

    def __init__(self, app: FastAPI, drain_s: float, pulse: Pulse | None = None) -> None:
        super().__init__(_config(app))
        self._state = app.state.hivlp
        self._drain_s = drain_s
        self._pulse = pulse
        self._until_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop. Another SIGTERM while one is heeded changes nothing."""
        if sig != signal.SIGTERM or not self.started:
            super().handle_exit(sig, frame)
        elif self._until_s is None:
            self._captured_signals.append(sig)
            self._until_s = time.monotonic() + self._drain_s
            self._state.draining = True
            self.config.encoded_headers.append(CLOSE)
            self.server_state.default_headers.append(CLOSE)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop."""
        if self._pulse is not None:
            self._pulse.beat()
        if self._until_s is not None and time.monotonic() >= self._until_s:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and finish: how long that may take, others say."""
        if self._pulse is not None:
            self._pulse.rest()
        self._state.draining = True
        self._state.stop_changes()
        await super().shutdown(sockets)


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        **connection_options(app.state.hivlp),
        loop="uvloop",
        log_config=None,  # its loggers have no say of their own: see logs.set_up
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FINISH_S,
    )


@contextmanager
def _stops() -> Iterator[list[int]]:
    """Signals to stop that come before the server listens to them, and once more after it did:
    uvicorn raises them again, and a clean stop is to end with 0.
    """
    told: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        told.append(number)

    before = {n: signal.signal(n, remember) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, old in before.items():
            signal.signal(number, old)

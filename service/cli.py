"""`hivlp serve`: one process, uvloop, ready when it says so.

Thread pools that spin fight with each other on few cores, and OpenMP reads its settings when it is
loaded: so they are set here, before anything that loads it is imported.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hivlp.models.errors import HivlpError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")
THREAD_VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
DRAIN_S = 25
BACKLOG = 2048
EXAMPLE = """example:
  hivlp serve --home .hivlp --port 8080
  curl -s localhost:8080/search/text -H 'Content-Type: application/json' \\
       -d '{"query": "red heart", "k": 3}'

Every setting can also be an environment variable: HIVLP_PORT=8080,
HIVLP_LIMITS__MAX_K=100 (see docs/api.md)."""


class CannotListen(HivlpError):
    """The address can't be bound."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"can't listen on {host}:{port}: {reason}")


SWITCH_S = 0.0005
"""How long a thread of Python may keep the others waiting. A search changes hands a dozen times: at
Python's own 5 ms each, a body being parsed or a version being published would cost it tens of ms.
"""


def serve(arguments: Sequence[str]) -> int:
    """Serve until told to stop. 0 after a clean stop, 1 when loading failed."""
    given = {name: value for name, value in vars(_parse(arguments)).items() if value is not None}
    for name, value in THREAD_VARIABLES.items():
        os.environ.setdefault(name, value)
    from hivlp.service import logs
    from hivlp.service.loading import names_to_serve
    from hivlp.service.settings import load_settings

    settings = load_settings(**given)
    names_to_serve(settings)
    sys.setswitchinterval(SWITCH_S)
    logs.set_up(settings.log)
    with listening(settings.host, settings.port) as bound:
        return _run(settings, bound)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hivlp serve",
        description="Serve indexes over HTTP, with a page at /.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, help="where artifacts and indexes lie (.hivlp)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8080; 0 takes a free one)")
    parser.add_argument(
        "--index", dest="indexes", action="append", help="serve this index only; may be repeated"
    )
    parser.add_argument("--artifact", type=Path, help="query with this model folder")
    return parser.parse_args(list(arguments))


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening TCP socket. Raises CannotListen, saying what to do about a taken port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CannotListen(host, port, str(error.strerror)) from error
    # The protocol is named: without it asyncio doesn't know TCP and leaves Nagle's delay on.
    with socket.socket(family, kind, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotListen(host, port, f"{reason}; choose another with --port") from error
        yield bound


def _run(settings: Settings, bound: socket.socket) -> int:
    from hivlp.service.app import create_app

    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    failures: list[BaseException] = []

    def on_loaded(error: BaseException | None) -> None:
        if error is None:
            print(f"hivlp is ready: http://{shown}:{port}", flush=True)
        else:
            failures.append(error)
            server.should_exit = True

    log.info("hivlp is loading ...")
    app = create_app(settings, on_loaded=on_loaded)
    server = _server(app)
    with _quiet_signals():
        server.run(sockets=[bound])
    if failures and isinstance(failures[0], HivlpError):
        raise failures[0]
    return 1 if failures else 0


def _server(app: FastAPI) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Refuses changes that wait as soon as it is told to stop: it waits for their answers."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.hivlp.stop_changes()
            await super().shutdown(sockets)

    return Server(_config(app))


def _config(app: Any) -> uvicorn.Config:
    import uvicorn

    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,  # its loggers have no say of their own: see logs.set_up
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn stops gracefully on a signal, then raises it again: a clean stop ends with 0."""

    def ignore(_: int, __: FrameType | None) -> None:
        return

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

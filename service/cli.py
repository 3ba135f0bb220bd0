"""`hivlp serve`: one process or several on one socket, uvloop, ready when it says so.

Thread pools that spin fight with each other on few cores, and OpenMP reads its settings when it is
loaded: so they are set here, before anything that loads it is imported.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hivlp.models.errors import HivlpError

if TYPE_CHECKING:
    from hivlp.service.settings import Settings

log = logging.getLogger("hivlp.service")
THREAD_VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
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


def serve(arguments: Sequence[str]) -> int:
    """Serve until told to stop. 0 after a clean stop, 1 when loading or the stop failed."""
    given = {name: value for name, value in vars(_parse(arguments)).items() if value is not None}
    for name, value in THREAD_VARIABLES.items():
        os.environ.setdefault(name, value)
    from hivlp.service.begin import begin_process
    from hivlp.service.loading import names_to_serve
    from hivlp.service.settings import load_settings

    settings = load_settings(**given)
    names_to_serve(settings)
    begin_process(settings)
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
    parser.add_argument("--processes", type=int, help="processes that serve (1)")
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
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def say_ready() -> None:
        print(f"hivlp is ready: http://{shown}:{port}", flush=True)

    log.info("hivlp is loading ...")
    if settings.processes == 1:
        return _run_one(settings, bound, say_ready)
    from hivlp.service.processes import serve_processes

    return serve_processes(settings, bound, say_ready)


def _run_one(settings: Settings, bound: socket.socket, say_ready: Callable[[], None]) -> int:
    from hivlp.service.running import run_server

    def on_loaded(error: BaseException | None) -> None:
        if error is None:
            say_ready()

    failed = run_server(settings, bound, on_loaded)
    if isinstance(failed, HivlpError):
        raise failed
    return 0 if failed is None else 1

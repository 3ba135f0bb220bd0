"""One of several serving processes: what runs in it, and what it and its parent say to each other.

    child   LOADED       everything is loaded and warm, and it waits
            FAILED text  it can't be loaded, which is why it ends
    parent  GO           serve: at a start once all have loaded, so that none is ready long before
                         the others are
    child   SERVES       it does

Started by spawn, never by fork: threads and what onnxruntime and FAISS hold don't survive one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from hivlp.models.errors import HivlpError
from hivlp.service.cores import Seat
from hivlp.service.pulse import Pulse
from hivlp.service.settings import Settings

LOADED, FAILED, GO, SERVES = b"loaded", b"failed ", b"go", b"serves"


class ToldToStop(HivlpError):
    """The parent ends, or is gone, before all have loaded."""

    def __init__(self) -> None:
        super().__init__("told to stop before everything was loaded")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes this is, and what it shares with the others.

    `load_first`: another one serves, so nothing is accepted here before everything is loaded.
    """

    name: str
    metrics: Path
    pulse: Pulse
    cores: Seat
    load_first: bool


def run_child(
    settings: Settings, bound: socket.socket, link: Connection[bytes, bytes], place: Place
) -> None:
    """Serve until told to stop; ends the process with 0 after a clean stop, with 1 otherwise."""
    from hivlp.service import shared_metrics
    from hivlp.service.begin import begin_process

    # Before it serves, and once it has stopped, there is nothing to stop: the parent says it again.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    begin_process(settings)
    shared_metrics.join(place.metrics, place.name)
    threading.Thread(target=_end_with_parent, name="hivlp-parent", daemon=True).start()
    sys.exit(_serve(settings, bound, link, place))


def _serve(
    settings: Settings, bound: socket.socket, link: Connection[bytes, bytes], place: Place
) -> int:
    from hivlp.service.loading import load_catalogue
    from hivlp.service.running import run_server
    from hivlp.service.serving import Catalogue

    def load(given: Settings) -> Catalogue:
        catalogue = load_catalogue(given)
        try:
            link.send_bytes(LOADED)
            assert link.recv_bytes() == GO
        except (EOFError, OSError) as error:
            raise ToldToStop from error
        return catalogue

    def on_loaded(error: BaseException | None) -> None:
        with contextlib.suppress(OSError):  # the parent ends
            link.send_bytes(SERVES if error is None else FAILED + _said(error).encode())
        if error is not None and place.load_first:
            # Stopped in good order, it would listen for a moment, and answer somebody with 503.
            logging.shutdown()
            os._exit(_code(error))

    failed = run_server(
        settings,
        bound,
        on_loaded,
        load=load,
        load_first=place.load_first,
        pulse=place.pulse,
        cores=place.cores,
    )
    return _code(failed)


def _code(failed: BaseException | None) -> int:
    return 0 if failed is None or isinstance(failed, ToldToStop) else 1


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, HivlpError) else f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    """Stop in good order when the parent is gone, however it went."""
    parent = parent_process()
    assert parent is not None, "a child process has a parent"
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)

"""Serve an app over real HTTP on a free loopback port, in a thread, for the length of a block."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import uvicorn
from fastapi import FastAPI

from hivlp.service.connections import connection_options
from hivlp.service.settings import Limits, Settings, Threads

START_TIMEOUT_S = 30

# Small limits, so that a test can cross each of them.
SMALL = Settings(
    limits=Limits(
        max_body_bytes=64_000,
        max_image_bytes=30_000,
        max_pixels=10_000,
        max_text_chars=50,
        max_k=20,
        max_offset=30,
        max_keep=500,
        max_batch=4,
        max_queue=6,
    ),
    threads=Threads(workers=2),
)


@contextlib.contextmanager
def serving(app: FastAPI, *, wait_ready: bool = True) -> Iterator[httpx.Client]:
    """A client of the app, once it is ready (or only listening)."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(128)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        options = connection_options(app.state.hivlp)
        config = uvicorn.Config(app, log_level="warning", loop="uvloop", **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                if wait_ready:
                    await_ready(client)
                yield client
        finally:
            server.should_exit = True
            thread.join(START_TIMEOUT_S)
            assert not thread.is_alive(), "the server did not stop"


def await_ready(client: httpx.Client) -> None:
    """Poll /readyz until it is green."""
    end = time.monotonic() + START_TIMEOUT_S
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < end, "the app never became ready"
        time.sleep(0.01)

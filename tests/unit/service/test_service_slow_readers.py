"""Clients that do not read what they are sent, and those that read slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from hivlp.service.bounds import ConnectionSettings
from hivlp.service.connections import Connection

MIB = 1 << 20
ANSWER = b"x" * (24 * MIB)


async def generous(scope: Scope, receive: Receive, send: Send) -> None:
    """An app whose answers are far larger than what the kernel holds for who doesn't read."""
    length = (b"content-length", str(len(ANSWER)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": ANSWER})


@contextlib.contextmanager
def generously(settings: ConnectionSettings) -> Iterator[tuple[socket.socket, list[str]]]:
    """A connection to the app, and what was counted of connections."""
    counted: list[str] = []
    made = partial(Connection, settings, 10**8, counted.append, lambda _: None)
    options = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(generous, http=made, loop="uvloop", **options))  # type: ignore[arg-type]
    with socket.socket() as bound, socket.socket() as client:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.settimeout(20)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            client.connect(bound.getsockname())
            yield client, counted
        finally:
            server.should_exit = True
            client.close()
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("then", ["keep-alive", "close"])
def test_who_reads_slowly_gets_all_of_the_answer(then: str) -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.7)) as (client, counted):
        client.sendall(f"GET / HTTP/1.1\r\nConnection: {then}\r\n\r\n".encode())
        read = 0
        while read < len(ANSWER) and (part := client.recv(MIB)):
            read += len(part)
            time.sleep(0.1 * len(part) / MIB)
    assert read >= len(ANSWER)
    assert counted == []


@pytest.mark.parametrize("then", ["keep-alive", "close"])
def test_who_does_not_read_the_answer_is_given_up(then: str) -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.3)) as (client, counted):
        client.sendall(f"GET / HTTP/1.1\r\nConnection: {then}\r\n\r\n".encode())
        end = time.monotonic() + 20
        while not counted and time.monotonic() < end:
            time.sleep(0.02)
    assert counted == ["answer_timeout"]


def test_who_reads_a_little_now_and_then_is_given_up_too() -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.1)) as (client, counted):
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        read, end = 0, time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while not counted and time.monotonic() < end:
                read += len(client.recv(64 << 10))
                time.sleep(0.03)
    assert counted == ["answer_timeout"]
    assert read < len(ANSWER)

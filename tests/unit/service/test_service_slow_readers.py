"""Clients that do not read what they are sent, and those that read slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from hivlp.service.admission import Room
from hivlp.service.bounds import ConnectionSettings
from hivlp.service.connections import Connection
from hivlp.service.metrics import Metrics
from hivlp.service.middleware import Edge
from hivlp.service.settings import Limits
from hivlp.service.unread import Unread

MIB = 1 << 20
USUAL = ConnectionSettings()
ANSWER = b"x" * (24 * MIB)


async def generous(scope: Scope, receive: Receive, send: Send) -> None:
    """An app whose answers are far larger than what the kernel holds for who doesn't read."""
    length = (b"content-length", str(len(ANSWER)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": ANSWER})


@dataclass
class Served:
    """The app's address, what was counted of its connections, and clients that are behind."""

    address: tuple[str, int]
    counted: list[str] = field(default_factory=list)
    clients: list[socket.socket] = field(default_factory=list)

    def ask(self, times: int = 1, then: str = "keep-alive") -> socket.socket:
        """A connection on which as many answers are wanted, the first of which has begun to come
        and isn't read.
        """
        client = socket.socket()
        self.clients.append(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.settimeout(20)
        client.connect(self.address)
        client.sendall(f"GET / HTTP/1.1\r\nConnection: {then}\r\n\r\n".encode() * times)
        client.recv(1, socket.MSG_PEEK)
        return client


@contextlib.contextmanager
def generously(
    settings: ConnectionSettings = USUAL,
    max_unread_bytes: int = 1 << 40,
    app: ASGIApp = generous,
) -> Iterator[Served]:
    """The app, behind connections of ours."""
    served = Served(("", 0))
    unread = Unread(max_unread_bytes, time.monotonic)
    made = partial(Connection, settings, 10**8, unread, served.counted.append, lambda _: None)
    options = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(app, http=made, loop="uvloop", **options))  # type: ignore[arg-type]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        served.address = bound.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            for client in served.clients:
                client.close()
            thread.join(30)
            assert not thread.is_alive()


def read_all(client: socket.socket) -> int:
    """How many bytes came, until all of an answer did or the connection ended."""
    read = 0
    with contextlib.suppress(ConnectionError):
        while read < len(ANSWER) and (part := client.recv(MIB)):
            read += len(part)
    return read


@pytest.mark.parametrize("then", ["keep-alive", "close"])
def test_who_reads_slowly_gets_all_of_the_answer(then: str) -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.7)) as served:
        client = served.ask(then=then)
        read = 0
        while read < len(ANSWER) and (part := client.recv(MIB)):
            read += len(part)
            time.sleep(0.1 * len(part) / MIB)
    assert read >= len(ANSWER)
    assert served.counted == []


@pytest.mark.parametrize("then", ["keep-alive", "close"])
def test_who_does_not_read_the_answer_is_given_up(then: str) -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.3)) as served:
        served.ask(then=then)
        end = time.monotonic() + 20
        while not served.counted and time.monotonic() < end:
            time.sleep(0.02)
    assert served.counted == ["answer_timeout"]


def test_who_reads_a_little_now_and_then_is_given_up_too() -> None:
    with generously(ConnectionSettings(answer_timeout_s=0.1)) as served:
        client = served.ask()
        read, end = 0, time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while not served.counted and time.monotonic() < end:
                read += len(client.recv(64 << 10))
                time.sleep(0.03)
    assert served.counted == ["answer_timeout"]
    assert read < len(ANSWER)


def test_where_too_much_is_unread_who_takes_nothing_is_given_up_for_who_reads() -> None:
    with generously(max_unread_bytes=30 * MIB) as served:
        stuck, reads = served.ask(), served.ask()
        assert read_all(reads) >= len(ANSWER)
        assert read_all(stuck) < len(ANSWER)
    assert served.counted == ["answers_unread"]


def test_an_answer_that_alone_is_too_much_is_read_in_full() -> None:
    with generously(max_unread_bytes=MIB) as served:
        assert read_all(served.ask()) >= len(ANSWER)
    assert served.counted == []


def test_an_answer_that_waits_for_the_one_before_it_counts_as_unread_too() -> None:
    limits = Limits()
    edge = Edge(generous, metrics=Metrics(), limits=limits, room=Room(1 << 40, "bytes"))
    with generously(max_unread_bytes=50 * MIB, app=edge) as served:  # more than two answers
        stuck = served.ask(times=2)
        assert read_all(served.ask()) >= len(ANSWER)
        assert read_all(stuck) < len(ANSWER)
    assert served.counted == ["answers_unread"]


@dataclass(eq=False)
class Behind:
    """A client with so many bytes unread."""

    unread_bytes: int
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True


def test_who_has_taken_nothing_for_longest_goes_and_who_reads_slowly_stays() -> None:
    now = [0.0]
    unread = Unread(100, lambda: now[0])
    slow, stuck, later = Behind(50), Behind(40), Behind(5)
    for place, reader in enumerate((slow, stuck, later)):
        now[0] = float(place)
        unread.add(reader)
    now[0], slow.unread_bytes = 10.0, 49
    unread.look()
    another = Behind(10)
    now[0] = 11.0
    unread.add(another)
    assert [one.given_up for one in (slow, stuck, later, another)] == [False, True, False, False]


def test_who_has_caught_up_is_not_given_up() -> None:
    unread = Unread(100, lambda: 0.0)
    done, other = Behind(90), Behind(90)
    unread.add(done)
    unread.discard(done)
    unread.add(other)
    assert not done.given_up
    assert not other.given_up

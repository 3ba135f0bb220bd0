"""An HTTP server that answers what a test wrote down, piece by piece, over real sockets.

A script is a list of answers, one a request, of pieces: bytes to send, seconds to wait, RESET to
break off. After each answer the connection is closed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

Piece: TypeAlias = bytes | float | None
RESET = None
ACCEPT_S = 0.05


@dataclass(frozen=True)
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


def answer(status: int, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """A whole answer; a body that isn't bytes as JSON."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    given = {"Content-Length": str(len(content)), "Connection": "close", **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode() + content


def problem(status: int, code: str, headers: dict[str, str] | None = None) -> bytes:
    """An error in the service's form."""
    inner = {"code": code, "message": f"this is {code}", "param": None, "request_id": "theirs"}
    return answer(status, {"error": inner}, headers)


@dataclass
class ScriptedServer:
    """Where it listens, what is still to be said, and what was asked."""

    url: str
    script: list[Sequence[Piece]]
    received: list[Received] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(default_factory=threading.Thread)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """Answer no more: connections are refused once this returns."""
        self.stopping.set()
        self.thread.join(10)
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """One more request is being answered."""
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            with self.lock:
                self.at_once -= 1


@contextlib.contextmanager
def scripted(*script: bytes | Sequence[Piece]) -> Iterator[ScriptedServer]:
    """A server that says this, one answer a request, and the last one to all that follow."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(64)
    bound.settimeout(ACCEPT_S)
    answers = [(one,) if isinstance(one, bytes) else one for one in script]
    server = ScriptedServer(f"http://127.0.0.1:{bound.getsockname()[1]}", answers)
    server.thread = threading.Thread(target=_serve, args=(bound, server))
    server.thread.start()
    try:
        yield server
    finally:
        server.stop()


def _serve(bound: socket.socket, server: ScriptedServer) -> None:
    with bound:
        _accept(bound, server)


def _accept(bound: socket.socket, server: ScriptedServer) -> None:
    workers = []
    while not server.stopping.is_set():
        try:
            connection, _ = bound.accept()
        except TimeoutError:
            continue
        said = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        workers.append(threading.Thread(target=_answer, args=(connection, said, server)))
        workers[-1].start()
    for worker in workers:
        worker.join()


def _answer(connection: socket.socket, said: Sequence[Piece], server: ScriptedServer) -> None:
    connection.settimeout(10)
    with connection, contextlib.suppress(OSError):
        server.received.append(_read(connection))
        # Not while the last piece is sent: who has it may ask the next before we are back here.
        with server.counted():
            for piece in said[:-1]:
                _say(connection, piece, server)
        _say(connection, said[-1], server)


def _say(connection: socket.socket, piece: Piece, server: ScriptedServer) -> None:
    if piece is RESET:  # closed with a reset, as a process that dies does it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif isinstance(piece, bytes):
        connection.sendall(piece)
    elif server.stopping.wait(piece):
        raise OSError("stopped")


def _read(connection: socket.socket) -> Received:
    head = b""
    while b"\r\n\r\n" not in head:
        more = connection.recv(65536)
        if not more:
            raise OSError("closed before a request")
        head += more
    head, _, body = head.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    method, path, _ = first.split(" ")
    return Received(method, path, headers, body)

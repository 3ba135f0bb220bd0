"""An HTTP server that answers what a test wrote down, piece by piece, over real sockets.

A script is a list of answers, one a request: bytes to send, numbers of seconds to wait, and `None`
to go on without the end that was promised. After each answer the connection is closed.
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

# Seconds that a piece of a script waits, or bytes that it sends, or RESET.
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


@contextlib.contextmanager
def scripted(*script: bytes | Sequence[Piece]) -> Iterator[ScriptedServer]:
    """A server that says this, one answer a request, and the last one to all that follow."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)
        bound.settimeout(ACCEPT_S)
        answers = [(one,) if isinstance(one, bytes) else one for one in script]
        server = ScriptedServer(f"http://127.0.0.1:{bound.getsockname()[1]}", answers)
        thread = threading.Thread(target=_serve, args=(bound, server))
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            thread.join(10)
            assert not thread.is_alive()


def _serve(bound: socket.socket, server: ScriptedServer) -> None:
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
        for piece in said:
            if piece is RESET:  # closed with a reset, as a process that dies does it
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            if isinstance(piece, bytes):
                connection.sendall(piece)
            elif server.stopping.wait(piece):
                return


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

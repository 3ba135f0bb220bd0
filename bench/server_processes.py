"""The servers of `service.py` as processes of their own, and a blocking client without frills."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

READY_S = 900
HERE = Path(__file__).parent
QUIET = {"HIVLP_LOG__SLOW_MS": "60000", "HIVLP_LOG__LEVEL": "warning"}
UNCACHED = {**QUIET, "HIVLP_CACHE__MAX_BYTES": "0"}
# Settings of our own server, by what is switched off.
VARIANTS: dict[str, dict[str, str]] = {
    "hivlp": UNCACHED,
    "no overlap": {**UNCACHED, "HIVLP_BATCHES__OVERLAP": "false"},
    "no batches": {**UNCACHED, "HIVLP_BATCHES__MAX_SIZE": "1"},
}
PLAIN = "plain"
CACHED, INSTANT = "cached", "instant"


@contextmanager
def server(
    name: str, options: argparse.Namespace, more: Mapping[str, str] | None = None
) -> Iterator[int]:
    """One server, ready, as its port; ended with the block. `more`: other settings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    kind = PLAIN if name == PLAIN else "hivlp"
    command = [
        *(sys.executable, str(HERE / "timed_servers.py"), kind, "--rows", str(options.rows)),
        *("--port", str(port), "--ef", str(options.plain_ef)),
        *(["--instant"] if name == INSTANT else []),
    ]
    variables = VARIANTS.get(name, QUIET if name == CACHED else UNCACHED)
    environment = {**os.environ, **variables, **(more or {})}
    with subprocess.Popen(command, env=environment) as process:
        try:
            _wait_ready(port, process)
            yield port
        finally:
            process.terminate()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server never became ready")


class Blocking:
    """One connection and no event loop: the least that a client can cost."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asked, self._spent_s = 0, 0.0

    @staticmethod
    @contextmanager
    def to(port: int) -> Iterator[Blocking]:
        """Connected for as long as the block."""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Blocking(connection)

    @property
    def processor_ms(self) -> float:
        """What a request cost this thread, the kernel's part included."""
        return 1e3 * self._spent_s / self._asked

    def server_s(self) -> float:
        """Seconds of processor time that the server's process has spent so far."""
        lines = self.ask("GET", "/metrics", b"").decode().splitlines()
        name = "process_cpu_seconds_total "
        return float(next(line for line in lines if line.startswith(name)).split()[1])

    def ask(self, method: str, path: str, body: bytes) -> bytes:
        """The whole answer, head included. Raises RuntimeError unless it is a 200."""
        began = time.thread_time()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._connection.sendall(head.encode() + body)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0 or len(answer) < end + 4 + _length(answer):
            answer += self._connection.recv(1 << 20)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500])
        self._asked += 1
        self._spent_s += time.thread_time() - began
        return answer


def _length(answer: bytes) -> int:
    head = answer.split(b"\r\n\r\n")[0].lower().split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in head if line.startswith(b"content-length"))

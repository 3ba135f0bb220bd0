"""Servers of pictures by URL whose TLS breaks once it was agreed on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hivlp.models.errors import InputError
from hivlp.service.fetch_settings import FetchSettings
from hivlp.service.fetching import Fetcher
from tests.unit.service.test_service_fetching import HERE, Names, certificate, is_here

RECORD = b"\x17\x03\x03\x00\x20" + b"A" * 32  # says that it is encrypted
BREAKS = [
    (b"", RECORD),
    (b"", b"HTTP/1.1 400 Bad\r\n\r\n"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", RECORD),
]


@contextlib.contextmanager
def breaking(server: ssl.SSLContext, said: bytes, raw: bytes) -> Iterator[int]:
    """The port of a server that says the one under TLS and then the other without."""

    def run() -> None:
        connection, _ = bound.accept()
        with (
            contextlib.suppress(OSError),
            connection.dup() as below,
            server.wrap_socket(connection, server_side=True) as secured,
        ):
            secured.recv(4_096)
            if said:
                secured.sendall(said)
            below.sendall(raw)
            secured.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=run)
        thread.start()
        yield int(bound.getsockname()[1])
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(("said", "raw"), BREAKS)
def test_tls_that_breaks_is_the_other_servers_fault(
    tmp_path: Path, said: bytes, raw: bytes
) -> None:
    server, client = certificate(tmp_path, "localhost")

    async def fetch(port: int) -> bytes:
        settings = FetchSettings(hosts=("localhost",), ports=(port,))
        fetcher = Fetcher(
            settings, 10**6, resolve=Names(localhost=[HERE]), allowed=is_here, tls=client
        )
        try:
            return await fetcher.fetch(f"https://localhost:{port}/a.png")
        finally:
            await fetcher.close()

    with breaking(server, said, raw) as port, pytest.raises(InputError) as caught:
        asyncio.run(fetch(port))
    assert caught.value.code == "fetch_failed"
    assert "localhost can't be reached, or broke off" in caught.value.message

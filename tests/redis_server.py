"""A real Redis for tests, on a socket of its own, that can be killed, stopped and started again;
and a link to it that can be slow, silent, or speak something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_TIMEOUT_S = 20


class RedisServer:
    """A redis-server on a unix socket. Nothing of it is kept on disk."""

    def __init__(self, program: str, *options: str) -> None:
        # Not pytest's own folder: the path of a socket may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="hivlp-redis-"))
        self.socket = self.folder / "redis.sock"
        self._command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._command += ["--dir", str(self.folder), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, password: str | None = None) -> None:
        """Start, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_TIMEOUT_S
        with self.client(password) as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    return
                assert time.monotonic() < end, "redis-server never answered"
                time.sleep(0.01)

    def client(self, password: str | None = None) -> redis.Redis:
        never = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=str(self.socket), password=password, retry=never)

    def stop(self) -> None:
        """Let it answer nothing any more, though connections stay (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextlib.contextmanager
def running(program: str, *options: str) -> Iterator[RedisServer]:
    """A server that runs, for the length of a block."""
    server = RedisServer(program, *options)
    try:
        server.start()
        yield server
    finally:
        server.close()


class Link:
    """A loopback port that leads to a server. `delay_s` holds up what it answers."""

    def __init__(self, server: RedisServer) -> None:
        self.delay_s = 0.0
        self.says: bytes | None = None
        self.port = 0
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def _run(self) -> None:
        self._end = asyncio.Event()
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._listening.set()
        await self._end.wait()
        listener.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(str(self._server.socket))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, back, answers=False))
                group.create_task(self._carry(there, writer, answers=True))
        except* OSError:
            pass
        finally:
            for one in (writer, back):
                one.close()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while data := await source.read(1 << 16):
            if answers:
                await asyncio.sleep(self.delay_s)
            sink.write(self.says if answers and self.says is not None else data)
            await sink.drain()
        raise ConnectionResetError  # one side has gone: so does the other

    @contextlib.contextmanager
    def up(self) -> Iterator[Link]:
        """Open for the length of a block."""
        self._thread.start()
        assert self._listening.wait(START_TIMEOUT_S)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(START_TIMEOUT_S)
            assert not self._thread.is_alive(), "the link did not end"
            self._loop.close()

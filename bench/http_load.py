"""Loads on HTTP servers, open and closed. Open: requests arrive when due, whatever answers.

An open load's latency counts from when a request was due, so a server that stalls pays for all who
waited. In a closed one so many clients ask, each when it has its answer. Raw HTTP/1.1 over
kept-alive connections; `client_ms` is what the client's own process spent on a request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import uvloop

LATE_S = 30.0


@dataclass
class Load:
    """What came of a load: milliseconds of each answer, and how many of each status."""

    latencies_ms: list[float] = field(default_factory=list)
    each: list[tuple[int, float]] = field(default_factory=list)
    """Status and milliseconds of every request."""
    statuses: Counter[int] = field(default_factory=Counter)
    processor_s: float = 0.0
    """What the client's process spent on all of them."""

    def add(self, status: int, ms: float) -> None:
        """Count an answer."""
        self.statuses[status] += 1
        self.latencies_ms.append(ms)
        self.each.append((status, ms))

    def percentile(self, p: float) -> float:
        """Milliseconds that `p` percent of the answers took at most."""
        return float(np.percentile(self.latencies_ms, p)) if self.latencies_ms else float("nan")

    @property
    def failed(self) -> int:
        """Answers that were no success, connections lost included (status 0)."""
        return sum(count for status, count in self.statuses.items() if status // 100 != 2)

    @property
    def client_ms(self) -> float:
        """Processor time of the client a request."""
        return 1e3 * self.processor_s / max(1, len(self.each))

    def to_text(self) -> str:
        """One line."""
        marks = "  ".join(f"p{p:g} {self.percentile(p):7.2f}" for p in (50, 95, 99, 99.9))
        return f"{sum(self.statuses.values()):>7} answers  {self.failed:>3} failed  {marks} ms"


Request = tuple[str, str, bytes]
"""Method, path, JSON body."""


def run_load(
    ports: Sequence[int],
    make: Callable[[int], Request],
    rate: float,
    seconds: float,
    seed: int = 0,
) -> Load:
    """`rate` requests a second by a Poisson process, to the ports in turn."""
    return uvloop.run(_run(ports, make, rate, seconds, seed))


def run_beside(
    ports: Sequence[int], make: Callable[[int], Request], rate: float, seconds: float, seed: int = 0
) -> list[Load]:
    """The same requests to each port, each by a Poisson process of its own, all at the same time:
    what else the machine does meanwhile delays all of them alike.
    """

    async def all_of_them() -> list[Load]:
        loads = (
            _run([port], make, rate, seconds, seed + place) for place, port in enumerate(ports)
        )
        return list(await asyncio.gather(*loads))

    return uvloop.run(all_of_them())


def run_closed(
    port: int, make: Callable[[int], Request], clients: int, seconds: float
) -> tuple[Load, float]:
    """`clients` that ask one after the other for so long; and the answers a second."""
    return uvloop.run(_closed(port, make, clients, seconds))


async def _closed(
    port: int, make: Callable[[int], Request], clients: int, seconds: float
) -> tuple[Load, float]:
    load = Load()
    numbers = itertools.count()
    began, spent = time.perf_counter(), time.process_time()
    end = began + seconds

    async def one() -> None:
        connection = await _Connection.open(port)
        while (asked := time.perf_counter()) < end:
            status = await connection.ask(*make(next(numbers)))
            load.add(status, 1e3 * (time.perf_counter() - asked))
        connection.writer.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    load.processor_s = time.process_time() - spent
    answered = len(load.latencies_ms) - load.failed
    return load, answered / (time.perf_counter() - began)


async def _run(
    ports: Sequence[int], make: Callable[[int], Request], rate: float, seconds: float, seed: int
) -> Load:
    load = Load()
    pools = {port: asyncio.LifoQueue[_Connection]() for port in ports}
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    began = time.perf_counter()
    tasks = []
    for number, at in enumerate(due):
        wait = began + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        port = ports[number % len(ports)]
        one = _one(pools[port], port, make(number), began + at, load)
        tasks.append(asyncio.create_task(one))
    await asyncio.gather(*tasks)
    return load


async def _one(
    pool: asyncio.LifoQueue[_Connection], port: int, request: Request, due: float, load: Load
) -> None:
    status = 0
    while status == 0:
        kept = not pool.empty()  # one that lay idle may have been closed: then a new one is tried
        try:
            connection = pool.get_nowait() if kept else await _Connection.open(port)
            status = await asyncio.wait_for(connection.ask(*request), LATE_S)
            pool.put_nowait(connection)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            if not kept:
                break
    load.add(status, 1e3 * (time.perf_counter() - due))


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def open(port: int) -> _Connection:
        return _Connection(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, method: str, path: str, body: bytes) -> int:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        )
        await self.reader.readexactly(length)
        return int(lines[0].split(b" ")[1])

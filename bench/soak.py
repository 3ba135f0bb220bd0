"""Every shape of request at once, for minutes: nothing fails that should not, memory stays.

    python bench/soak.py --home .hivlp --seconds 600

Starts `hivlp serve` over a home that takes texts and pictures (the demo's), and asks from so many
clients: texts long and short, pictures of many sizes and formats, items, vectors, batches, filters,
deadlines, early exits, pages, embeddings, thumbnails, what is wrong in every way, and clients that
leave. After a fifth of the time memory is taken as its base. Printed: answers by status, resident
memory over time, and its growth from the base to the median of the last fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from measure import RESULTS, machine
from PIL import Image

WORDS = (
    *("red", "blue", "cat", "dog", "rain", "old", "train", "flag", "of", "a", "the", "heart"),
    *("pizza", "moon", "tree", "river", "small", "two"),
)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SAMPLE_S = 5.0
READY_S = 300


class Clients:
    """What is asked, and what came of it."""

    def __init__(self, client: httpx.AsyncClient, ids: list[str], dim: int) -> None:
        self.client, self.ids, self.dim = client, ids, dim
        self.statuses: Counter[str] = Counter()
        self.random = random.Random(0)
        self.shapes: list[Callable[[], Awaitable[None]]] = [
            *(self.text, self.text, self.text, self.picture, self.picture, self.item),
            *(self.vector, self.batch, self.embed, self.thumbnail, self.wrong, self.leave),
        ]

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            shape = self.random.choice(self.shapes)
            try:
                await shape()
            except httpx.HTTPError as error:
                self.statuses[f"{shape.__name__} {type(error).__name__}"] += 1

    async def post(self, path: str, **sent: Any) -> None:
        answer = await self.client.post(path, **sent)
        self.statuses[f"{path.split('/')[1]} {answer.status_code}"] += 1

    def sentence(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.choice((1, 2, 3, 8, 30, 120))))

    def options(self) -> dict[str, Any]:
        return self.random.choice(
            [
                {},
                {"k": self.random.choice((1, 10, 100, 1_000))},
                {"plan": self.random.choice(("cascade", "funnel", "exact"))},
                {"explain": True, "offset": self.random.randrange(50)},
                {"deadline_ms": self.random.choice((1, 5, 20, 200))},
                {"early_exit": True, "plan": "cascade"},
                {"with_metadata": False, "min_score": 0.2},
                {"modality": "text"},
                {"max_level": 2},
            ]
        )

    async def text(self) -> None:
        await self.post("/search/text", json={"query": self.sentence(), **self.options()})

    def image(self) -> bytes:
        size = (self.random.randrange(1, 900), self.random.randrange(1, 900))
        colour = tuple(self.random.randrange(256) for _ in range(3))
        out = io.BytesIO()
        Image.new("RGB", size, colour).save(out, self.random.choice(FORMATS))
        return out.getvalue()

    async def picture(self) -> None:
        await self.post("/search/image", files={"image": self.image()})

    async def item(self) -> None:
        await self.post("/search/similar", json={"id": self.random.choice(self.ids)})

    async def vector(self) -> None:
        numbers = [self.random.gauss(0, 1) for _ in range(self.dim)]
        await self.post("/search/vector", json={"vector": numbers})

    async def batch(self) -> None:
        searches = [{"kind": "text", "query": self.sentence()} for _ in range(8)]
        await self.post("/search/batch", json={"searches": searches})

    async def embed(self) -> None:
        await self.post("/embed/text", json={"text": self.sentence()})

    async def thumbnail(self) -> None:
        answer = await self.client.get(
            f"/items/{self.random.choice(self.ids)}/image", params={"size": 96}
        )
        self.statuses[f"items {answer.status_code}"] += 1

    async def wrong(self) -> None:
        sent: dict[str, Any] = self.random.choice(
            [
                {"json": {"query": ""}},
                {"json": {"query": "red", "k": 10**9}},
                {"json": {"query": "x" * 5_000}},
                {"json": {"query": "red", "nothing": 1}},
                {"content": b"{", "headers": {"Content-Type": "application/json"}},
                {"files": {"image": b"no picture"}},
                {"files": {"image": self.image()[:60]}},
            ]
        )
        await self.post("/search/image" if "files" in sent else "/search/text", **sent)

    async def leave(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.random.uniform(0.001, 0.02)):
                await self.text()
        self.statuses["left"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=12)
    options = parser.parse_args()
    found = asyncio.run(soak(options))
    print(json.dumps(found, indent=1))
    (RESULTS / "soak.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = [name for name in found["statuses"] if name.split()[-1][0] == "5" and "504" not in name]
    return 1 if bad or found["exit"] else 0


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "hivlp.service.main", "serve", "--port", str(port)]
    environment = {
        **os.environ,
        "HIVLP_HOME": str(options.home),
        "HIVLP_CACHE__MAX_BYTES": "4194304",
    }
    environment.pop("HIVLP_BENCH_HOME", None)
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                await ready(client)
                clients = Clients(client, await some_ids(client), await finest(client))
                memory = await loaded(options, clients, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    fifth = max(1, len(memory) // 5)
    base, last = memory[fifth], statistics.median(memory[-fifth:])
    return {
        "machine": machine(),
        "seconds": options.seconds,
        "statuses": dict(sorted(clients.statuses.items())),
        "resident_mib": [round(one) for one in memory],
        "growth": round(last / base - 1, 4),
        "exit": code,
    }


async def loaded(options: argparse.Namespace, clients: Clients, pid: int) -> list[float]:
    """Private resident memory, in MiB, every few seconds of the load."""
    end = time.monotonic() + options.seconds
    work = [asyncio.create_task(clients.run(end)) for _ in range(options.clients)]
    memory = []
    while time.monotonic() < end:
        await asyncio.sleep(SAMPLE_S)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        memory.append(next(int(line.split()[1]) / 1024 for line in lines if "RssAnon" in line))
    await asyncio.gather(*work)
    return memory


async def ready(client: httpx.AsyncClient) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get("/readyz")).status_code == 200:
                return
        await asyncio.sleep(0.3)
    sys.exit("the server never became ready")


async def some_ids(client: httpx.AsyncClient) -> list[str]:
    answer = await client.post("/search/text", json={"query": "a", "k": 200})
    return [hit["id"] for hit in answer.json()["hits"]]


async def finest(client: httpx.AsyncClient) -> int:
    info = (await client.get("/indexes")).json()
    return int(info["indexes"][0]["levels"][-1]["dim"])


if __name__ == "__main__":
    sys.exit(main())

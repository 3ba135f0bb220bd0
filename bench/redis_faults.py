"""What trouble with the Redis behind the answer cache costs a search: percentiles, state by state.

    python bench/redis_faults.py --rounds 8 --timeout-ms 20

Makes a small index of random vectors and starts a redis-server and `hivlp serve`, each as a process
of its own, without the in-process tier: one without Redis, one whose breaker opens after 5
failures, one whose breaker never does. Searches arrive by a Poisson process, and at the same time
at the server without Redis, so that what else the machine does delays both alike; a round that it
disturbs counts as one of many. The promise: p99 rises by the time-out at most, whether the breaker
opens or not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import redis
from http_load import Load, Request, run_beside, run_load
from live_changes import ready
from measure import machine
from prometheus_client.parser import text_string_to_metric_families

from hivlp.service.cache.sealing import seal, unseal

DIM = 64
NEVER = "1000"
KEY = "a" * 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=20.0, help="searches a second")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each state in a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--timeout-ms", type=float, default=20.0)
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder, Redis() as server:
        home = make_home(Path(folder), given.items)
        shared = {"REDIS_URL": server.url, "REDIS_TIMEOUT_MS": str(given.timeout_ms)}
        never = {"REDIS_PREFIX": "never:", "BREAKER_FAILURES": NEVER}
        with (
            serving(home, {}) as without,
            serving(home, shared) as default,
            serving(home, shared | never) as patient,
        ):
            bench = Bench(given, server, {"without": without, "5 fail": default, "never": patient})
            bench.run()
            bench.size(without)


def make_home(folder: Path, items: int) -> Path:
    rng = np.random.default_rng(0)
    np.save(folder / "vectors.npy", rng.standard_normal((items, DIM)).astype(np.float32))
    command = [sys.executable, "-m", "hivlp.service.main", "import-vectors", "--family", "scan"]
    command += ["--vectors", str(folder / "vectors.npy"), "--home", str(folder / "home")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "home"


class Bench:
    """The same load on both servers in every state, beside one without Redis, round after round."""

    def __init__(self, given: argparse.Namespace, server: Redis, ports: Mapping[str, int]) -> None:
        self._given = given
        self._ports = ports
        self._states: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "well": nullcontext,
            "known queries": nullcontext,
            "full": server.full,
            "comes and goes": server.flicker,
            "stopped": server.stopped,
            "gone": server.gone,
        }
        self._loads: dict[tuple[str, str], list[list[Load]]] = defaultdict(list)
        self._counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def run(self) -> None:
        """All rounds; the first warms and isn't counted."""
        rng = np.random.default_rng(0)
        turns = [("5 fail", state) for state in self._states]
        turns += [("never", state) for state in ("well", "comes and goes", "stopped")]
        for number in range(self._given.rounds + 1):
            for turn in rng.permutation(len(turns)):
                self.measure(*turns[turn], number)
        print(
            "median over rounds of each round's own percentile, in ms: without Redis, with it, rise"
        )
        for name, state in turns:
            said = []
            for p in (50, 90, 99):
                pairs = [[one.percentile(p) for one in pair] for pair in self._loads[name, state]]
                beside, load = np.median(np.array(pairs), axis=0)
                rise = np.median([with_it - without for without, with_it in pairs])
                said.append(f"p{p} {beside:5.1f} {load:5.1f} {rise:+6.1f}")
            failed = sum(one.failed for pair in self._loads[name, state] for one in pair)
            moved = sorted(self._counts[name, state].items())
            counted = "  ".join(f"{n} {count}" for n, count in moved)
            print(
                f"{name:<7}{state:<15}{'   '.join(said)}   {failed} failed\n  {counted}", flush=True
            )

    def measure(self, name: str, state: str, number: int) -> None:
        """One state of one round, from a closed breaker on."""
        port = self._ports[name]
        await_closed(port)
        known = state == "known queries"
        seed = 0 if known else zlib.crc32(f"{name} {state} {number}".encode())
        vectors = np.random.default_rng(seed).standard_normal((1_000, DIM)).round(5)

        def make(number: int) -> Request:
            body = {"vector": vectors[number].tolist(), "k": 10}
            return "POST", "/search/vector", json.dumps(body).encode()

        rate, seconds = self._given.rate, self._given.seconds
        if known:  # "gone" took them along
            run_load([port], make, rate, seconds)
            await_closed(port)
        before = counts(port)
        with self._states[state]():
            loads = run_beside([self._ports["without"], port], make, rate, seconds, 2 * number)
            after = counts(port)
        if number:
            self._loads[name, state].append(loads)
            self._counts[name, state] += Counter({n: int(after[n] - before[n]) for n in after})

    def size(self, port: int) -> None:
        """What the seal's compression does to an answer of this index, and what it costs."""
        vector = np.random.default_rng(99).standard_normal(DIM).tolist()
        for k in (10, 100):
            answer = post(port, {"vector": vector, "k": k})
            sealed = seal(KEY, answer)
            sealing = time_us(partial(seal, KEY, answer))
            unsealing = time_us(partial(unseal, KEY, sealed, len(answer)))
            print(
                f"  answer of {k}: {len(answer)} bytes, sealed {len(sealed)} in {sealing:.0f} us, "
                f"unsealed in {unsealing:.0f} us"
            )


def time_us(work: Callable[[], object], rounds: int = 2_000) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6


def post(port: int, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/search/vector",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        found: bytes = answer.read()
        return found


def counts(port: int) -> dict[str, float]:
    """Look-ups and writes of the Redis tier by result, and how many breakers are open."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if labels.get("tier") == "redis" and "result" in labels and "_total" in sample.name:
                kind = "write " if "writes" in sample.name else ""
                found[kind + labels["result"]] = sample.value
            elif sample.name == "hivlp_cache_breaker_open":
                found["breakers"] = found.get("breakers", 0) + sample.value
    return found


def await_closed(port: int) -> None:
    """Wait until no breaker is open."""
    end = time.monotonic() + 60
    while counts(port).get("breakers"):
        assert time.monotonic() < end, "the breaker never closed"
        time.sleep(0.01)


class Redis:
    """A redis-server of our own on a unix socket."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = f"{self._folder.name}/redis.sock"
        self.url = f"unix://{self._socket}"

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self._socket)

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", self._socket, "--save", ""]
        self._process = subprocess.Popen(command, cwd=self._folder.name, stdout=subprocess.DEVNULL)
        with self.client() as client:
            client.ping()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Connections stay, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Killed, and started again afterwards."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def full(self) -> Iterator[None]:
        """What is written is refused."""
        with self.client() as client:
            client.config_set("maxmemory", "1")
            try:
                yield
            finally:
                client.config_set("maxmemory", "0")

    @contextmanager
    def flicker(self) -> Iterator[None]:
        """Half of the time stopped, a tenth of a second each."""
        ended = threading.Event()

        def turn() -> None:
            while not ended.wait(0.1):
                with self.stopped():
                    ended.wait(0.1)

        thread = threading.Thread(target=turn)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def serving(home: Path, cache: dict[str, str]) -> Iterator[int]:
    """`hivlp serve` over a home, ready, without the in-process tier."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {f"HIVLP_CACHE__{name}": value for name, value in {"MAX_BYTES": "0", **cache}.items()}
    command = [sys.executable, "-m", "hivlp.service.main", "serve", "--port", str(port)]
    environment = {**os.environ, "HIVLP_HOME": str(home), **own}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        ready(port)
        yield port
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()

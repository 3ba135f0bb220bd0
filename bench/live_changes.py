"""Searches while the index changes: items put a hundred a second, and whole versions swapped.

    python bench/live_changes.py --home HOME --index NAME --rate 40 --seconds 60

Needs an index that takes vectors, as `hivlp import-vectors` makes. Servers are started here, one or
two over one home; searches arrive by a Poisson process, each a new vector near a row. The steady
state before and after is the baseline. Swaps go to and fro between two versions by
`hivlp snapshots activate`'s own function, in this process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from http_load import Load, Request, run_load
from measure import machine

from hivlp.index.snapshot.store import SnapshotStore

READY_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--index", default="default")
    parser.add_argument("--rate", type=float, default=40.0, help="searches a second")
    parser.add_argument("--puts", type=float, default=100.0, help="items a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--filter", type=json.loads)
    parser.add_argument("--no-puts", action="store_true")
    given = parser.parse_args()
    print(machine())
    store = SnapshotStore(given.home)
    for count in given.servers:
        with servers(given, count) as (ports, pids):
            print(f"--- {count} server(s), {store.manifest(given.index).items} items", flush=True)
            if not given.no_puts:
                puts(given, ports, pids)
            swaps(given, store, ports, pids)


def puts(given: argparse.Namespace, ports: list[int], pids: list[int]) -> None:
    """Searches alone, beside puts, alone again."""
    vectors = queries(given, 20_000)
    search(given, ports, vectors, 5.0)
    before = search(given, ports, vectors, given.seconds)
    say("searches alone", before)
    process = multiprocessing.get_context("spawn").Pool(1)
    writing = process.apply_async(put_load, (given, ports[0]))
    beside = search(given, ports, vectors, given.seconds)
    written: Load = writing.get()
    process.close()
    say(f"beside {given.puts:g} puts a second", beside)
    say("  the puts themselves", written)
    after = search(given, ports, vectors, given.seconds)
    say("alone again, over the changes", after)
    print(f"p99 beside puts: {beside.percentile(99) / before.percentile(99):.2f} times that before")
    print(f"resident MiB: {[resident(pid) for pid in pids]}", flush=True)


def put_load(given: argparse.Namespace, port: int) -> Load:
    rows = queries(given, int(given.puts * given.seconds) + 1_000, seed=7)
    prefix = f"put{os.getpid()}"

    def make(number: int) -> Request:
        body = {"vector": rows[number].tolist(), "metadata": {}}
        return "PUT", f"/items/{prefix}-{number}?index={given.index}", json.dumps(body).encode()

    return run_load([port], make, given.puts, given.seconds, seed=1)


def swaps(
    given: argparse.Namespace, store: SnapshotStore, ports: list[int], pids: list[int]
) -> None:
    """Searches while two versions take turns."""
    versions = [v for v in store.versions(given.index)
                if store.manifest(given.index, v).amended_from is None][-2:]  # fmt: skip
    if len(versions) < 2:
        print("swaps: two built versions are needed")
        return
    vectors = queries(given, 20_000, seed=3)
    store.activate(given.index, versions[-1])
    wait_for(given, ports, versions[-1])
    before = search(given, ports, vectors, given.seconds)
    say("searches alone", before)
    memory = [resident(pid) for pid in pids]
    taken: list[float] = []
    stop = threading.Event()

    def swap() -> None:
        for turn in range(given.swaps):
            began = time.perf_counter()
            point(store, given.index, versions[turn % 2])
            wait_for(given, ports, versions[turn % 2])
            taken.append(time.perf_counter() - began)
        stop.set()

    thread = threading.Thread(target=swap)
    thread.start()
    beside = Load()
    while not stop.is_set():
        part = search(given, ports, vectors, 5.0)
        beside.latencies_ms += part.latencies_ms
        beside.statuses += part.statuses
    thread.join()
    say(f"beside {given.swaps} swaps", beside)
    ratio = beside.percentile(99) / before.percentile(99)
    print(f"a swap took {np.median(taken):.2f} s (median), p99 {ratio:.2f} times that before")
    print(f"resident MiB before {memory}, after {[resident(pid) for pid in pids]}", flush=True)


def point(store: SnapshotStore, index: str, version: str) -> None:
    """Activate in a process of its own, as the command does."""
    command = [sys.executable, "-m", "hivlp.service.main", "snapshots", "activate", version]
    subprocess.run(
        [*command, "--index", index, "--home", str(store.home)], check=True, capture_output=True
    )


def search(
    given: argparse.Namespace, ports: list[int], vectors: np.ndarray, seconds: float
) -> Load:
    extra = {} if given.filter is None else {"filter": given.filter}
    bodies = [
        json.dumps({"vector": v, "k": 10, "index": given.index, **extra}).encode()
        for v in vectors[: int(given.rate * seconds) + 100].tolist()
    ]
    rng = np.random.default_rng(int(time.time()))
    order = rng.permutation(len(bodies))
    return run_load(
        ports,
        lambda number: ("POST", "/search/vector", bodies[order[number]]),
        given.rate,
        seconds,
        seed=int(rng.integers(1 << 30)),
    )


def queries(given: argparse.Namespace, count: int, seed: int = 0) -> np.ndarray:
    """Vectors near rows of the index, in its own space, a little aside."""
    store = SnapshotStore(given.home)
    rows = np.load(store.path(given.index, store.current(given.index)) / "image/rows.npy", "r")
    rng = np.random.default_rng(seed)
    picked = np.asarray(rows[np.sort(rng.choice(len(rows), count))], dtype=np.float32)
    found = picked + 0.3 * rng.standard_normal(picked.shape).astype(np.float32) / np.sqrt(
        picked.shape[1]
    )
    return np.round(found[rng.permutation(count)], 6)


def say(what: str, load: Load) -> None:
    print(f"{what:<32}{load.to_text()}", flush=True)


def resident(pid: int) -> int:
    """MiB of memory of a process's own, without shared file pages."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if " kB" in line}
    return sizes["RssAnon"] // 1024


def wait_for(given: argparse.Namespace, ports: list[int], version: str) -> None:
    end = time.monotonic() + READY_S
    for port in ports:
        while served(port, given.index) != version:
            assert time.monotonic() < end, "the version was never served"
            time.sleep(0.05)


def served(port: int, index: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        found: str = json.load(answer)["indexes"][index]
        return found


@contextmanager
def servers(given: argparse.Namespace, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """`hivlp serve`, so many times, ready."""
    ports, running = [], []
    try:
        for _ in range(count):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(free.getsockname()[1])
            command = [
                sys.executable,
                "-m",
                "hivlp.service.main",
                "serve",
                "--port",
                str(ports[-1]),
            ]
            own = {"HIVLP_HOME": str(given.home), "HIVLP_CACHE__MAX_BYTES": "0"}
            environment = {**os.environ, **own}
            running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL))  # fmt: skip
        for port in ports:
            ready(port)
        yield ports, [process.pid for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


def ready(port: int) -> None:
    end = time.monotonic() + READY_S
    while True:
        assert time.monotonic() < end, "the server never became ready"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                return
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    main()

"""The service under load, beside itself without overlap or batches, and beside a plain service.

    python bench/service.py make --rows 100000      # index, queries, graphs; kept, made once
    python bench/service.py alone --rows 100000     # in one process: what a search adds to encoding
    python bench/service.py http --rows 100000      # latency and throughput over HTTP
    python bench/service.py overload --rows 100000  # three times as much as it can answer

The gallery is synthetic (`synthetic.py`, the kind setting) and so are the queries' early answers;
they take the time of a BERT 768 wide, 6 layers, 16 tokens, random weights (`timed_encoder.py`). All
servers run at once and are asked in turn, a few seconds each in every round, so that what else the
machine does touches all alike; medians over rounds. ANN recall is measured through HTTP against an
exhaustive scan.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from http_load import Request, run_closed, run_load
from measure import RESULTS, WORK, exact_top, interleaved, machine, median
from synthetic import make_queries, make_rows
from timed_encoder import DIMS
from timed_servers import NAME, Given, load, one_graph

QUERIES = 4_000
READY_S = 900
K = 10
BODY: dict[str, Any] = {"k": K, "index": NAME}
HERE = Path(__file__).parent
# Settings of our own server, by what is switched off.
VARIANTS: dict[str, dict[str, str]] = {
    "hivlp": {},
    "no overlap": {"HIVLP_BATCHES__OVERLAP": "false"},
    "no batches": {"HIVLP_BATCHES__MAX_SIZE": "1"},
}
PLAIN = "plain"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("make", "alone", "http", "overload"))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load of a round")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--plain-ef", type=int, default=128)
    options = parser.parse_args()
    given = setting(options.rows)
    make_all(options.rows, given)
    found = {"make": made, "alone": alone, "http": http, "overload": overload}[options.what](
        options, given
    )
    if options.what != "make":
        name = f"service_{options.what}_{options.rows}.json"
        text = json.dumps({"machine": machine(), **found}, indent=1)
        (RESULTS / name).write_text(text + "\n", encoding="utf-8")
    return 0


def setting(rows: int) -> Given:
    folder = WORK / f"service-{rows}"
    return Given(folder / "home", NAME, folder / "queries.npz")


def make_all(rows: int, given: Given) -> None:
    """The index of these rows, and queries in its own space."""
    given.queries.parent.mkdir(parents=True, exist_ok=True)
    array = make_rows(WORK / f"service-rows-{rows}.npy", rows)
    if not (given.home / "indexes" / NAME / "CURRENT").exists():
        command = (
            *("import-vectors", "--vectors", str(WORK / f"service-rows-{rows}.npy")),
            *("--home", str(given.home), "--index", NAME, "--family", "graph", "--rows", "fp16"),
        )
        subprocess.run([sys.executable, "-m", "hivlp.service.main", *command], check=True)
    if not given.queries.exists():
        turn = rotation(given)
        queries = make_queries(array, QUERIES, seed=1)
        finest = queries.levels[-1] @ turn
        levels = [early(finest, dim, share) for dim, share in zip(DIMS, (0.12, 0.08), strict=False)]
        truth = exact_top(np.asarray(array), queries.levels[-1], K)
        named = {f"level{n}": part for n, part in enumerate((*levels, finest), 1)}
        np.savez(given.queries, truth=truth, **named)


def rotation(given: Given) -> np.ndarray:
    from hivlp.index.snapshot.store import SnapshotStore

    store = SnapshotStore(given.home)
    found: np.ndarray = np.load(store.path(NAME, store.current(NAME)) / "rotation.npy")
    return found


def early(finest: np.ndarray, dim: int, share: float) -> np.ndarray:
    """The queries' own prefixes with noise of this share of their length: an early answer."""
    rng = np.random.default_rng(dim)
    prefix = finest[:, :dim] / np.linalg.norm(finest[:, :dim], axis=1, keepdims=True)
    shake = rng.standard_normal(prefix.shape).astype(np.float32)
    shaken = prefix + share * shake / np.linalg.norm(shake, axis=1, keepdims=True)
    return (shaken / np.linalg.norm(shaken, axis=1, keepdims=True)).astype(np.float32)


def made(_: argparse.Namespace, given: Given) -> dict[str, Any]:
    print(f"made: {given.queries.parent}")
    return {}


def alone(options: argparse.Namespace, given: Given) -> dict[str, Any]:
    """One search at a time in this process: the encoder alone, and with every plan."""
    from concurrent.futures import ThreadPoolExecutor

    from hivlp.service.queries import Setting, text_query
    from hivlp.service.schemas import TextSearch
    from hivlp.service.settings import Limits, Settings
    from hivlp.service.timeline import Timeline
    from hivlp.service.work import find

    settings = Settings(home=given.home, indexes=(NAME,))
    with load(given, settings).lease(NAME) as served, ThreadPoolExecutor(1) as ahead:
        encoder = served.model.encoders["text"]

        def encode(number: int) -> None:
            list(encoder.encode(encoder.prepare([f"q{number % QUERIES}"])))

        def searching(**asked: Any) -> Callable[[int], object]:
            overlap = asked.pop("overlap", False)

            def search(number: int) -> object:
                query = text_query(f"q{number % QUERIES}", Limits())
                wanted = TextSearch(query=query.text, index=NAME, k=K, **asked)
                own = Setting(served.searcher, served.model, "image", Limits(), Timeline())
                return find(query, wanted, own, ahead if overlap else None)

            return search

        one = one_graph(given)

        def encode_at_once(number: int) -> None:
            list(one.encode(one.prepare([f"q{number % QUERIES}"])))

        contenders = {
            "encoder alone": encode,
            "encoder as one graph": encode_at_once,
            "cascade, overlapped": searching(plan="cascade", overlap=True),
            "cascade, in turn": searching(plan="cascade"),
            "funnel": searching(plan="funnel"),
        }
        times = interleaved(contenders, 200 * options.rounds)
    base = median(times["encoder alone"])
    shown = {name: {"ms": median(one), "ratio": median(one) / base} for name, one in times.items()}
    for name, one in shown.items():
        print(f"{name:<24}{one['ms']:8.2f} ms  {one['ratio']:5.2f} of the encoder")
    return {"rows": options.rows, "contenders": shown}


def http(options: argparse.Namespace, given: Given) -> dict[str, Any]:
    """Every server with so many clients, in turn."""
    found: dict[str, Any] = {"rows": options.rows, "clients": {}}
    with all_servers(options, given) as ports:
        found["recall"] = {name: recall(port, given, name) for name, port in ports.items()}
        print({name: round(value, 4) for name, value in found["recall"].items()}, flush=True)
        for clients in options.clients:
            rounds: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in ports}
            for number in range(options.rounds):
                for name, port in ports.items():
                    start = number * 997
                    done, rate = run_closed(port, asking(name, start), clients, options.seconds)
                    rounds[name].append(
                        (done.percentile(50), done.percentile(99), rate, done.failed)
                    )
            found["clients"][clients] = {name: summary(many) for name, many in rounds.items()}
            for name, one in found["clients"][clients].items():
                print(f"{clients:>3} clients  {name:<12}{one}", flush=True)
    return found


def overload(options: argparse.Namespace, given: Given) -> dict[str, Any]:
    """A steady load, then three times as much as can be answered: who is accepted, and how soon."""
    found: dict[str, Any] = {"rows": options.rows, "rounds": []}
    with ExitStack() as held:
        port = held.enter_context(server("hivlp", options, given))
        _, capacity = run_closed(port, asking("hivlp"), 64, 2 * options.seconds)
        for number in range(options.rounds):
            one: dict[str, Any] = {"capacity": capacity}
            for name, share in (("steady", 0.7), ("full", 0.95), ("three times", 3.0)):
                make = asking("hivlp", 1_000 * number)
                done = run_load([port], make, share * capacity, options.seconds, number)
                well = [ms for status, ms in done.each if status == 200]
                refused = [ms for status, ms in done.each if status == 429]
                one[name] = {
                    "accepted": len(well),
                    "p50": float(np.percentile(well, 50)),
                    "p99": float(np.percentile(well, 99)),
                    "refused": len(refused),
                    "refused_p99": float(np.percentile(refused, 99)) if refused else None,
                    "others": len(done.each) - len(well) - len(refused),
                }
                print(name, one[name], flush=True)
            found["rounds"].append(one)
    return found


def asking(name: str, start: int = 0) -> Callable[[int], Request]:
    """Query after query; each is a new one to the cache for a long while."""

    def make(number: int) -> Request:
        text = f"q{(start + number) % QUERIES} {start + number}"
        body = {"query": text, "k": K} if name == PLAIN else {"query": text, **BODY}
        return "POST", "/search/text", json.dumps(body).encode()

    return make


def summary(rounds: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    p50, p99, rate, failed = zip(*rounds, strict=True)
    return {
        "p50": round(statistics.median(p50), 2),
        "p99": round(statistics.median(p99), 2),
        "per_second": round(statistics.median(rate), 1),
        "failed": sum(failed),
    }


def recall(port: int, given: Given, name: str) -> float:
    """ANN recall@10 of a few hundred queries, one at a time."""
    with np.load(given.queries) as kept:
        truth = kept["truth"]
    shares = []
    for number in range(0, QUERIES, 20):
        _, path, body = asking(name, number)(0)
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            hits = json.load(answer)["hits"]
        rows = {int(hit["id"] if name != PLAIN else hit["metadata"]["id"]) for hit in hits}
        shares.append(len(rows & set(truth[number].tolist())) / K)
    return statistics.mean(shares)


@contextmanager
def all_servers(options: argparse.Namespace, given: Given) -> Iterator[dict[str, int]]:
    with ExitStack() as held:
        names = (*VARIANTS, PLAIN)
        yield {name: held.enter_context(server(name, options, given)) for name in names}


@contextmanager
def server(name: str, options: argparse.Namespace, given: Given) -> Iterator[int]:
    """One server, ready; ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    kind = PLAIN if name == PLAIN else "hivlp"
    command = [
        *(sys.executable, str(HERE / "timed_servers.py"), kind, "--home", str(given.home)),
        *("--index", NAME, "--queries", str(given.queries), "--port", str(port)),
        *("--ef", str(options.plain_ef)),
    ]
    environment = {**os.environ, "HIVLP_CACHE__MAX_BYTES": "0", **VARIANTS.get(name, {})}
    environment.pop("HIVLP_BENCH_HOME", None)
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_ready(port, process)
            yield port
        finally:
            process.terminate()


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
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


if __name__ == "__main__":
    sys.exit(main())

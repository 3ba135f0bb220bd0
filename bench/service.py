"""The service under load, beside itself without overlap or batches, and beside a plain service.

    python bench/service.py make --rows 100000      # index, queries, graphs; kept, made once
    python bench/service.py alone --rows 100000     # in one process: what a search adds to encoding
    python bench/service.py http --rows 100000      # latency and throughput over HTTP
    python bench/service.py shapes --rows 100000    # batch, cache hit, filter, early exit, pictures
    python bench/service.py floor --rows 100000     # what HTTP and the pipeline add to a search
    python bench/service.py overload --rows 100000  # three times as much as it can answer

The gallery is synthetic (`synthetic.py`, the kind setting) and so are the queries' early answers;
they take the time of HiVLP's own towers of base size, random weights (`timed_encoder.py`). With
`alone --home HOME --index NAME` a home with a model is asked instead, as the demo's. Servers run at
once and are asked in turn, a few seconds each in every round, so that what else the machine does
touches all alike; medians over rounds. ANN recall is measured through HTTP against an exhaustive
scan, on queries that widths were not measured with.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from http_load import Load, Request, run_closed, run_load
from library_calls import demo_subject, library_times, synthetic_subject
from measure import RESULTS, interleaved, machine, median
from server_processes import PLAIN, VARIANTS, Blocking, server
from timed_encoder import picture_of
from timed_home import MEASURED_WITH, NAME, QUERIES, SHADES, Given, K, make_home

BODY: dict[str, Any] = {"k": K, "index": NAME}
HALF = {"field": "shade", "range": {"lt": SHADES // 2}}
ANSWERS = QUERIES - MEASURED_WITH
PICTURES = 64
Make = Callable[[int], Request]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = {
        "alone": alone,
        "http": http,
        "shapes": shapes,
        "floor": floor,
        "overload": overload,
    }
    parser.add_argument("what", choices=("make", *commands))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load of a round")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--plain-ef", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=(*VARIANTS, PLAIN), default=(*VARIANTS, PLAIN))
    parser.add_argument("--max-wait-ms", help="overload: limits.max_wait_ms, unless the default")
    parser.add_argument("--pictures", action="store_true", help="http: pictures, not texts")
    parser.add_argument("--home", type=Path, help="alone: a home with a model")
    parser.add_argument("--index", default="default", help="alone: the home's index")
    options = parser.parse_args()
    if options.home is None:
        make_home(options.rows)
    if options.what == "make":
        return 0
    found = commands[options.what](options)
    about = options.rows if options.home is None else options.index
    about = f"{about}_pictures" if options.pictures else about
    about = f"{about}_wait{options.max_wait_ms}" if options.max_wait_ms else about
    text = json.dumps({"machine": machine(), **found}, indent=1)
    name = f"service_{options.what}_{about}.json"
    (RESULTS / name).write_text(text + "\n", encoding="utf-8")
    return 0


def alone(options: argparse.Namespace) -> dict[str, Any]:
    """One search at a time in this process: the encoder alone, and with every plan."""
    given = None if options.home is None else (options.home, options.index)
    found: dict[str, Any] = {"rows": options.rows, "kinds": {}}
    with synthetic_subject(options.rows) if given is None else demo_subject(*given) as subject:
        for kind in subject.kinds:
            times = library_times(subject, kind, options.rounds)
            base = median(times["encoder alone"])
            shown = {
                n: {"ms": median(one), "ratio": median(one) / base} for n, one in times.items()
            }
            found["kinds"][kind] = shown
            for name, one in shown.items():
                print(f"{kind:<6}{name:<24}{one['ms']:8.2f} ms  {one['ratio']:5.2f}", flush=True)
            print(f"{kind:<6}stopped early: {subject.stopped_early(kind):.3f}", flush=True)
            found["kinds"][kind]["stopped_early"] = subject.stopped_early(kind)
    return found


def http(options: argparse.Namespace) -> dict[str, Any]:
    """Every server with so many clients, in turn."""
    found: dict[str, Any] = {"rows": options.rows, "clients": {}}
    asking = pictures if options.pictures else texts
    with ExitStack() as held:
        ports = {name: held.enter_context(server(name, options)) for name in options.only}
        found["recall"] = {name: recall(port, options.rows, name) for name, port in ports.items()}
        print({name: round(value, 4) for name, value in found["recall"].items()}, flush=True)
        for clients in options.clients:
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
            for number in range(options.rounds):
                for name, port in ports.items():
                    make = asking(name, number * 997)
                    done, rate = run_closed(port, make, clients, options.seconds)
                    rounds[name].append(told(done, rate))
            found["clients"][clients] = {name: summary(many) for name, many in rounds.items()}
            for name, one in found["clients"][clients].items():
                print(f"{clients:>3} clients  {name:<12}{one}", flush=True)
    return found


def shapes(options: argparse.Namespace) -> dict[str, Any]:
    """Kinds of request beside plain texts, one client each, in turn at one server."""
    found: dict[str, Any] = {"rows": options.rows}
    with ExitStack() as held:
        port = held.enter_context(server("hivlp", options))
        kept = held.enter_context(server("cached", options))
        asked: dict[str, tuple[int, Make]] = {
            "text": (port, texts("hivlp")),
            "text, early exit": (port, texts("hivlp", early_exit=True)),
            "text, 1 % by a filter": (port, texts("hivlp", filter={"field": "shade", "eq": 7})),
            "text, half by a filter": (port, texts("hivlp", filter=HALF)),
            "batch of 8": (port, batches),
            "cache hit": (kept, lambda _: texts("hivlp")(0)),
            "picture": (port, pictures("hivlp")),
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
        for number in range(options.rounds):
            for name, (where, make) in asked.items():
                moved = shifted(make, number * 499)
                done, rate = run_closed(where, moved, 1, options.seconds)
                rounds[name].append(told(done, rate))
        for name, many in rounds.items():
            found[name] = summary(many)
            print(f"{name:<24}{found[name]}", flush=True)
    return found


def floor(options: argparse.Namespace) -> dict[str, Any]:
    """A search over HTTP beside the same library call, with an encoder that takes no time."""
    with ExitStack() as held:
        port = held.enter_context(server("instant", options))
        subject = held.enter_context(synthetic_subject(options.rows, instant=True))
        client = held.enter_context(Blocking.to(port))
        make = texts("hivlp")
        searches: dict[str, Callable[[int], object]] = {
            "library, in turn": subject.searching("text", plan="cascade"),
            "library, overlapped": subject.searching("text", plan="cascade", overlap=True),
            "over HTTP": lambda number: client.ask(*make(number)),
            "alive over HTTP": lambda _: client.ask("GET", "/livez", b""),
        }
        times = interleaved(searches, 400 * options.rounds)
        shown = {name: median(one) for name, one in times.items()}
        shown["client's processor time"] = client.processor_ms
        for name, search in searches.items():
            shown[f"{name}, processor"] = processor_ms(client, search, 100 * options.rounds)
    for name, ms in shown.items():
        print(f"{name:<32}{ms:8.3f} ms", flush=True)
    return {"rows": options.rows, "ms": shown}


def processor_ms(client: Blocking, search: Callable[[int], object], times: int) -> float:
    """What a search costs this process and the server's, all threads: nothing waits for it."""
    began = time.process_time() + client.server_s()
    for number in range(times):
        search(number)
    return 1e3 * (time.process_time() + client.server_s() - began) / times


def overload(options: argparse.Namespace) -> dict[str, Any]:
    """A steady load, then three times as much as can be answered: who is accepted, and how soon."""
    found: dict[str, Any] = {"rows": options.rows, "rounds": []}
    found["max_wait_ms"] = options.max_wait_ms
    more = {} if options.max_wait_ms is None else {"HIVLP_LIMITS__MAX_WAIT_MS": options.max_wait_ms}
    with server("hivlp", options) as port:
        _, capacity = run_closed(port, texts("hivlp"), 64, 2 * options.seconds)
    with server("hivlp", options, more) as port:
        for number in range(options.rounds):
            one: dict[str, Any] = {"capacity": capacity}
            for name, share in (("steady", 0.7), ("full", 0.95), ("three times", 3.0)):
                make = texts("hivlp", 1_000 * number)
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


def texts(name: str, start: int = 0, **asked: Any) -> Make:
    """Query after query; each is a new one to the cache for a long while."""
    more = {"k": K} if name == PLAIN else {**BODY, **asked}

    def make(number: int) -> Request:
        at = start + number
        body = {"query": f"q{MEASURED_WITH + at % ANSWERS} {at}", **more}
        return "POST", "/search/text", json.dumps(body).encode()

    return make


def pictures(name: str, start: int = 0) -> Make:
    """A few pictures, again and again, made before anything is timed."""
    more = {"k": K} if name == PLAIN else BODY
    bodies = [
        json.dumps({"image": base64.b64encode(picture_of(n)).decode(), **more}).encode()
        for n in range(MEASURED_WITH, MEASURED_WITH + PICTURES)
    ]
    return lambda number: ("POST", "/search/image", bodies[(start + number) % PICTURES])


def batches(number: int) -> Request:
    """Eight texts in one request."""
    searches = [{"kind": "text", **json.loads(texts("hivlp", 8 * number)(i)[2])} for i in range(8)]
    return "POST", "/search/batch", json.dumps({"searches": searches}).encode()


def shifted(make: Make, by: int) -> Make:
    """The same requests from a later one on."""
    return lambda number: make(by + number)


def told(done: Load, rate: float) -> dict[str, float]:
    """What a load was like."""
    return {
        "p50": done.percentile(50),
        "p99": done.percentile(99),
        "per_second": rate,
        "client_ms": done.client_ms,
        "failed": done.failed,
    }


def summary(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over rounds, and how many requests failed in all."""
    kept = {
        name: round(statistics.median(one[name] for one in rounds), 3)
        for name in ("p50", "p99", "per_second", "client_ms")
    }
    return {**kept, "failed": sum(one["failed"] for one in rounds)}


def recall(port: int, rows: int, name: str) -> float:
    """ANN recall@10 of a few hundred queries, one at a time."""
    truth = Given.of(rows).truth()
    shares = []
    for number in range(0, ANSWERS, 8):
        _, path, body = texts(name, number)(0)
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            hits = json.load(answer)["hits"]
        found = {int(hit["id"] if name != PLAIN else hit["metadata"]["id"]) for hit in hits}
        shares.append(len(found & set(truth[MEASURED_WITH + number].tolist())) / K)
    return statistics.mean(shares)


if __name__ == "__main__":
    sys.exit(main())

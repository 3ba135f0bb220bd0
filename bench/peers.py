"""The strongest searches there are beside the entered graph: who is fastest at equal recall?

One query at a time, one thread, ANN recall@10 against exact fp32 with 500 queries, in the three
settings of `synthetic.py`. Peers wait for the finest query and then search; the cascade's early
stages hide behind the encoder, so for it `after` counts, and `early` is printed beside it. Memory
doesn't hold all at once: groups run one by one, each with Flat-768 and the entered graph in it.
Contenders of one pass take different queries, so that none finds another's rows in the caches.

    pip install scalable-vs hnswlib usearch scann
    python bench/peers.py build vamana --rows 1000000 --threads 2     # `graphs`: ours, both levels
    python bench/peers.py search graphs       # peers that are graphs; `lists`: those that scan;
                                              # `entered`, `codes`, `pages`: ours in other ways
    python bench/peers.py tables graphs --whole

`--clock processor` leaves out what a shared processor did for others: use it where a search takes
more than a millisecond and the cores aren't yours.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import graph_entry
from entered import huge_share
from measure import RESULTS, WORK, exact_top, interleaved, machine, median, overlap, peak_gib
from peer_groups import (
    BATCH,
    EARLY,
    Run,
    World,
    codes_group,
    early,
    entered_group,
    flat_alone,
    opened,
    peers_group,
    walkers_of,
)
from peer_indexes import PEERS
from peer_kit import K, file_of
from peer_pages import pages_group, walkers
from peer_tables import print_tables
from synthetic import DIM, DIMS, SETTINGS, make_queries, make_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

PEER_GROUPS = {
    "graphs": ("hnswlib", "hnswlib links", "usearch f16", "vamana", "vamana int8"),
    "lists": ("panorama flat", "ivf rabitq", "ivf rabitq4", "ivf pq192x4fs", "scann"),
}


def rows_of(count: int) -> np.ndarray:
    """The first `count` of the million rows."""
    return make_rows(WORK / "rows-1000000.npy", 1_000_000)[:count]


def build(name: str, count: int, threads: int) -> None:
    """Build a peer and keep it, its seconds and bytes beside it; skipped when it is there."""
    if name == "graphs":
        for dim in (DIMS[0], DIM):
            faiss.omp_set_num_threads(threads)
            graph_entry.build(rows_of(count), dim, WORK / f"hnsw-{dim}-{count}.faiss")
        return
    peer = PEERS[name]
    path = file_of(name.replace(" ", "-"), count, peer.suffix)
    note = Path(f"{path}.json")
    if note.exists():
        print(f"{name} of {count}: there", flush=True)
        return
    rows = rows_of(count)
    started = time.monotonic()
    peer.build(rows, path, threads)
    seconds = time.monotonic() - started
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    told = {
        "seconds": round(seconds),
        "threads": threads,
        "bytes": sum(f.stat().st_size for f in files),
        "peak_gib": peak_gib(),
    }
    note.write_text(json.dumps(told))
    print(f"{name} of {count}: {told}", flush=True)


def plan_of(group: str, world: World, places: Sequence[str]) -> Any:
    """What fills a run with the group's contenders."""
    if group == "entered":
        return partial(entered_group, world=world)
    if group == "codes":
        return partial(codes_group, world=world, walkers=walkers_of(world))
    if group == "pages":
        mapped = rows_of(len(world.rows)).view(np.ndarray)
        return partial(pages, world=world, places=walkers(world, mapped, places))
    return partial(peers_group, world=world, searches=opened(PEER_GROUPS[group], world))


def pages(run: Run, world: World, places: dict[str, Any]) -> None:
    """The graph in every place, entered at level 1's 40 and at level 2's rows."""
    flat_alone(run, world)
    early(run, world.early, EARLY[1:2])
    pages_group(run, places)


def shifted(run: Run) -> dict[str, Any]:
    """Contenders by pass: each takes another query, so that none warms the caches for the next."""
    step = max(1, run.count // len(run.contenders))
    return {
        label: partial(_at, one, place * step, run.count)
        for place, (label, one) in enumerate(run.contenders.items())
    }


def _at(one: Any, shift: int, count: int, number: int) -> np.ndarray:
    return one((number + shift) % count)


def truth_of(rows: np.ndarray, finest: np.ndarray, setting: str) -> np.ndarray:
    """The exact top 10, kept on disk once found; kind and unkind share theirs."""
    name = "gap" if setting == "gap" else "kind"
    path = WORK / f"truth-{name}-{len(rows)}-{len(finest)}.npy"
    if not path.exists():
        np.save(path, exact_top(rows, finest, K))
    return np.load(path)


def known(path: Path, queries: int) -> dict[str, dict[str, float]]:
    """Recalls by setting and label from an earlier run of the same queries: they don't change."""
    if not path.exists():
        return {}
    told = json.loads(path.read_text())
    if told["queries"] != queries:
        return {}
    return {
        name: {rung["label"]: rung["recall"] for rung in own["found"]}
        for name, own in told["settings"].items()
    }


def measured(
    run: Run,
    truth: np.ndarray,
    passes: int,
    recalls: Mapping[str, float],
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Recall and median milliseconds of every contender, and the early time it waits for."""
    single = {label: one for label, one in shifted(run).items() if label not in run.batches}
    ms = {label: median(own) for label, own in interleaved(single, passes, 3, clock).items()}
    batched = interleaved({label: run.contenders[label] for label in run.batches}, 5, 1, clock)
    ms |= {label: median(own) / BATCH for label, own in batched.items()}
    found = []
    for label, one in run.contenders.items():
        exact = label.startswith(("flat", "panorama flat"))
        recall = 1.0 if exact else recalls.get(label, -1.0)
        if recall < 0:
            recall = overlap([one(i) for i in range(run.count)], truth)
        early = sum(ms[name] for name in run.waits[label])
        entry = {"label": label, "recall": round(recall, 4), "ms": round(ms[label], 4)}
        found.append({**entry, "early_ms": round(early, 4)})
    return found


def search(group: str, count: int, options: argparse.Namespace) -> None:
    """Run one group in every setting, and keep what it found as JSON."""
    rows = rows_of(count)
    world = World.of(rows, options.pages)
    plan = plan_of(group, world, options.places)
    told: dict[str, Any] = {"machine": machine(), "faiss": faiss.__version__, "rows": count}
    told |= {
        "clock": options.clock,
        "pages": options.pages,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
    }
    told |= {"queries": options.queries, "passes": options.passes, "settings": {}}
    path = RESULTS / f"peers_{group}_{count}{options.suffix}.json"
    recalls = known(path, options.queries)
    for name in options.settings:
        noise, gap = SETTINGS[name]
        queries = make_queries(rows, options.queries, noise=noise, gap=gap)
        run = Run(queries)
        truth = truth_of(rows, run.level(3), name)
        plan(run)
        load = os.getloadavg()[0]
        clock = time.thread_time if options.clock == "processor" else time.perf_counter
        found = measured(run, truth, options.passes, recalls.get(name, {}), clock)
        told["settings"][name] = {"load": [load, os.getloadavg()[0]], "found": found}
        for entry in found:
            print(name, entry, flush=True)
        told["huge_share"] = huge_share()
        told["peak_gib"], told["built"] = peak_gib(), notes(count)
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")


def notes(count: int) -> Mapping[str, Any]:
    """What each build noted."""
    found = {}
    for name, peer in PEERS.items():
        note = Path(f"{file_of(name.replace(' ', '-'), count, peer.suffix)}.json")
        if note.exists():
            found[name] = json.loads(note.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "search", "tables"))
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--passes", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pages", choices=("huge", "small"), default="huge")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--suffix", default="", help="added to the result's name")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--places", nargs="*", default=["mapped", "small", "cells", "walk"])
    parser.add_argument("--whole", action="store_true", help="every rung")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if options.what == "build":
        for name in options.names or list(PEERS):
            build(name, options.rows, options.threads)
    elif options.what == "search":
        faiss.omp_set_num_threads(1)
        faiss.cvar.distance_compute_blas_threshold = 4096
        print(machine(), "faiss", faiss.__version__, flush=True)
        for name in options.names:
            search(name, options.rows, options)
    else:
        print_tables(RESULTS, options.names, options.whole)


if __name__ == "__main__":
    main()

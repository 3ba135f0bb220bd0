"""Level 1 alone as a gallery grows from 100,000 to 10,000,000 rows.

What it asks: which index over the 128-d prefixes holds the finest level's exact top 10 within K1
rows, in how much time and memory, and how does that time grow with the rows at equal recall? The
finest rows of ten million items don't fit here, and needn't: they are made in a stream, their
prefixes are kept as fp16, and the exact top 10 of every query is found as they pass. The queries
aim at the first 100,000 rows, which all sizes share.

    python bench/level1_growth.py make            # the prefixes and the truth of 10,000,000 rows
    python bench/level1_growth.py build graph --rows 10000000 --threads 2
    python bench/level1_growth.py search --rows 10000000
    python bench/level1_growth.py grown --passes 20     # all sizes side by side
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from measure import RESULTS, WORK, interleaved, machine, median, overlap, peak_gib
from synthetic import CHUNK, DIMS, SETTINGS, Queries, make_queries, make_rows, stream_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

SIZES = (100_000, 1_000_000, 10_000_000)
STOPS = (*SIZES[:2], 2_000_000, 3_000_000, 5_000_000, 7_000_000)
LEVEL_DIM = DIMS[0]
DEGREE, CONSTRUCTION = 16, 80
KEEPS = (100, 300, 1000, 3000)
SCANS = {"sq8": "", "pq64x4fs": "PQ64x4fs", "rabitq fs": "RaBitQfs"}
QUERIES, K = 300, 10


def growth_queries() -> dict[str, Queries]:
    """Queries by setting; their targets are among the first 100,000 rows."""
    rows = make_rows(WORK / f"rows-{SIZES[1]}.npy", SIZES[1])[: SIZES[0]]
    return {
        name: make_queries(rows, QUERIES, noise=noise, gap=gap)
        for name, (noise, gap) in SETTINGS.items()
    }


def make(count: int) -> None:
    """Stream the rows: prefixes to disk, and the exact top 10 at every size of SIZES."""
    finest = np.concatenate([q.levels[-1] for q in growth_queries().values()])
    part = prefix_file(count).with_suffix(".part")
    out = np.lib.format.open_memmap(part, "w+", np.float16, (count, LEVEL_DIM))
    best_s = np.full((len(finest), K), -2, np.float32)
    best_r = np.full((len(finest), K), -1, np.int64)
    done, started = 0, time.monotonic()
    for block in stream_rows(count):
        prefix = block[:, :LEVEL_DIM]
        out[done : done + len(block)] = prefix / np.linalg.norm(prefix, axis=1, keepdims=True)
        best_s, best_r = merged(best_s, best_r, finest @ block.T, done)
        done += len(block)
        if done in SIZES:
            np.save(truth_file(done), best_r)
        if done % (10 * CHUNK) == 0:
            print(f"  {done} rows, {time.monotonic() - started:.0f} s", flush=True)
    out.flush()
    part.replace(prefix_file(count))


def merged(
    best_s: np.ndarray, best_r: np.ndarray, scores: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """The top 10 so far and a block's scores (n, m) to the top 10 of both."""
    part = np.argpartition(-scores, K, axis=1)[:, :K]
    all_s = np.concatenate([best_s, np.take_along_axis(scores, part, 1)], 1)
    all_r = np.concatenate([best_r, part + start], 1)
    order = np.argsort(-all_s, axis=1, kind="stable")[:, :K]
    return np.take_along_axis(all_s, order, 1), np.take_along_axis(all_r, order, 1)


def prefix_file(count: int) -> Path:
    return WORK / f"prefix-{count}.npy"


def truth_file(count: int) -> Path:
    return WORK / f"growth-truth-{count}.npy"


def index_file(name: str, count: int) -> Path:
    return WORK / f"growth-{name.replace(' ', '-')}-{count}.faiss"


def prefixes(count: int) -> np.ndarray:
    """The first `count` prefixes, (count, 128) float16, memory-mapped."""
    return np.load(prefix_file(SIZES[-1]), mmap_mode="r")[:count]


def blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """fp32 copies of at most CHUNK rows."""
    for start in range(0, len(rows), CHUNK):
        yield np.asarray(rows[start : start + CHUNK], np.float32)


def empty(name: str, count: int) -> Any:
    """An empty index of one of the names that are measured."""
    if name == "graph":
        uniform = faiss.ScalarQuantizer.QT_8bit_uniform
        graph = faiss.IndexHNSWSQ(LEVEL_DIM, uniform, DEGREE, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = CONSTRUCTION
        return graph
    if name == "sq8":
        uniform = faiss.ScalarQuantizer.QT_8bit_uniform
        return faiss.IndexScalarQuantizer(LEVEL_DIM, uniform, faiss.METRIC_INNER_PRODUCT)
    lists = 512 if count < 500_000 else 2048 if count < 5_000_000 else 4096
    factory = {"ivf sq8": f"IVF{lists},SQ8", "ivf pq64x4fs": f"IVF{lists},PQ64x4fs", **SCANS}
    return faiss.index_factory(LEVEL_DIM, factory[name], faiss.METRIC_INNER_PRODUCT)


def build(name: str, count: int, threads: int) -> None:
    """Build one index and keep it, with how long it took beside it; skipped when it is there."""
    path = index_file(name, count)
    if path.exists():
        return
    rows = prefixes(count)
    faiss.omp_set_num_threads(threads)
    index = empty(name, count)
    started = time.monotonic()
    sample = rows[:: max(1, count // 300_000)] if "ivf" in name else rows[:: count // 50_000]
    index.train(np.asarray(sample, np.float32))
    for part in blocks(rows):
        index.add(part)
        spent = time.monotonic() - started
        if index.ntotal == count or (name == "graph" and index.ntotal in STOPS):
            keep(name, index, spent, threads)
        elif name == "graph" and index.ntotal % (10 * CHUNK) == 0:
            print(f"  {index.ntotal} rows, {spent:.0f} s", flush=True)


def keep(name: str, index: Any, seconds: float, threads: int) -> None:
    """Write an index and what it took; a graph on its way to ten million is kept at stops, too."""
    path = index_file(name, index.ntotal)
    faiss.write_index(index, str(path))
    note = {"seconds": round(seconds, 1), "threads": threads, "bytes": path.stat().st_size}
    note["peak_gib"] = peak_gib()
    path.with_suffix(".json").write_text(json.dumps(note))
    print(f"{name} of {index.ntotal}: {note}", flush=True)


def ladder(name: str) -> list[tuple[str, Any, int]]:
    """(label, search parameters, rows fetched) of one index; a scan's fewer rows are its first."""
    if name == "graph":
        beams = [(ef, keep) for keep in KEEPS for ef in (keep, 2 * keep) if ef <= 3000]
        beams = [(64, 20), (128, 40), (160, 80), (256, 160), *beams]
        make = faiss.SearchParametersHNSW
        return [(f"ef {ef} keeps {keep}", make(efSearch=ef), keep) for ef, keep in beams]
    if name.startswith("ivf"):
        make = faiss.SearchParametersIVF
        return [(f"{p} lists keeps 1000", make(nprobe=p), 1000) for p in (16, 32, 64, 128, 256)]
    return [("keeps 3000", None, 3000)]


def answer(index: Any, queries: np.ndarray, params: Any, keep: int, number: int) -> np.ndarray:
    """The rows kept for one query."""
    at = number % len(queries)
    return index.search(queries[at : at + 1], keep, params=params)[1][0]


def rungs_of(
    indexes: Mapping[str, Any], early: np.ndarray, truth: list[np.ndarray], scans: int, passes: int
) -> list[dict[str, Any]]:
    """Share of the exact top 10 held, and milliseconds, of every rung for one setting's queries.

    Scans are timed at 1,000 rows in a tenth of the passes, and asked for 3,000 by `scans` queries.
    """
    quick: dict[str, Callable[[int], np.ndarray]] = {}
    slow: dict[str, Callable[[int], np.ndarray]] = {}
    held: dict[str, float] = {}
    for name, index in indexes.items():
        asked = scans if name in SCANS else len(early)
        for label, params, keep in ladder(name):
            found = [answer(index, early, params, keep, i) for i in range(asked)]
            for own in KEEPS if name in SCANS else (keep,):
                text = f"{name}: {f'keeps {own}' if name in SCANS else label}"
                held[text] = held_of([f[:own] for f in found], truth[:asked])
            if name in SCANS:
                slow[f"{name}: keeps 1000"] = partial(answer, index, early, None, 1000)
            else:
                quick[f"{name}: {label}"] = partial(answer, index, early, params, keep)
    times = interleaved(quick, passes)
    times |= interleaved(slow, max(5, passes // 10), clock=time.thread_time)
    ms = {label: round(median(own), 4) for label, own in times.items()}
    return [{"label": at, "held": round(h, 4), "ms": ms.get(at)} for at, h in held.items()]


def search(
    names: list[str], count: int, passes: int, scans: int
) -> dict[str, list[dict[str, Any]]]:
    """Every rung in every setting."""
    indexes = {name: faiss.read_index(str(index_file(name, count))) for name in names}
    truth = truth_of(count)
    found = {}
    for which, (setting, queries) in enumerate(growth_queries().items()):
        early = np.ascontiguousarray(queries.levels[0])
        found[setting] = rungs_of(indexes, early, truth[which], scans, passes)
        for rung in found[setting]:
            print(setting, rung, flush=True)
    return found


def truth_of(count: int) -> list[list[np.ndarray]]:
    """Exact rows by setting and query; between the sizes, those of ten million's that are there."""
    if truth_file(count).exists():
        return list(np.load(truth_file(count)).reshape(len(SETTINGS), QUERIES, K))
    whole = np.load(truth_file(SIZES[-1])).reshape(len(SETTINGS), QUERIES, K)
    return [[rows[rows < count] for rows in own] for own in whole]


def held_of(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """Mean share held, over the queries that have exact rows there."""
    pairs = [(f, t) for f, t in zip(found, truth, strict=True) if len(t)]
    return overlap([f for f, _ in pairs], [t for _, t in pairs])


def notes(names: list[str], count: int) -> Mapping[str, Any]:
    """What each build noted."""
    paths = {name: index_file(name, count).with_suffix(".json") for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def grown(passes: int) -> None:
    """All sizes of every index side by side, in processor time, at one knob; kept as JSON."""
    early = np.ascontiguousarray(growth_queries()["kind"].levels[0])
    knobs = {"graph": ("ef 256 keeps 160", 160), "ivf": ("64 lists keeps 1000", 1000)}
    contenders: dict[str, Callable[[int], np.ndarray]] = {}
    for name in (*SCANS, "ivf sq8", "ivf pq64x4fs", "graph"):
        for count in sorted({*SIZES, *STOPS}):
            if index_file(name, count).exists():
                text, keep = knobs.get(name.split()[0], ("keeps 1000", 1000))
                params = next((p for label, p, _ in ladder(name) if label == text), None)
                index = faiss.read_index(str(index_file(name, count)))
                label = f"{name} {text}: {count}"
                contenders[label] = partial(answer, index, early, params, keep)
    times = interleaved(contenders, passes, clock=time.thread_time)
    told = {label: round(median(own), 4) for label, own in times.items()}
    for label, ms in told.items():
        print(f"{label:<40} {ms:9.3f} ms", flush=True)
    found = {"machine": machine(), "passes": passes, "peak_gib": peak_gib(), "ms": told}
    (RESULTS / "level1_growth_times.json").write_text(json.dumps(found, indent=1) + "\n")


def print_tables() -> None:
    """Every rung by size, as Markdown: share held in each setting, milliseconds at the first."""
    for path in sorted(RESULTS.glob("level1_growth_*0.json"), key=lambda p: int(p.stem[14:])):
        told = json.loads(path.read_text())
        print(
            f"\n### {path.stem[14:]} rows, load {told['load']:.0f}, peak {told['peak_gib']} GiB\n"
        )
        print("| held / ms | " + " | ".join(told["settings"]) + " |")
        print("|---" * (1 + len(told["settings"])) + "|")
        for rungs in zip(*told["settings"].values(), strict=True):
            cells = [f"{r['held']:.4f} / {r['ms'] or 0:.3f}" for r in rungs]
            print(f"| {rungs[0]['label']} | " + " | ".join(cells) + " |")
        print(f"\nBuilt: {told['built']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "build", "search", "grown", "tables"))
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rows", type=int, default=SIZES[-1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--scan-queries", type=int, default=100)
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    names = options.names or ["sq8", "pq64x4fs", "rabitq fs", "ivf sq8", "ivf pq64x4fs", "graph"]
    if options.what == "make":
        make(options.rows)
    elif options.what == "build":
        for name in names:
            build(name, options.rows, options.threads)
    elif options.what == "grown":
        faiss.omp_set_num_threads(1)
        grown(options.passes)
    elif options.what == "tables":
        print_tables()
    else:
        faiss.omp_set_num_threads(1)
        names = [name for name in names if index_file(name, options.rows).exists()]
        found = search(names, options.rows, options.passes, options.scan_queries)
        told = {
            "machine": machine(),
            "load": os.getloadavg()[0],
            "peak_gib": peak_gib(),
            "built": notes(names, options.rows),
            "settings": found,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"level1_growth_{options.rows}.json"
        path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

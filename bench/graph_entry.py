"""Experiment 4: the finest graph entered at what the early answer found, against a cold start.

What it asks: at equal ANN recall, how much time is left after the last exit has answered? Two faiss
HNSW graphs over one million synthetic nested rows (M 32, efConstruction 200), at both noises and
with a gap. `early` is the level-1 search, hidden behind the encoder; `after` is what remains. The
same graph is also walked over fp16 and SQ8 rows, and one query's scan of Flat-768 stands for scale.

    python bench/graph_entry.py            # builds the graphs first: about 20 minutes on one core
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from measure import WORK, exact_top, interleaved, machine, median, overlap
from synthetic import DIMS, KIND, UNKIND, Queries, make_queries, make_rows

PASSES = 100


def build(rows: np.ndarray, dim: int, path: Path) -> faiss.IndexHNSWFlat:
    """Open the graph at `path`, or build it from the rows' prefixes and write it."""
    if path.exists():
        return faiss.read_index(str(path))
    index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    started = time.monotonic()
    for start in range(0, len(rows), 50_000):
        part = np.ascontiguousarray(rows[start : start + 50_000, :dim])
        index.add(part / np.linalg.norm(part, axis=1, keepdims=True))
        print(f"  {path.name}: {index.ntotal} rows, {time.monotonic() - started:.0f} s", flush=True)
    faiss.write_index(index, str(path))
    return index


def entered(index: faiss.IndexHNSWFlat, query: np.ndarray, ef: int, entry: Entry) -> np.ndarray:
    """The ten nearest rows, searching only level 0 of the graph, from given rows: (10,) int64.

    faiss wants the entry rows' inner products with the query beside them, positive.
    """
    rows = np.ascontiguousarray(entry.rows, np.int32)
    scores = np.ascontiguousarray(entry.stored.take(rows, axis=0) @ query, np.float32)
    found_scores, found = np.empty(10, np.float32), np.empty(10, np.int64)
    index.search_level_0(
        1,
        faiss.swig_ptr(query),
        10,
        faiss.swig_ptr(rows),
        faiss.swig_ptr(scores),
        faiss.swig_ptr(found_scores),
        faiss.swig_ptr(found),
        len(rows),
        entry.search_type,
        faiss.SearchParametersHNSW(efSearch=ef),
    )
    return found


@dataclass(frozen=True)
class Entry:
    """Entry rows of one query, and the array that holds all rows."""

    rows: np.ndarray
    stored: np.ndarray
    search_type: int = 1


def cold(index: faiss.IndexHNSWFlat, query: np.ndarray, k: int, ef: int) -> np.ndarray:
    """The k nearest rows from the graph's own entry point: (k,) int64."""
    return index.search(query[None], k, params=faiss.SearchParametersHNSW(efSearch=ef))[1][0]


def early_answers(
    small: faiss.IndexHNSWFlat, queries: Queries, ef: int, keep: int
) -> tuple[list[np.ndarray], float]:
    """What level 1's graph finds for every query, and the median milliseconds of one search."""
    found, times = [], []
    for query in queries.levels[0]:
        started = time.perf_counter()
        found.append(cold(small, query, keep, ef))
        times.append((time.perf_counter() - started) * 1e3)
    return found, median(times)


def recoded(flat: faiss.IndexHNSWFlat, rows: np.ndarray, kind: int) -> Any:
    """The same graph over rows in another form; the graph's links are copied."""
    storage = faiss.IndexScalarQuantizer(rows.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    storage.train(np.ascontiguousarray(rows[:: max(1, len(rows) // 50_000)]))
    for start in range(0, len(rows), 50_000):
        storage.add(np.ascontiguousarray(rows[start : start + 50_000]))
    index = faiss.IndexHNSW(storage, 32)
    index.hnsw, index.ntotal, index.is_trained = flat.hnsw, flat.ntotal, True
    return index


def contenders_of(
    large: Any, others: Mapping[str, Any], finest: np.ndarray, early: Mapping[str, list[Entry]]
) -> dict[str, Callable[[int], np.ndarray]]:
    """What is timed: Flat, cold starts, and entered searches at several widths."""
    found: dict[str, Callable[[int], np.ndarray]] = {"Flat-768": partial(_flat_pass, large, finest)}
    for ef in (64, 128, 256, 512, 1024):
        found[f"cold ef {ef}"] = partial(_cold_pass, large, finest, ef)
    for label, entries in early.items():
        for ef in (16, 32, 64, 128, 256):
            found[f"{label} ef {ef}"] = partial(_entered_pass, large, finest, ef, entries)
    label, entries = list(early.items())[1]
    for ef in (64, 128):
        at_once = [Entry(e.rows, e.stored, 2) for e in entries]
        found[f"{label} ef {ef} type 2"] = partial(_entered_pass, large, finest, ef, at_once)
        for name, index in others.items():
            found[f"{label} ef {ef} {name}"] = partial(_entered_pass, index, finest, ef, entries)
            found[f"cold ef {4 * ef} {name}"] = partial(_cold_pass, index, finest, 4 * ef)
    return found


def compare(
    rows: np.ndarray,
    small: Any,
    large: Any,
    others: Mapping[str, Any],
    queries: Queries,
    name: str,
) -> None:
    """Print recall and milliseconds after the last exit for every operating point."""
    finest = np.ascontiguousarray(queries.levels[-1])
    truth = exact_top(rows, finest, 10)
    stored = faiss.rev_swig_ptr(faiss.downcast_index(large.storage).get_xb(), rows.size)
    stored = stored.reshape(rows.shape)
    early: dict[str, list[Entry]] = {}
    for early_ef, keep in ((32, 10), (64, 20), (128, 40)):
        found, early_ms = early_answers(small, queries, early_ef, keep)
        held = overlap(found, truth)
        print(f"{name}: early ef {early_ef} keeps {keep}: {early_ms:.2f} ms, holds {held:.3f}")
        early[f"entered at {keep}"] = [Entry(f[f >= 0], stored) for f in found]
    contenders = contenders_of(large, others, finest, early)
    times = interleaved(contenders, min(PASSES, len(finest)))
    flat = median(times["Flat-768"])
    for label, contender in contenders.items():
        exact = label == "Flat-768"
        answers = [] if exact else [contender(i) for i in range(len(finest))]
        recall, ms = 1.0 if exact else overlap(answers, truth), median(times[label])
        line = f"recall {recall:.4f} {ms:8.3f} ms  Flat/{flat / ms:.0f}"
        print(f"{name}: {label:<32} {line}", flush=True)


def _flat_pass(index: Any, finest: np.ndarray, number: int) -> np.ndarray:
    at = number % len(finest)
    return index.storage.search(finest[at : at + 1], 10)[1][0]


def _cold_pass(index: Any, finest: np.ndarray, ef: int, number: int) -> np.ndarray:
    return cold(index, finest[number % len(finest)], 10, ef)


def _entered_pass(
    index: Any, finest: np.ndarray, ef: int, entries: list[Entry], number: int
) -> np.ndarray:
    at = number % len(finest)
    return entered(index, finest[at], ef, entries[at])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=300)
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    faiss.omp_set_num_threads(1)  # faiss may have been loaded before `measure` could say so
    print(machine(), "faiss", faiss.__version__)
    rows = make_rows(WORK / f"rows-{options.rows}.npy", options.rows)
    small = build(rows, DIMS[0], WORK / f"hnsw-{DIMS[0]}-{options.rows}.faiss")
    large = build(rows, DIMS[-1], WORK / f"hnsw-{DIMS[-1]}-{options.rows}.faiss")
    faiss.cvar.distance_compute_blas_threshold = 4096
    quantizer = faiss.ScalarQuantizer
    kinds = {"fp16": quantizer.QT_fp16, "sq8": quantizer.QT_8bit_uniform}
    others = {name: recoded(large, rows, kind) for name, kind in kinds.items()}
    settings = {"kind": (KIND, 0.0), "unkind": (UNKIND, 0.0), "gap": (KIND, 0.5)}
    for name, (noise, gap) in settings.items():
        queries = make_queries(rows, options.queries, noise=noise, gap=gap)
        compare(rows, small, large, others, queries, name)


if __name__ == "__main__":
    main()

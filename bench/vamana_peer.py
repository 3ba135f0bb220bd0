"""The strongest peer found, SVS's Vamana over fp16 rows, beside the entered graph, in one process.

Degree 64, window 128; inner product. Its cold start against faiss's HNSW cold and entered at what
level 1's graph found: ANN recall@10 against exact, milliseconds after the last exit.

    pip install scalable-vs
    python bench/vamana_peer.py --build     # 13 minutes on two cores
    python bench/vamana_peer.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import svs
from graph_entry import Entry, build, early_answers
from graph_entry import _cold_pass as cold_pass
from graph_entry import _entered_pass as entered_pass
from measure import WORK, exact_top, interleaved, machine, median, overlap
from synthetic import DIMS, KIND, UNKIND, make_queries, make_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

PARTS = ("config", "graph", "data")
EARLY = ((64, 20), (128, 40), (160, 80))
PASSES = 200


def build_vamana(rows: np.ndarray, folder: Path, threads: int) -> None:
    """Build over fp16 rows and save."""
    parameters = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128)
    started = time.monotonic()
    halved = np.asarray(rows).astype(np.float16)
    index = svs.Vamana.build(parameters, halved, svs.DistanceType.MIP, threads)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    index.save(*(str(folder / part) for part in PARTS))


def open_vamana(folder: Path) -> Any:
    """The saved index, one thread."""
    config, graph, data = (str(folder / part) for part in PARTS)
    loader = svs.VectorDataLoader(data, svs.DataType.float16)
    return svs.Vamana(config, svs.GraphLoader(graph), loader, svs.DistanceType.MIP, num_threads=1)


def vamana_pass(index: Any, finest: np.ndarray, window: int, number: int) -> np.ndarray:
    """The ten nearest rows of one query at a search window."""
    index.search_window_size = window
    at = number % len(finest)
    return index.search(finest[at : at + 1], 10)[0][0].astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build", action="store_true")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    print(machine(), "faiss", faiss.__version__)
    rows = make_rows(WORK / f"rows-{options.rows}.npy", options.rows)
    folder = WORK / f"vamana-{options.rows}"
    if options.build:
        build_vamana(rows, folder, options.threads)
        return
    vamana = open_vamana(folder)
    small = build(rows, DIMS[0], WORK / f"hnsw-{DIMS[0]}-{options.rows}.faiss")
    large = build(rows, DIMS[-1], WORK / f"hnsw-{DIMS[-1]}-{options.rows}.faiss")
    stored = faiss.rev_swig_ptr(faiss.downcast_index(large.storage).get_xb(), rows.size)
    settings = {"kind": (KIND, 0.0), "unkind": (UNKIND, 0.0), "gap": (KIND, 0.5)}
    for name, (noise, gap) in settings.items():
        queries = make_queries(rows, options.queries, noise=noise, gap=gap)
        finest = np.ascontiguousarray(queries.levels[-1])
        truth = exact_top(rows, finest, 10)
        contenders: dict[str, Callable[[int], np.ndarray]] = {
            f"vamana window {w}": partial(vamana_pass, vamana, finest, w)
            for w in (10, 20, 32, 50, 64, 100, 150, 250)
        }
        for ef in (256, 512):
            contenders[f"hnsw cold ef {ef}"] = partial(cold_pass, large, finest, ef)
        for early_ef, keep in EARLY:
            found, early_ms = early_answers(small, queries, early_ef, keep)
            print(f"{name}: early ef {early_ef} keeps {keep}: {early_ms:.2f} ms")
            entries = [Entry(f[f >= 0], stored.reshape(rows.shape)) for f in found]
            for ef in (10, 16, 32, 64, 128):
                label = f"entered at {keep} ef {ef}"
                contenders[label] = partial(entered_pass, large, finest, ef, entries)
        times = interleaved(contenders, PASSES)
        for label, contender in contenders.items():
            recall = overlap([contender(i) for i in range(len(finest))], truth)
            print(
                f"{name}: {label:<24} recall {recall:.4f} {median(times[label]):7.3f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Experiment 1: a level 1 that is fast and can be masked.

What it asks: for one early query at level 1 (128 of 768 numbers), which codes hold the finest
level's exact top 10 within K1 rows, in how much time, when all rows, half, a tenth or a hundredth
of them are allowed, or when 5 % are deleted? Fast-scan codes refuse selectors: they ask for
K1 / selectivity rows and drop what isn't allowed.

    python bench/level1_codecs.py --rows 1000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from measure import WORK, interleaved, machine, median, overlap
from synthetic import DIMS, KIND, UNKIND, Queries, make_queries, make_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

K1 = 1000
CHUNK = 50_000
TRAIN = 50_000
SHARES = {"all": 1.0, "5 % deleted": 0.95, "50 %": 0.5, "10 %": 0.1, "1 %": 0.01}
FACTORIES = {
    "flat fp32": "Flat",
    "sq fp16": "SQfp16",
    "sq8": "SQ8",
    "sq8 uniform": "",
    "pq64x4fs": "PQ64x4fs",
    "rabitq fs": "RaBitQfs",
}
NO_SELECTOR = ("pq64x4fs", "rabitq fs")


@dataclass(frozen=True)
class Mask:
    """Which rows are allowed: None means all."""

    name: str
    allowed: np.ndarray | None

    def selector(self) -> Any:
        """A faiss selector over the bitmap; the bits are kept alive by the caller."""
        if self.allowed is None:
            return None
        bits = np.packbits(self.allowed, bitorder="little")
        selector = faiss.IDSelectorBitmap(len(self.allowed), faiss.swig_ptr(bits))
        selector.bits = bits
        return selector


def prefixes(rows: np.ndarray) -> np.ndarray:
    """The level-1 vectors of all rows: (n, 128) float32, normalised."""
    out = np.empty((len(rows), DIMS[0]), np.float32)
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK, : DIMS[0]]
        out[start : start + CHUNK] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return out


def build(small: np.ndarray, lists: int) -> dict[str, Any]:
    """Every index that this faiss can build, with its build time printed."""
    factories = {**FACTORIES, f"ivf{lists} sq8": f"IVF{lists},SQ8"}
    built: dict[str, Any] = {}
    for name, factory in factories.items():
        started = time.monotonic()
        try:
            index = make(factory)
            index.train(small[:: max(1, len(small) // TRAIN)])
            index.add(small)
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: not built: {str(error).splitlines()[-1]}", flush=True)
            continue
        print(f"{name}: built in {time.monotonic() - started:.1f} s", flush=True)
        built[name] = index
    return built


def make(factory: str) -> Any:
    """An empty index; one codec has no factory string."""
    if factory:
        return faiss.index_factory(DIMS[0], factory, faiss.METRIC_INNER_PRODUCT)
    uniform = faiss.ScalarQuantizer.QT_8bit_uniform
    return faiss.IndexScalarQuantizer(DIMS[0], uniform, faiss.METRIC_INNER_PRODUCT)


def graphs(built: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """The level-1 graph over fp32 rows where it was built before, and the same over SQ8 codes."""
    if not path.exists():
        return {}
    flat = faiss.read_index(str(path))
    coded = faiss.IndexHNSW(built["sq8 uniform"], 32)
    coded.hnsw = flat.hnsw
    coded.ntotal = flat.ntotal
    coded.is_trained = True
    return {"hnsw fp32": flat, "hnsw sq8": coded}


def params_of(name: str, selector: Any) -> Any:
    """Search parameters of a contender under a selector."""
    if name.startswith("ivf"):
        return faiss.SearchParametersIVF(sel=selector, nprobe=64)
    if name.startswith("hnsw"):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=K1)
    return faiss.SearchParameters(sel=selector) if selector is not None else None


def search(
    index: Any, queries: np.ndarray, mask: Mask, params: Any, fetch: int, number: int
) -> np.ndarray:
    """At most K1 allowed rows for one query: (m,) int64."""
    at = number % len(queries)
    rows = index.search(queries[at : at + 1], fetch, params=params)[1][0]
    rows = rows[rows >= 0]
    if params is None and mask.allowed is not None:
        rows = rows[mask.allowed[rows]]
    return rows[:K1]


def truth_of(scores: np.ndarray, mask: Mask) -> np.ndarray:
    """The exact top 10 among allowed rows, from all scores (n, N): (n, 10)."""
    allowed = scores if mask.allowed is None else np.where(mask.allowed, scores, -2.0)
    return np.stack([np.argpartition(-own, 10)[:10] for own in allowed])


def finest_scores(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """All scores of all queries at the finest level: (n, N) float32."""
    parts = [queries @ np.asarray(rows[i : i + CHUNK]).T for i in range(0, len(rows), CHUNK)]
    return np.concatenate(parts, axis=1)


def contenders(
    built: Mapping[str, Any], queries: Queries, mask: Mask, share: float, total: int
) -> dict[str, Callable[[int], np.ndarray]]:
    """What is timed under one mask."""
    selector = mask.selector()
    found: dict[str, Callable[[int], np.ndarray]] = {}
    for name, index in built.items():
        bare = name in NO_SELECTOR or selector is None
        fetch = min(total, int(1.1 * K1 / share)) if name in NO_SELECTOR and share < 1 else K1
        params = None if name in NO_SELECTOR else params_of(name, None if bare else selector)
        found[name] = partial(search, index, queries.levels[0], mask, params, fetch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--passes", type=int, default=30)
    options = parser.parse_args()
    print(machine(), "faiss", faiss.__version__, flush=True)
    rows = make_rows(WORK / f"rows-{options.rows}.npy", options.rows)
    built = build(prefixes(rows), max(64, int(options.rows**0.5)))
    built.update(graphs(built, WORK / f"hnsw-{DIMS[0]}-{options.rows}.faiss"))
    for noise_name, noise in (("kind", KIND), ("unkind", UNKIND)):
        queries = make_queries(rows, options.queries, noise=noise)
        scores = finest_scores(rows, queries.levels[-1])
        for mask_name, share in SHARES.items():
            draw = np.random.default_rng(3).random(options.rows) < share
            mask = Mask(mask_name, None if share == 1 else draw)
            truth = truth_of(scores, mask)
            some = contenders(built, queries, mask, share, options.rows)
            times = interleaved(some, options.passes if noise_name == "kind" else 1)
            for name, contender in some.items():
                found = [contender(i) for i in range(options.queries)]
                held = overlap(found, truth)
                least = min(len(f) for f in found)
                print(
                    f"{noise_name:<7}{mask_name:<12}{name:<12} held {held:.4f} "
                    f"{median(times[name]):8.2f} ms, fewest rows {least}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

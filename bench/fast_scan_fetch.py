"""How many rows must fast-scan codes hand to the kernel for each row wanted, and does `qb` matter?

Level 1 (128 of 768 numbers): of the exact best K1 of the level, and of the finest level's exact top
10, what share is among the `over` x K1 rows that the codes rank first, and what does scanning and
re-scoring them cost? RaBitQ's `qb` is the bits of the query in its tables; `rabitqfs2` keeps two
bits a number.

    python bench/fast_scan_fetch.py --rows 200000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from measure import WORK, exact_top, interleaved, machine, median, overlap
from synthetic import DIMS, KIND, UNKIND, Queries, make_queries, make_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

from hivlp.index.backends.rows import LevelRows, inverse_norms

DIM = DIMS[0]
TRAIN = 100_000
OVERS = (1, 2, 3, 4, 6, 8, 12, 16)
CODES = {
    "sq8": ("", None),
    "pq64x4fs": ("PQ64x4fs", None),
    "rabitqfs": ("RaBitQfs", 8),
    "rabitqfs qb 6": ("RaBitQfs", 6),
    "rabitqfs qb 4": ("RaBitQfs", 4),
    "rabitqfs qb 1": ("RaBitQfs", 1),
    "rabitqfs2": ("RaBitQfs2", 8),
    "rabitqfs4": ("RaBitQfs4", 8),
}


def codes_of(small: np.ndarray, factory: str, qb: int | None) -> Any:
    """A trained and filled index, and the time it took on stdout."""
    kind = faiss.ScalarQuantizer.QT_8bit_uniform
    index = (
        faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
        if factory
        else faiss.IndexScalarQuantizer(DIM, kind, faiss.METRIC_INNER_PRODUCT)
    )
    began = time.monotonic()
    index.train(small[:: max(1, len(small) // TRAIN)])
    index.add(small)
    print(f"{factory or 'sq8'}: built in {time.monotonic() - began:.1f} s", flush=True)
    if qb is not None:
        index.qb = qb
    return index


def fetched(index: Any, queries: np.ndarray, count: int) -> list[np.ndarray]:
    found = index.search(queries, count)[1]
    return [rows[rows >= 0] for rows in found]


def recalls(
    name: str, index: Any, queries: Queries, finest: np.ndarray, keeps: tuple[int, ...], noise: str
) -> None:
    """What is held, for every width and over-fetch."""
    early = queries.levels[0]
    for keep in keeps:
        level = LEVEL_TOP[noise][:, :keep]
        cells = []
        for over in OVERS:
            found = fetched(index, early, over * keep + 32)
            best = [np.intersect1d(f, t) for f, t in zip(found, level, strict=True)]
            own = np.mean([len(b) / keep for b in best])
            cells.append(f"{over}: {own:.4f} {overlap(best, finest):.4f}")
        print(f"{noise:<7}{name:<15}K1 {keep:<5}" + "  ".join(cells), flush=True)


LEVEL_TOP: dict[str, np.ndarray] = {}


def timed(rows: LevelRows, index: Any, queries: np.ndarray, count: int) -> Callable[[int], object]:
    def one(number: int) -> object:
        query = queries[number % len(queries)]
        found = index.search(query[None], count)[1][0]
        return rows.score(query, found[found >= 0])

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--passes", type=int, default=30)
    options = parser.parse_args()
    print(machine(), "faiss", faiss.__version__, flush=True)
    rows = make_rows(WORK / f"rows-{options.rows}.npy", options.rows)
    inverse = inverse_norms(rows, DIM)
    level = LevelRows(np.asarray(rows), DIM, inverse)
    small = level.vectors(np.arange(options.rows))
    built = {name: codes_of(small, *what) for name, what in CODES.items()}
    keeps = (100, 1_000)
    for noise_name, noise in (("kind", KIND), ("unkind", UNKIND)):
        queries = make_queries(rows, options.queries, noise=noise)
        LEVEL_TOP[noise_name] = exact_top(small, queries.levels[0], max(keeps))
        finest = exact_top(rows, queries.levels[-1], 10)
        held = [overlap(list(LEVEL_TOP[noise_name][:, :keep]), finest) for keep in keeps]
        print(f"{noise_name}: the exact level holds {held} of the finest top 10")
        for name, index in built.items():
            recalls(name, index, queries, finest, keeps, noise_name)
    early = make_queries(rows, options.queries).levels[0]
    contenders = {
        f"{name}, {count} rows": timed(level, index, early, count + 32)
        for name, index in built.items()
        for count in (100, 400, 800, 1_000, 2_000, 4_000, 8_000)
    }
    for name, times in interleaved(contenders, options.passes).items():
        print(f"{name:<28}{median(times):8.3f} ms", flush=True)


if __name__ == "__main__":
    main()

"""Rows kept as fp32, fp16 or int8 (a scale a row): what is lost, and what a re-score costs.

200,000 x 768 in memory. Recall: the share of the exact fp32 top 10 that the same search over the
kept rows gives, with the finest query at the finest level and at the one before. `int8 rotated`
turns each level's own columns by a random rotation first, which no prefix notices and which
spreads a row's length evenly over its numbers. Time: 100, 1,000 and 5,000 given rows scored by one
dot product a row, after casting, whole or in parts.

    python bench/row_types.py --rows 200000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from measure import WORK, exact_top, interleaved, machine, median, overlap
from synthetic import DIMS, make_queries, make_rows

PART = 1_024
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 codes (N, D) and a scale (N,) float32 a row."""
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    for start in range(0, len(rows), 50_000):
        part = rows[start : start + 50_000]
        own = np.abs(part).max(axis=1) / 127
        codes[start : start + 50_000] = np.rint(part / own[:, None])
        scales[start : start + 50_000] = own
    return codes, scales


def rotated(rows: np.ndarray) -> np.ndarray:
    """(N, D) rows as int8 codes keep them, coded after a rotation of each level's own columns."""
    rng = np.random.default_rng(7)
    kept = np.empty_like(rows)
    for start, stop in pairwise((0, *DIMS)):
        turn = np.linalg.qr(rng.standard_normal((stop - start, stop - start)))[0].astype(np.float32)
        codes, scales = quantised(rows[:, start:stop] @ turn)
        kept[:, start:stop] = (codes.astype(np.float32) * scales[:, None]) @ turn.T
    return kept


def compare(name: str, kept: np.ndarray, rows: np.ndarray, queries: np.ndarray) -> None:
    """Print what `kept`, (N, D) float32 again, loses against `rows`."""
    shares = []
    for dim in DIMS[1:]:
        prefixes = (
            own[:, :dim] / np.linalg.norm(own[:, :dim], axis=1, keepdims=True)
            for own in (kept, rows, queries)
        )
        some, full, query = prefixes
        shares.append(overlap(list(exact_top(some, query, 10)), exact_top(full, query, 10)))
    scores = np.abs((kept @ queries[:20].T) - (rows @ queries[:20].T))
    norms = np.linalg.norm(kept, axis=1)
    print(
        f"{name}: top 10 kept {shares[-1]:.4f} (finest), {shares[0]:.4f} (level before); scores "
        f"move {scores.mean():.2e}, at most {scores.max():.2e}; norms {norms.min():.5f} to "
        f"{norms.max():.5f}",
        flush=True,
    )


def whole(matrix: np.ndarray) -> Score:
    return lambda query, rows: np.vecdot(
        matrix.take(rows, axis=0).astype(np.float32, copy=False), query
    )


def in_parts(matrix: np.ndarray, scales: np.ndarray | None, part: int = PART) -> Score:
    """Gather and cast a cache-sized part at a time."""

    def score(query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        parts = (rows[start : start + part] for start in range(0, len(rows), part))
        scores = np.concatenate(
            [np.vecdot(matrix.take(p, axis=0).astype(np.float32, copy=False), query) for p in parts]
        )
        return scores if scales is None else scores * scales.take(rows)

    return score


def timed(score: Score, queries: np.ndarray, given: list[np.ndarray]) -> Callable[[int], object]:
    return lambda number: score(queries[number % len(queries)], given[number % len(given)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    print(machine(), flush=True)
    rows = np.array(make_rows(WORK / f"rows-{options.rows}.npy", options.rows))
    queries = make_queries(rows, options.queries).levels[-1]
    half = rows.astype(np.float16)
    codes, scales = quantised(rows)
    compare("fp16", half.astype(np.float32), rows, queries)
    compare("int8", codes.astype(np.float32) * scales[:, None], rows, queries)
    compare("int8 rotated", rotated(rows), rows, queries)
    kinds: dict[str, Score] = {
        "fp32": whole(rows),
        "fp16": whole(half),
        "fp16 parts": in_parts(half, None),
        "int8": in_parts(codes, scales, part=rows.size),
        "int8 parts": in_parts(codes, scales),
    }
    rng = np.random.default_rng(5)
    contenders = {}
    for count in (100, 1_000, 5_000):
        given = [np.sort(rng.choice(len(rows), count, replace=False)) for _ in range(20)]
        for name, score in kinds.items():
            contenders[f"{count:>5} {name}"] = timed(score, queries, given)
    for name, times in interleaved(contenders, options.passes).items():
        print(f"{name:<18}{1e3 * median(times):9.0f} us", flush=True)


if __name__ == "__main__":
    main()

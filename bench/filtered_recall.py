"""ANN recall@10 and time of filtered searches against exact filtered search.

    python bench/filtered_recall.py --home HOME --index NAME --field stock --below 2500 500 50 5

Of an index that holds a column of whole numbers; each bound allows a share of the rows. Queries are
rows of the index moved a little aside, each plan's time one thread's, filters repeated (their masks
are kept) and new ones timed apart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from measure import machine, median

from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.filters import parse_filter
from hivlp.index.plans import run_early
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, nested_prefix, normalise

K = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--index", default="default")
    parser.add_argument("--field", default="stock")
    parser.add_argument("--below", type=int, nargs="+", default=[2_500, 500, 50, 5])
    parser.add_argument("--queries", type=int, default=100)
    given = parser.parse_args()
    print(machine())
    snapshot = SnapshotStore(given.home).open(given.index)
    searcher = open_searcher(snapshot)
    (side,) = (side for side in searcher.info.rows if searcher.info.rows[side])
    dims = [spec.dim for spec in searcher.info.levels]
    finest = snapshot.sides[side].rows[len(dims)]
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(finest.size, given.queries, replace=False))
    noise = rng.standard_normal((given.queries, dims[-1])).astype(np.float32)
    queries = normalise(finest.vectors(rows) + 0.3 * noise / np.sqrt(dims[-1]))
    exits = {level: nested_prefix(queries, dim) for level, dim in enumerate(dims, start=1)}
    print(f"{'allowed':>10}{'share':>9}{'new ms':>9}{'plan':>10}{'recall@10':>11}{'ms':>8}")
    for below in given.below:
        expression = parse_filter({"field": given.field, "range": {"lt": below}})
        began = time.perf_counter()
        mask = searcher.mask(side, expression)
        new_ms = 1e3 * (time.perf_counter() - began)
        exact = searcher.plan(PlanRequest(side, side, K, "exact"), allowed=mask.count)
        truth, _ = answers(searcher, side, exact, exits, mask)
        for name in ("cascade", "funnel"):
            plan = searcher.plan(PlanRequest(side, side, K, name), allowed=mask.count)
            found, ms = answers(searcher, side, plan, exits, mask)
            recall = np.mean([len(set(f) & set(t)) / K for f, t in zip(found, truth, strict=True)])
            print(f"{mask.count:>10}{mask.count / finest.size:>9.3%}{new_ms:>9.2f}{name:>10}"
                  f"{recall:>11.4f}{ms:>8.2f}", flush=True)  # fmt: skip


def answers(
    searcher: object, side: str, plan: Plan, exits: dict[int, FloatArray], mask: object
) -> tuple[list[list[int]], float]:
    """The rows that a plan finds for each query, and the median time of one."""
    found, times = [], []
    for i in range(len(exits[1])):
        one = {level: vectors[i : i + 1] for level, vectors in exits.items()}
        began = time.perf_counter()
        candidates, _ = run_early(searcher, side, plan, one, mask)  # type: ignore[arg-type]
        times.append(1e3 * (time.perf_counter() - began))
        found.append(candidates.rows[:K].tolist())
    return found, median(times)


if __name__ == "__main__":
    main()

"""How long a filter takes to become a row mask: new predicates, combinations, repeated ones.

    python bench/filters.py            # 5,000,000 items, seven columns; about a minute

A new predicate meets empty caches, a combination finds its conditions kept, a repeated filter its
mask. Milliseconds, medians; the columns are as `hivlp build` writes them, in memory.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import pyarrow as pa
from measure import machine, median

from hivlp.index.filter_masks import FilterMasks
from hivlp.index.filters import parse_filter
from hivlp.index.snapshot.coded import CodedColumn, code_column

PASSES = 15
NOTHING = parse_filter({"field": "colour", "eq": "none"})
FILTERS: dict[str, Any] = {
    "text, 20 values: eq": {"field": "colour", "eq": "c7"},
    "text, 5,000 values: in 20": {"field": "brand", "in": [f"b{i * 37}" for i in range(20)]},
    "text, all different: eq": {"field": "name", "eq": "n4999"},
    "number: range, 30 %": {"field": "price", "range": {"gte": 100.0, "lt": 400.0}},
    "whole number: range, 0.1 %": {"field": "stock", "range": {"lt": 5}},
    "boolean: eq": {"field": "new", "eq": True},
    "date: range, half": {"field": "day", "range": {"gte": "2022-07-01"}},
    "list: eq, 27 %": {"field": "tags", "eq": "t1"},
    "exists": {"field": "price", "exists": True},
}
ALL = {"and": [FILTERS[name] for name in list(FILTERS)[3:7]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=5_000_000)
    options = parser.parse_args()
    print(machine())
    made_of = arrays(options.items)
    began = time.monotonic()
    columns = {name: code_column(name, pa.chunked_array([made])) for name, made in made_of.items()}
    print(f"{options.items} items, coded in {time.monotonic() - began:.0f} s")
    rows = np.arange(options.items)
    print(f"{'filter':<30}{'rows':>9}{'new':>8}{'kept parts':>12}{'repeated':>10}")
    for name, given in {**FILTERS, "four of them, and": ALL}.items():
        new, parts, again, count = measured(columns, options.items, given, rows)
        print(f"{name:<30}{count:>9}{new:>8.2f}{parts:>12.2f}{again:>10.4f}", flush=True)


def arrays(count: int) -> dict[str, Any]:
    """Columns of every kind."""
    rng = np.random.default_rng(0)
    price = np.round(rng.uniform(0, 1_000, count), 2)
    tags = rng.integers(0, 10, (count, 3)).reshape(-1)
    names = pa.array([f"t{i}" for i in range(10)])
    return {
        "colour": pa.array([f"c{i}" for i in range(20)]).take(pa.array(rng.integers(0, 20, count))),
        "brand": pa.array([f"b{i}" for i in range(5_000)]).take(
            pa.array(rng.integers(0, 5_000, count))
        ),
        "name": pa.array([f"n{i}" for i in rng.permutation(count)]),
        "price": pa.array(price, mask=rng.random(count) < 0.1),
        "stock": pa.array(rng.integers(0, 5_000, count)),
        "new": pa.array(rng.random(count) < 0.4),
        "day": pa.array((19_000 + rng.integers(0, 365, count)).astype("datetime64[D]")),
        "tags": pa.ListArray.from_arrays(
            pa.array(np.arange(0, 3 * count + 1, 3, dtype=np.int32)), names.take(pa.array(tags))
        ),
    }


def measured(
    columns: dict[str, CodedColumn], items: int, given: Any, rows: np.ndarray
) -> tuple[float, float, float, int]:
    """Milliseconds of a new filter, of one whose conditions are kept, of a repeated one; rows."""
    expression = parse_filter(given)
    times: list[list[float]] = [[], [], []]
    for _ in range(PASSES):
        masks = FilterMasks(columns, items)
        masks.rows(NOTHING, "image", rows)  # what is looked at once a version
        negated = parse_filter({"not": given})
        for spent, one in zip(times, (expression, negated, expression), strict=True):
            began = time.perf_counter()
            mask = masks.rows(one, "image", rows)
            spent.append(1e3 * (time.perf_counter() - began))
    return median(times[0]), median(times[1]), median(times[2]), mask.count


if __name__ == "__main__":
    main()

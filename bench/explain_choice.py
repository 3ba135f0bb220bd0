"""What `hivlp build --explain` would print for synthetic rows: the choice, without encoding.

python bench/explain_choice.py --rows 1000000
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from families import SPECS, level_rows
from measure import WORK, machine
from synthetic import KIND, make_queries, make_rows

from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.choice import choose
from hivlp.index.build.explain import table
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.wishes import Wishes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--max-build-s", type=float, default=1_800.0)
    options = parser.parse_args()
    print(machine())
    path = WORK / f"rows-{options.rows}.npy"
    made = make_rows(path, options.rows)
    queries = make_queries(made, options.queries, noise=KIND)
    outputs = dict(enumerate(queries.levels, start=1))
    given = QuerySet(outputs, np.arange(options.queries))
    items = np.arange(options.rows, dtype=np.int64)
    side = BuiltSide("image", level_rows(path, options.rows), items, [])
    began = time.monotonic()
    wishes = Wishes(max_build_s=options.max_build_s)
    chosen = choose(side, given, SPECS, "nested", wishes, 0.99)
    print(table("image", chosen))
    print(f"chosen in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

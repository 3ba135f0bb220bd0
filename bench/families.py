"""Both families as the product runs them, at one million rows: calibrated, then timed.

For each noise: widths and beams are measured on half of the queries as a build does it, then every
plan runs stage by stage on the other half, interleaved in one process. `after` is what remains once
the last exit has answered, where the encoder's stages take `ENCODE_MS` and hide what fits behind
them; `search` is all stages. Flat-768 is faiss's scan of the finest rows, one query.

    python bench/families.py        # needs the graphs that graph_entry.py builds
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from measure import WORK, machine, median
from synthetic import DIMS, KIND, UNKIND, Queries, make_queries, make_rows

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

from hivlp.index.backends.choose import open_graphs, open_level, write_level
from hivlp.index.backends.faiss_graph import in_place
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build import widths
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.observe import overlapped_ms
from hivlp.index.build.widths import exact_best, exact_rows, sweep
from hivlp.index.cascade import Plan, PlanRequest, run_stage
from hivlp.index.level_index import LevelIndex
from hivlp.index.plans import WidthPoint, make_plan, stage_query
from hivlp.index.snapshot.manifest import WidthRecord
from hivlp.models.levels import LevelSpec

SPECS = tuple(LevelSpec(i, 2 * i, dim) for i, dim in enumerate(DIMS, start=1))
K = 10
ENCODE_MS = (2.4, 2.4, 2.4)
"""The stages of an int8 text encoder of 6 layers x 768 at 16 tokens: what may hide behind them."""
CODECS = ("sq8", "pq64x4fs", "rabitqfs")


def level_rows(path: Path, count: int) -> dict[int, LevelRows]:
    """Every level as a prefix of the rows file, its norms kept beside it."""
    matrix = np.load(path, mmap_mode="r").view(np.ndarray)
    norms_file = WORK / f"norms-{count}.npy"
    if not norms_file.exists():
        np.save(norms_file, np.stack([inverse_norms(matrix, dim) for dim in DIMS[:-1]]))
    norms = np.load(norms_file)
    coarse = {s.level: LevelRows(matrix, s.dim, norms[s.level - 1]) for s in SPECS[:-1]}
    return {**coarse, SPECS[-1].level: LevelRows(matrix, DIMS[-1])}


def opened(
    rows: dict[int, LevelRows], count: int, codecs: Sequence[str]
) -> dict[str, dict[int, LevelIndex]]:
    """Levels by codec, written first where they aren't there."""
    found = {}
    for codec in codecs:
        file = WORK / f"level1-{codec}-{count}.faiss"
        if not file.exists():
            started = time.monotonic()
            write_level(file, rows[1], codec)  # type: ignore[arg-type]
            print(f"{codec} level 1 written in {time.monotonic() - started:.1f} s", flush=True)
        found[codec] = {
            level: open_level(level, own, file if level == 1 else None, "faiss-cpu")
            for level, own in rows.items()
        }
    return found


def graphs_of(
    rows: dict[int, LevelRows], levels: dict[int, LevelIndex], count: int
) -> dict[int, LevelIndex]:
    """The two graphs, links alone, over the SQ8 codes and over the rows file in place.

    Level 2 walks the finest level's links.
    """
    files = {}
    for level, dim in ((1, DIMS[0]), (3, DIMS[-1])):
        files[level] = WORK / f"links-{dim}-{count}.hnsw"
        if not files[level].exists():
            whole = faiss.read_index(str(WORK / f"hnsw-{dim}-{count}.faiss"))
            faiss.write_index(whole, str(files[level]), faiss.IO_FLAG_SKIP_STORAGE)
    return open_graphs(files, rows, levels)


def plan_of(record: WidthRecord, rows: int) -> Plan:
    """The plan that a measured record gives."""
    key = ("image", "text", record.plan)
    table = {key: (WidthPoint(K, record.keeps, record.efs),)}
    graph = record.family == "graph"
    request = PlanRequest("image", "text", K, record.plan)
    return make_plan(request, SPECS, {} if graph else table, rows, graphs=table if graph else None)


class Contender:
    """One plan over its levels: counts recall and stage times, a query at a time."""

    def __init__(
        self, plan: Plan, levels: dict[int, LevelIndex], graphs: dict[int, LevelIndex]
    ) -> None:
        self.plan, self.levels, self.graphs = plan, levels, graphs
        self.after: list[float] = []
        self.search: list[float] = []
        self.shares: list[float] = []

    def run(self, queries: dict[int, np.ndarray], number: int, truth: np.ndarray) -> None:
        found, spent = None, []
        for stage in self.plan.stages:
            one = {level: q[number : number + 1] for level, q in queries.items()}
            query = stage_query(stage, one, DIMS[stage.level - 1])
            began = time.perf_counter()
            found = run_stage(self.levels, stage, query, found, graphs=self.graphs)
            spent.append((time.perf_counter() - began) * 1e3)
        assert found is not None
        reads = [max(stage.query_level, stage.level) for stage in self.plan.stages]
        reads = [len(ENCODE_MS)] * len(reads) if self.plan.name == "funnel" else reads
        took = overlapped_ms(ENCODE_MS, list(zip(reads, spent, strict=True)))
        self.after.append(took - sum(ENCODE_MS))
        self.search.append(sum(spent))
        self.shares.append(len(np.intersect1d(found[0].rows, truth)) / len(truth))


def compare(
    name: str,
    queries: Queries,
    rows: dict[int, LevelRows],
    by_codec: dict[str, dict[int, LevelIndex]],
    graphs: dict[int, LevelIndex],
) -> None:
    """Calibrate on one half, time on the other, print."""
    outputs = {level: np.ascontiguousarray(q) for level, q in enumerate(queries.levels, start=1)}
    held_out = np.arange(len(queries.targets)) % 2 == 1
    direction = Direction("image", "text", outputs, rows, held_out, encode_ms=ENCODE_MS)
    best = exact_best(direction, 3, K)
    truth = exact_rows(direction, 3, K)
    contenders: dict[str, Contender] = {}
    for codec, levels in by_codec.items():
        own = Direction("image", "text", outputs, rows, held_out, levels)
        for record in sweep(own, SPECS, "nested", 0.99):
            if record.k == K:
                plan = plan_of(record, rows[1].size)
                contenders[f"scan {codec} {record.plan}"] = Contender(plan, levels, {})
    for record in measure_beams(direction, graphs, best, (K,), 0.99):
        plan = plan_of(record, rows[1].size)
        contenders[f"graph {record.plan}"] = Contender(plan, by_codec["sq8"], graphs)
    flat = in_place(rows[3])
    flat_ms: list[float] = []
    for number in np.flatnonzero(held_out):
        for contender in contenders.values():
            contender.run(outputs, int(number), truth[number])
        began = time.perf_counter()
        flat.search(outputs[3][number : number + 1], K)
        flat_ms.append((time.perf_counter() - began) * 1e3)
    base = median(flat_ms)
    print(f"{name}: Flat-768 {base:.1f} ms", flush=True)
    for label, one in contenders.items():
        keeps = [s.keep for s in one.plan.stages]
        efs = [s.params.ef for s in one.plan.stages if s.params.ef]
        after, search = median(one.after), median(one.search)
        times = (
            f"after {after:8.3f} ms (Flat/{base / after:.0f})  "
            f"search {search:8.3f} ms (Flat/{base / search:.0f})"
        )
        recall = f"recall {np.mean(one.shares):.4f}"
        print(f"{name}: {label:<24} {recall}  {times}  keeps {keeps} ef {efs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--codecs", nargs="*", default=CODECS, help="of level 1 (all)")
    options = parser.parse_args()
    widths.KS = (K,)  # nothing else is timed here
    faiss.omp_set_num_threads(1)
    print(machine(), "faiss", faiss.__version__, flush=True)
    path = WORK / f"rows-{options.rows}.npy"
    made = make_rows(path, options.rows)
    rows = level_rows(path, options.rows)
    by_codec = opened(rows, options.rows, options.codecs)
    graphs = graphs_of(rows, by_codec["sq8"], options.rows)
    settings = {"kind": (KIND, 0.0), "unkind": (UNKIND, 0.0), "gap": (KIND, 0.5)}
    for name, (noise, gap) in settings.items():
        queries = make_queries(made, options.queries, noise=noise, gap=gap)
        compare(name, queries, rows, by_codec, graphs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak resident {peak:.1f} GiB, mapped files included")


if __name__ == "__main__":
    main()

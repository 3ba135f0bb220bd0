"""How long `hivlp import-vectors` takes, in how much memory, and what the index then finds.

    python bench/import_vectors.py --rows 5000000 --folder /tmp/vectors --keep

Vectors are synthetic, fp16: clustered, with a falling spectrum and a common mean as embeddings have
them, beside a table of ids and four columns. Prints seconds on the clock and of the processor by
phase, the most memory that was resident (with and without pages of files, which the system takes
back), then ANN recall@10 and milliseconds of the default plan for queries that are no rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.build.directions import Direction
from hivlp.index.build.vectors.importing import ImportReport, import_vectors
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.queries import own_space, vector_queries
from hivlp.index.build.vectors.record import ImportSettings
from hivlp.index.build.widths import exact_best, share_found
from hivlp.index.build.wishes import Wishes
from hivlp.index.cascade import PlanRequest
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.store import SnapshotStore

CHUNK = 50_000
CLUSTERS = 20_000
DECAY = 0.55
SPREAD = 0.7
K = 10


class Maker:
    """Clustered vectors whose directions matter less and less."""

    def __init__(self, dim: int, seed: int = 5) -> None:
        self.rng = np.random.default_rng(seed)
        basis = np.linalg.qr(self.rng.normal(size=(dim, dim)))[0]
        spectrum = (1.0 + np.arange(dim)) ** -DECAY
        self.turned = (spectrum[:, None] * basis).astype(np.float32)
        self.centres = self.rng.normal(size=(CLUSTERS, dim)).astype(np.float32)
        self.mean = 0.6 * self.rng.normal(size=dim).astype(np.float32)
        self.dim = dim

    def vectors(self, count: int) -> Any:
        """(count, dim) float32 unit vectors."""
        noise = SPREAD * self.rng.standard_normal((count, self.dim), dtype=np.float32)
        own = self.centres[self.rng.integers(0, CLUSTERS, count)] + noise + self.mean
        found = own @ self.turned
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def table(self, first: int, count: int) -> Any:
        """Ids and four columns."""
        rng = self.rng
        return pa.table(
            {
                "id": [f"item-{i:09d}" for i in range(first, first + count)],
                "price": rng.gamma(2, 20, count).round(2),
                "year": rng.integers(1990, 2027, count).astype(np.int32),
                "maker": [f"maker {i}" for i in rng.integers(0, 3_000, count)],
                "in_stock": rng.random(count) < 0.7,
            }
        )


def make(folder: Path, rows: int, dim: int) -> Maker:
    """Write vectors_0.npy and table_0.parquet, where they are not there yet."""
    maker = Maker(dim)
    if (folder / "table_0.parquet").is_file():
        return maker
    folder.mkdir(parents=True, exist_ok=True)
    head = {"descr": "<f2", "fortran_order": False, "shape": (rows, dim)}
    with (folder / "vectors_0.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head)
        for first in range(0, rows, CHUNK):
            some = maker.vectors(min(CHUNK, rows - first))
            stream.write(some.astype("<f2").data)
    schema = maker.table(0, 1).schema
    with pq.ParquetWriter(folder / "table_0.parquet", schema) as tables:
        for first in range(0, rows, CHUNK):
            tables.write_table(maker.table(first, min(CHUNK, rows - first)))
    return maker


@contextmanager
def watched() -> Iterator[list[tuple[float, int, int]]]:
    """Moments of a block: (time.monotonic(), MiB of its own memory, with pages of files)."""
    seen: list[tuple[float, int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            words = [line.split() for line in lines]
            found = {word[0]: int(word[1]) // 1024 for word in words if word[-1:] == ["kB"]}
            seen.append((time.monotonic(), found["RssAnon:"], found["VmRSS:"]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def most_by_phase(
    report: ImportReport, began: float, seen: list[tuple[float, int, int]]
) -> dict[str, list[Any]]:
    """By phase: seconds on the clock, of the processor, and the most MiB of its own memory."""
    found: dict[str, list[Any]] = {}
    for name, (clock, processor) in report.phases.items():
        own = [mib for moment, mib, _ in seen if began <= moment <= began + clock]
        found[name] = [round(clock, 1), round(processor, 1), max(own, default=0)]
        began += clock
    return found


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Import once, print what it took, and search."""
    maker = make(given.folder, given.rows, given.dim)
    home = given.folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    wishes = Wishes(family=given.family, level1=given.level1)
    settings = ImportSettings(rows_type="fp16", wishes=wishes)
    source = NpySource(given.folder / "vectors_0.npy", given.folder / "table_0.parquet")
    began, cpu = time.monotonic(), time.process_time()
    with watched() as seen:
        report = import_vectors(source, SnapshotStore(home), "bench", settings)
    manifest = report.manifest
    assert manifest.imported is not None
    figures = {
        "rows": given.rows,
        "dim": given.dim,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "phases (clock s, processor s, own MiB)": most_by_phase(report, began, seen),
        "own_mib": max(own for _, own, _ in seen),
        "resident_mib": max(resident for *_, resident in seen),
        "level1": manifest.sides["image"].level1,
        "shares": manifest.imported.shares,
        "notes": report.notes,
    }
    print(json.dumps(figures, indent=2), flush=True)
    return found(home, maker, given.queries)


def found(home: Path, maker: Maker, count: int) -> dict[str, Any]:
    """What the default plan finds of the best ten, and how fast."""
    maker.rng = np.random.default_rng(99)
    snapshot = SnapshotStore(home).open("bench", hash_up_to_bytes=0)
    searcher = LocalSearcher(snapshot)
    finest = own_space(maker.vectors(count), snapshot.rotation, "queries")
    specs, side = snapshot.manifest.specs, snapshot.sides["image"]
    outputs = vector_queries(finest, specs, np.arange(count), from_corpus=False).outputs
    direction = Direction("image", "image", outputs, side.rows, np.ones(count, np.bool_))
    best = exact_best(direction, specs[-1].level, K)
    figures: dict[str, Any] = {}
    for name in ("funnel", "cascade"):
        plan = searcher.plan(PlanRequest("image", "image", K, name))
        times, shares = [], []
        for i in range(count):
            one = {level: some[i : i + 1] for level, some in outputs.items()}
            began = time.perf_counter()
            hits = run_plan(searcher, "image", plan, one)[0]
            times.append(1e3 * (time.perf_counter() - began))
            shares.append(share_found(hits, best[i], np.empty(0, np.int64), K))
        figures[name] = {
            "keeps": [stage.keep for stage in plan.stages],
            "ann_recall_10": round(float(np.mean(shares)), 4),
            "ms": round(median(times), 2),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--family", default="scan")
    parser.add_argument("--level1", default="auto")
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--keep", action="store_true", help="leave vectors and index there")
    given = parser.parse_args()
    print(json.dumps(run(given), indent=2))
    if not given.keep:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()

"""Five million items in two gigabytes of memory: does the scan family hold up with rows on disk?

    python bench/small_memory.py --make         # 5M rows of the synthetic million, 5 minutes
    python bench/small_memory.py                # as root, where cgroup v1 limits memory

Rows are the synthetic million five times, each time with other signs of its 768 numbers (five
galleries of one kind), fp16 on disk. The measured process lives in a memory cgroup of 2 GB, page
cache included: level 1's codes and the norms stay, what is re-scored comes from the disk, read as
mapped pages fault, or asked for beforehand (`madvise(MADV_WILLNEED)` a row).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from measure import WORK, exact_top, machine, median
from synthetic import DIM, DIMS, KIND, make_queries, make_rows

from hivlp.index.backends.choose import open_level, write_level
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.cascade import PlanRequest, run_stage
from hivlp.index.plans import WidthPoint, make_plan, stage_query
from hivlp.models.levels import LevelSpec

K, PARTS = 10, 5
GROUP = Path("/sys/fs/cgroup/memory/hivlp-bench")
SPECS = tuple(LevelSpec(level, level, dim) for level, dim in enumerate(DIMS, start=1))
KEEPS = ((500, 30), (1_000, 40), (2_000, 60), (4_000, 80))
PAGE = mmap.PAGESIZE


def signs(part: int) -> np.ndarray:
    """The signs of one part's numbers, (768,) float32."""
    return np.random.default_rng(100 + part).choice(np.float32([-1, 1]), DIM)


def make(rows_each: int) -> None:
    """Rows, norms, SQ8 codes, queries and their exact top ten."""
    base = make_rows(WORK / f"rows-{rows_each}.npy", rows_each)
    count = PARTS * rows_each
    path = WORK / f"five-rows-{count}.npy"
    out = np.lib.format.open_memmap(path, "w+", np.float16, (count, DIM))
    for part in range(PARTS):
        for start in range(0, rows_each, 50_000):
            chunk = np.asarray(base[start : start + 50_000]) * signs(part)
            at = part * rows_each + start
            out[at : at + len(chunk)] = chunk
        print(f"part {part + 1} of {PARTS}", flush=True)
    out.flush()
    found = {}
    for level in (1, 2):
        found[str(level)] = inverse_norms(out, DIMS[level - 1])
    np.savez(WORK / f"five-norms-{count}.npz", **found)
    began = time.monotonic()
    write_level(WORK / f"five-codes-{count}.faiss", LevelRows(out, DIMS[0], found["1"]), "sq8")
    print(f"codes written in {time.monotonic() - began:.0f} s", flush=True)
    queries = make_queries(base, 200, noise=KIND)
    finest = queries.levels[-1] * signs(0)
    early = [q * signs(0)[: q.shape[1]] for q in queries.levels[:-1]]
    rows = [exact_top(Cast(out), finest, K)]
    named = {f"q{n}": q for n, q in enumerate([*early, finest], 1)}
    np.savez(WORK / f"five-queries-{count}.npz", truth=rows[0], **named)


class Cast:
    """fp16 rows, read as fp32."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> np.ndarray:
        return self.rows[part].astype(np.float32)


MAPPED: list[np.memmap] = []
"""The mapping behind the rows that are measured."""


class Asked(LevelRows):
    """Rows that are asked of the disk all at once before they are read one by one."""

    def score(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        ask(MAPPED[0], rows)
        return LevelRows.score(self, query, rows)


def ask(matrix: np.memmap, rows: np.ndarray) -> None:
    """Begin to read rows: one advice a row."""
    base, size = matrix._mmap, matrix.strides[0]
    first = matrix.offset % mmap.ALLOCATIONGRANULARITY
    for row in rows.tolist():
        begin = (first + row * size) // PAGE * PAGE
        base.madvise(mmap.MADV_WILLNEED, begin, first + (row + 1) * size - begin)


def measured(count: int) -> None:
    """Run every width, plain and asked, in this process; one JSON line each."""
    MAPPED.append(np.load(WORK / f"five-rows-{count}.npy", mmap_mode="r"))
    MAPPED[0]._mmap.madvise(mmap.MADV_RANDOM)
    matrix = MAPPED[0].view(np.ndarray)
    norms = dict(np.load(WORK / f"five-norms-{count}.npz"))
    given = dict(np.load(WORK / f"five-queries-{count}.npz"))
    outputs = {n: np.ascontiguousarray(given[f"q{n}"]) for n in (1, 2, 3)}
    for kind in (LevelRows, Asked):
        rows = {n: kind(matrix, d, norms.get(str(n))) for n, d in enumerate(DIMS, 1)}
        codes = WORK / f"five-codes-{count}.faiss"
        levels = {
            n: open_level(n, r, codes if n == 1 else None, "faiss-cpu") for n, r in rows.items()
        }
        for number, keeps in enumerate(KEEPS):
            run(kind.__name__, keeps, levels, outputs, given["truth"], number, count)


def run(name, keeps, levels, outputs, truth, number, count) -> None:  # type: ignore[no-untyped-def]
    """One setting over queries of its own, so that none finds its pages in the cache."""
    point = {("image", "text", "cascade"): (WidthPoint(K, keeps),)}
    plan = make_plan(PlanRequest("image", "text", K, "cascade"), SPECS, point, count)
    times: list[list[float]] = [[] for _ in plan.stages]
    shares = []
    mine = range(number * 25 + (100 if name == "Asked" else 0), 200, len(KEEPS) * 2)
    for i in mine:
        found = None
        for stage, spent in zip(plan.stages, times, strict=True):
            query = stage_query(
                stage, {n: q[i : i + 1] for n, q in outputs.items()}, DIMS[stage.level - 1]
            )
            began = time.perf_counter()
            found = run_stage(levels, stage, query, found)
            spent.append(1e3 * (time.perf_counter() - began))
        shares.append(len(np.intersect1d(found[0].rows, truth[i])) / K)
    medians = [round(median(t), 2) for t in times]
    print(json.dumps({"read": name, "keeps": keeps, "recall": round(float(np.mean(shares)), 4),
                      "ms": medians, "queries": len(shares)}), flush=True)  # fmt: skip


def forget(count: int) -> None:
    """Drop the files from the page cache: what others have read would cost the group nothing."""
    for path in WORK.glob(f"five-*-{count}.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limited(count: int, limit: int) -> None:
    """Start the measuring process inside a memory cgroup and report the most it used."""
    forget(count)
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(limit))
    (GROUP / "memory.max_usage_in_bytes").write_text("0")
    inside = f"echo $$ > {GROUP}/cgroup.procs && exec {sys.executable} {__file__} --inside {count}"
    subprocess.run(["/bin/sh", "-c", inside], check=True)
    most = int((GROUP / "memory.max_usage_in_bytes").read_text())
    print(f"memory used at most {most / 2**30:.2f} GiB of {limit / 2**30:.2f}, page cache included")
    GROUP.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of five parts")
    parser.add_argument("--limit", type=int, default=2_000_000_000)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measured(options.inside)
        return
    print(machine(), f"pid {os.getpid()}")
    if options.make:
        make(options.rows)
        return
    limited(PARTS * options.rows, options.limit)


if __name__ == "__main__":
    main()

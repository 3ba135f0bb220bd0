"""How every benchmark here measures: candidates interleaved in one process, medians, ratios.

One pass runs every contender once on the next query, in an order shuffled from pass to pass, so
that the machine's drift touches all alike. Threads are pinned to one before faiss is loaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

WORK = Path(os.environ.get("HIVLP_BENCH_HOME", ".hivlp/bench"))
RESULTS = Path(__file__).parent / "results"


def interleaved(
    contenders: Mapping[str, Callable[[int], object]],
    passes: int,
    warm: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of each contender, called with the pass number, `passes` times after warming.

    `time.thread_time` as the clock leaves out what the processor did for others meanwhile: for
    long scans of one thread on a shared machine.
    """
    order = list(contenders)
    shuffle = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(passes + warm):
        shuffle.shuffle(order)
        for name in order:
            started = clock()
            contenders[name](number)
            if number >= warm:
                times[name].append((clock() - started) * 1e3)
    return times


def median(times: Sequence[float]) -> float:
    """The median of some milliseconds."""
    return statistics.median(times)


def overlap(found: Sequence[np.ndarray], truth: Sequence[np.ndarray] | np.ndarray) -> float:
    """Mean share of each row of `truth` (n, k) that is in the same row of `found`."""
    return float(
        np.mean([len(np.intersect1d(f, t)) / len(t) for f, t in zip(found, truth, strict=True)])
    )


def exact_top(rows: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """(n, k) rows with the largest inner products, found in blocks; the benchmarks' oracle."""
    best_s = np.full((len(queries), 0), 0, np.float32)
    best_r = np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(rows), 100_000):
        scores = queries @ np.asarray(rows[start : start + 100_000]).T
        part = np.argpartition(-scores, min(k, scores.shape[1] - 1), axis=1)[:, :k]
        best_s = np.concatenate([best_s, np.take_along_axis(scores, part, 1)], 1)
        best_r = np.concatenate([best_r, part + start], 1)
        order = np.argsort(-best_s, axis=1, kind="stable")[:, :k]
        best_s = np.take_along_axis(best_s, order, 1)
        best_r = np.take_along_axis(best_r, order, 1)
    return best_r


def machine() -> str:
    """One line about where this ran."""
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, f": {model}").split(":", 1)[1].strip()
    python = platform.python_version()
    return f"{model}, {os.cpu_count()} cores, Python {python}, numpy {np.__version__}"


def peak_gib() -> float:
    """The most memory this process has held, mapped files included, in GiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)

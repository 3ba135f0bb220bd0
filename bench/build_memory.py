"""Peak memory of a build of many rows with metadata, stage by stage; the encoder is a fake.

    python -m bench.build_memory --rows 1000000

A Parquet file of captions (a thousand different ones, so that encoding costs little) and eight
metadata columns is made, read, encoded, and built by a child process, which prints the largest
resident set after each stage. Files that are mapped count in it, though their pages are given back
when memory is short; `--stop-after catalogue` leaves them out.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 100_000


def make_rows(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    words = [f"{a} {b} {c}" for a in "abcdefghij" for b in "klmnopqrst" for c in "0123456789"]
    writer = None
    for start in range(0, rows, BLOCK):
        n = min(BLOCK, rows - start)
        numbers = np.arange(start, start + n)
        moments = rng.integers(1_600_000_000, 1_700_000_000, n)
        tags = [[f"tag{t}" for t in row] for row in rng.integers(0, 500, (n, 3))]
        columns = {
            "id": [f"product-{i:09d}" for i in numbers],
            "text": [words[i % len(words)] for i in numbers],
            "title": [f"the title of product number {i * 7919 % rows:09d}, long" for i in numbers],
            "tags": tags,
            "price": np.round(rng.gamma(2.0, 20.0, n), 2),
            "weight": rng.standard_normal(n),
            "stock": rng.integers(0, 100, n),
            "day": pa.array((moments // 86_400).astype(np.int32), pa.date32()),
            "at": pa.array(moments * 1_000_000, pa.timestamp("us", "UTC")),
            "colour": [f"colour{c}" for c in rng.integers(0, 12, n)],
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(path: Path, home: Path, stop: str) -> None:
    from hivlp.index.build import build as module
    from hivlp.index.build.corpus import open_corpus
    from hivlp.index.build.model import Model
    from hivlp.index.snapshot.store import SnapshotStore
    from tests.fakes import FakeEncoder

    began = time.perf_counter()
    print(f"{'started':<12}{peak_mib():>8.0f} MiB", flush=True)

    def told(name: str, stage: str) -> None:
        inner = getattr(module, name)

        def outer(*given: Any, **options: Any) -> Any:
            answer = inner(*given, **options)
            spent, took = time.process_time(), time.perf_counter() - began
            print(
                f"{stage:<12}{peak_mib():>8.0f} MiB after {spent:6.1f} s of CPU, {took:6.1f} s",
                flush=True,
            )
            if stage == stop:
                sys.exit(0)
            return answer

        setattr(module, name, outer)

    for name, stage in (
        ("encode_corpus", "encode"),
        ("write_catalogue", "catalogue"),
        ("_assemble", "rows"),
        ("_encode_queries", "queries"),
        ("_choose", "levels"),
        ("_gate", "gate"),
        ("_build_index", "all"),
    ):
        told(name, stage)
    text: FakeEncoder[str] = FakeEncoder("text")
    settings = module.BuildSettings(quiet=True, sample=50)
    model = Model("fake", home, text, None)
    module.build_index(open_corpus(path), model, SnapshotStore(home), "default", settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stop-after", default="all")
    parser.add_argument("--file", type=Path, help="rows made before, or to be kept")
    parser.add_argument("--child", type=Path)
    given = parser.parse_args()
    if given.child is not None:
        child(given.file, given.child, given.stop_after)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = given.file or Path(folder) / "rows.parquet"
        if not path.is_file():
            make_rows(path, given.rows)
        command = [sys.executable, "-m", "bench.build_memory", "--file", str(path)]
        command += ["--stop-after", given.stop_after, "--child", str(Path(folder) / "home")]
        print(f"{pq.ParquetFile(path).metadata.num_rows} rows", flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

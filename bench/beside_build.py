"""Searches while a version is built over HTTP beside them: what the build costs them.

    python bench/beside_build.py --home .hivlp --corpus .hivlp/demo/corpus --rate 20

The home is copied, without what earlier builds encoded, and `hivlp serve` started over the copy.
Texts arrive by a Poisson process: before the build, for as long as it encodes and writes, and once
more after it. Nothing of it becomes active.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from http_load import Load, Request, run_load
from live_changes import ready
from measure import RESULTS, machine

from hivlp.service.client import Client

WORDS = ("red", "heart", "cat", "flag", "rain", "train", "pizza", "moon", "old", "tree")
OVER = ("done", "failed", "cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=20.0, help="searches a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="before and after, and a piece")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        left_out = shutil.ignore_patterns("cache", "demo", ".activation")
        shutil.copytree(given.home, home, ignore=left_out)
        found = measure(given, home)
    text = json.dumps({"machine": machine(), "rate": given.rate, **found}, indent=1)
    (RESULTS / "beside_build.json").write_text(text + "\n", encoding="utf-8")
    return 0


def measure(given: argparse.Namespace, home: Path) -> dict[str, object]:
    """Percentiles before, while and after."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    corpus = given.corpus.resolve()
    variables = {
        "HIVLP_JOBS__ROOTS": json.dumps([str(corpus.parent)]),
        "HIVLP_CACHE__MAX_BYTES": "0",
        "HIVLP_LOG__LEVEL": "warning",
    }
    command = [sys.executable, "-m", "hivlp.service.main", "serve"]
    command += ["--home", str(home), "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        try:
            ready(port)
            run_load([port], asking(0), given.rate, 3.0)
            loads = {"before": run_load([port], asking(1_000), given.rate, given.seconds)}
            with Client(f"http://127.0.0.1:{port}") as client:
                build = client.start_build(str(corpus), activate=False, metadata_group="concept")
                loads["while"] = while_building(client, build.id, given, port)
                reason = client.build(build.id).reason
            loads["after"] = run_load([port], asking(9_000), given.rate, given.seconds)
        finally:
            process.send_signal(signal.SIGINT)
    if reason is not None:
        raise SystemExit(f"the build failed: {reason}")
    for name, load in loads.items():
        print(f"{name:<8}{load.to_text()}", flush=True)
    marks = (50, 95, 99)
    return {name: {f"p{p}": load.percentile(p) for p in marks} for name, load in loads.items()}


def while_building(client: Client, build: str, given: argparse.Namespace, port: int) -> Load:
    """Load in pieces for as long as the build runs."""
    all_of_it, start = Load(), 2_000
    while client.build(build).state not in OVER:
        piece = run_load([port], asking(start), given.rate, min(5.0, given.seconds))
        start += len(piece.each)
        for status, ms in piece.each:
            all_of_it.add(status, ms)
    return all_of_it


def asking(start: int) -> Callable[[int], Request]:
    """Texts of two words and a number: none is in the cache."""

    def make(number: int) -> Request:
        at = start + number
        query = f"{WORDS[at % 10]} {WORDS[at // 10 % 10]} {at}"
        return "POST", "/search/text", json.dumps({"query": query}).encode()

    return make


if __name__ == "__main__":
    sys.exit(main())

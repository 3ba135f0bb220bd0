"""What checking live answers against exact search costs them: p50 and p99, with and without.

    python bench/recall_sampling.py --items 1000000 --rate 20 --rounds 10

Imports synthetic vectors and starts `hivlp serve` on them several times: twice one that checks
nothing, so that what two alike differ by is known; one that draws every search, within the default
share of a core; one that may use a whole core; those two with the priority of all other threads;
and one that searches exactly in one go. Searches by vector arrive by a Poisson process at one
server after another, in random order, round after round. Each round's own percentile counts, so
that one disturbed by what else the machine does is one of many. `--only` starts some of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from http_load import Load, Request, run_load
from live_changes import ready
from measure import machine
from prometheus_client.parser import text_string_to_metric_families
from synthetic import make_rows

OFF = {"HIVLP_RECALL__SHARE": "0"}
EVERY = {"HIVLP_RECALL__SHARE": "1", "HIVLP_RECALL__MAX_PER_S": "1000"}
FULL = {**EVERY, "HIVLP_SPARE__CORE_SHARE": "1"}
WHOLE = "import hivlp.index.backends.exact as e; e.SLICE_NUMBERS = 10**12; "
EQUAL = "import hivlp.service.priority as p; p.NICE = 0; "
SERVERS = {
    "off": (OFF, ""),
    "off, once more": (OFF, ""),
    "default share of a core": (EVERY, ""),
    "default, priority of all": (EVERY, EQUAL),
    "a whole core": (FULL, ""),
    "a whole core, of all": (FULL, EQUAL),
    "a whole core, in one go": (FULL, WHOLE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=20.0, help="searches a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each server in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the index is made, or was")
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=tuple(SERVERS))
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        home = make_home(given.folder or Path(folder), given.items)
        ports = {
            name: running.enter_context(server(home, environment, before))
            for name, (environment, before) in SERVERS.items()
            if name in given.only
        }
        measure(given, ports)


def make_home(folder: Path, items: int) -> Path:
    home = folder / f"home-{items}"
    if not home.exists():
        make_rows(folder / f"rows-{items}.npy", items)
        command = [sys.executable, "-m", "hivlp.service.main", "import-vectors"]
        command += ["--family", "scan", "--level1", "sq8", "--home", str(home)]
        command += ["--vectors", str(folder / f"rows-{items}.npy")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return home


@contextmanager
def server(home: Path, environment: dict[str, str], before: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"{before}from hivlp.service.main import main; import sys; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--home", str(home), "--port", str(port)]
    more = {"HIVLP_CACHE__MAX_BYTES": "0", "HIVLP_LIMITS__MAX_WAIT_MS": "60000", **environment}
    with subprocess.Popen(
        command, env={**os.environ, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            ready(port)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(given: argparse.Namespace, ports: dict[str, int]) -> None:
    rows = make_rows((given.folder or Path()) / f"rows-{given.items}.npy", given.items)
    rng = np.random.default_rng(7)
    asked = rows[np.sort(rng.choice(given.items, 500, replace=False))]
    asked = asked + 0.02 * rng.standard_normal(asked.shape, dtype=np.float32)

    def make(number: int) -> Request:
        vector = ",".join(f"{x:.5f}" for x in asked[number % len(asked)])
        return "POST", "/search/vector", f'{{"vector":[{vector}],"k":10}}'.encode()

    loads: dict[str, list[Load]] = defaultdict(list)
    before = {name: counts(port) for name, port in ports.items()}
    for number in range(given.rounds + 1):
        for name in rng.permutation(list(ports)):
            load = run_load([ports[name]], make, given.rate, given.seconds, seed=number)
            assert not load.failed, load.statuses
            if number:  # the first warms
                loads[name].append(load)
    print("median over rounds of each round's own percentile, ms; checks and core used meanwhile")
    seconds = given.seconds * (given.rounds + 1)
    for name, port in ports.items():
        p50, p95, p99 = (
            np.median([load.percentile(p) for load in loads[name]]) for p in (50, 95, 99)
        )
        after = counts(port)
        checks, used = (after[i] - before[name][i] for i in (0, 1))
        print(
            f"{name:25} p50 {p50:7.2f}  p95 {p95:7.2f}  p99 {p99:7.2f}   {checks:4.0f} checks, "
            f"{1e3 * used / max(checks, 1):6.1f} ms each, {100 * used / seconds:4.1f} % of a core"
        )


def counts(port: int) -> tuple[float, float]:
    """Checks done, and seconds of a core that they took."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value
    checks, used = "hivlp_ann_recall_checks_total", "hivlp_ann_recall_cpu_seconds_total"
    return totals[checks], totals[used]


if __name__ == "__main__":
    main()

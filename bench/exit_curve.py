"""What lowers K1, the rows that level 1 must keep: trials of early text exits on one fold.

    python bench/exit_curve.py --list
    python bench/exit_curve.py base texts-40k          # any trials, a line each
    python bench/exit_curve.py                         # all of them

Needs the demo's pictures and texts under HIVLP_HOME (`hivlp demo --no-serve` makes them). One fold
of five (seed 0), one finest model, fitted on the known things and 20,000 texts and then left alone:
trials differ only in how level 1 of the text tower is taught. Features are kept like the product's;
what a trial found is kept under HIVLP_BENCH_HOME and not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from exit_curve_data import FoldData, fold_data
from exit_curve_trials import TRIALS, Trial, fit_level1
from measure import WORK, machine

from hivlp.models.training.measures import Side, early_ranks, level_recalls, width_for

SMALLEST = 240
KNOWN_QUERIES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="names (default: all)")
    parser.add_argument("--list", action="store_true", help="print the trials there are")
    parser.add_argument("--again", action="store_true", help="run what was already found")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if unknown := sorted(set(options.trials) - set(TRIALS)):
        parser.error(f"no trial {unknown[0]!r}; --list prints them")
    names = options.trials or list(TRIALS)
    if options.list:
        print("\n".join(f"{name:<22} {TRIALS[name].said}" for name in names))
        return 0
    torch.set_num_threads(options.threads)
    folder = WORK / "exit_curve"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}\n\n{header()}", flush=True)
    data: FoldData | None = None
    for name in names:
        file = folder / f"{name}.json"
        if options.again or not file.is_file():
            data = data or fold_data(folder, options.threads)
            file.write_text(json.dumps(run(TRIALS[name], data), indent=1), encoding="utf-8")
        print(line(name, json.loads(file.read_text(encoding="utf-8"))), flush=True)
    return 0


def run(trial: Trial, data: FoldData) -> dict[str, Any]:
    """Fit one trial's level 1, and ask it for known and never-seen things."""
    started, busy = time.perf_counter(), time.process_time()
    encode = fit_level1(trial, data)
    found: dict[str, Any] = {
        "seconds": round(time.perf_counter() - started),
        "cpu_s": round(time.process_time() - busy),
    }
    early = encode("captions")
    print(f"  fitted in {found['seconds']} s", file=sys.stderr, flush=True)
    for who, chosen in (("known", ~data.caption_left_out), ("never seen", data.caption_left_out)):
        found[who] = measured(early, data, np.flatnonzero(chosen))
    return found


def measured(early: np.ndarray, data: FoldData, rows: np.ndarray) -> dict[str, Any]:
    """K1 for .99 by N, and R@K of level 1 alone and of the finest level, among all pictures."""
    if len(rows) > KNOWN_QUERIES:
        chosen = np.random.default_rng(0).choice(rows, KNOWN_QUERIES, replace=False)
        rows = np.sort(chosen)
    queries = Side([early[rows], data.captions_finest[rows]], data.caption_group[rows])
    dim = early.shape[1]
    prefix = data.pictures_finest[:, :dim]
    prefix = prefix / np.linalg.norm(prefix, axis=1, keepdims=True)
    gallery = Side([prefix, data.pictures_finest], data.picture_group)
    order = np.random.default_rng(0).permutation(len(gallery.group))
    growth, size = {}, len(order)
    while size >= SMALLEST:
        some = gallery if size == len(order) else gallery.rows(order[:size])
        growth[str(size)] = width_for(early_ranks(queries, some))
        size //= 2
    return {
        "k1": dict(reversed(growth.items())),
        "k1_for_95": width_for(early_ranks(queries, gallery), 0.95),
        "levels": level_recalls(queries, gallery),
        "cosine": float((early[rows] * data.prefix("captions", dim)[rows]).sum(1).mean()),
    }


def header() -> str:
    """The table's first two lines."""
    cells = ["trial", "known: K1 by N", "never seen: K1 by N", "never seen K1 for .95"]
    cells += ["R@10 level 1", "cosine known / never seen", "seconds", "CPU s"]
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


def line(name: str, found: dict[str, Any]) -> str:
    """One trial's line."""
    new = found["never seen"]
    cells = [name]
    cells += [
        ", ".join(str(k) for k in found[who]["k1"].values()) for who in ("known", "never seen")
    ]
    cells += [str(new["k1_for_95"]), f"{new['levels'][0]['R@10']:.3f}"]
    cells += [f"{found['known']['cosine']:.3f} / {new['cosine']:.3f}"]
    cells += [str(found["seconds"]), str(found["cpu_s"])]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())

"""What the demo's recipe makes of concepts it never saw: cross-validation, printed as tables.

    make demo-report        # or: python bench/demo_report.py [--folds 5]

Needs the demo's pictures and texts under HIVLP_HOME (`hivlp demo --no-serve` makes them). Concepts,
not pictures, are dealt into folds: a fold's concepts are in no way part of its fit. About three
minutes a fold on 2 cores; interrupted and run again, it goes on with the next fold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hivlp.index.snapshot.store import default_home
from hivlp.service.demo.cli import demo_steps

# The demo itself takes fewer, to stay within five minutes.
MAX_TEXTS = "20000"
ASKED = {"known": "known", "never_seen": "never seen", "never_seen_among_themselves": "among them"}
DIRECTIONS = {"text_to_image": "text to picture", "image_to_text": "picture to text"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--print", type=Path, metavar="FILE", help="only print a report there is")
    options = parser.parse_args()
    if options.print:
        print(tables(json.loads(options.print.read_text(encoding="utf-8"))))
        return 0
    out = default_home() / "demo" / "crossval"
    fit = next(step for step in demo_steps(default_home()) if step.name == "fit early outputs")
    assert not callable(fit.run)
    arguments = list(fit.run)
    arguments[arguments.index("--out") + 1] = str(out)
    arguments[arguments.index("--max-texts") + 1] = MAX_TEXTS
    command = [sys.executable, "-m", "hivlp.service.main", *arguments]
    subprocess.run([*command, "--folds", str(options.folds), "--only-folds"], check=True)
    print(tables(json.loads((out / "crossval.json").read_text(encoding="utf-8"))))
    return 0


def tables(report: dict[str, Any]) -> str:
    """Markdown: R@K by level and plan, ANN recall by K1, K1 by N."""
    mean = report["mean"]
    lines = [f"Means over {report['folds']} folds.", "", _row("R@1 / R@5 / R@10", _columns(mean))]
    lines.append(_row("---", ["---"] * len(_columns(mean))))
    rows = [*(f"level {i + 1}" for i in range(_levels(mean))), "cascade", "funnel"]
    for place, name in enumerate(rows):
        lines.append(_row(name, [_cell(found, place, name) for found in _asked(mean)]))
    for title, field in (("ANN recall@10 by K1", "ann_recall_by_k1"), ("K1 for .99", "k1_for_99")):
        for direction in DIRECTIONS:
            for who in ("known", "never_seen"):
                found = mean[direction][who][field]
                said = ", ".join(f"{key}: {value:g}" for key, value in found.items())
                lines += ["", f"{title}, {DIRECTIONS[direction]}, {ASKED[who]}: {said}"]
    return "\n".join(lines)


def _columns(mean: dict[str, Any]) -> list[str]:
    return [f"{DIRECTIONS[d]}, {ASKED[w]}" for d in DIRECTIONS for w in ASKED if w in mean[d]]


def _asked(mean: dict[str, Any]) -> list[dict[str, Any]]:
    return [mean[d][w] for d in DIRECTIONS for w in ASKED if w in mean[d]]


def _levels(mean: dict[str, Any]) -> int:
    return len(mean["text_to_image"]["never_seen"]["levels"])


def _cell(found: dict[str, Any], place: int, name: str) -> str:
    levels = found["levels"]
    shown = levels[place] if place < len(levels) else found.get("plans", {}).get(name)
    if shown is None:
        return "–"
    return " / ".join(f"{value:.3f}".removeprefix("0") for value in shown.values())


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())

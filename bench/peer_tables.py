"""Tables from the results of `peers.py`: time at equal recall, and what each group found.

The time at a recall is interpolated between a method's two neighbouring rungs on its frontier (no
other rung is both quicker and surer), linearly in recall; a method that never gets there says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGET = 0.99
KNOBS = re.compile(r" (ef|window|re-scores) \d+.*$| \d+$| \(.*\)$| exact$")
WAYS = (
    (r"^early:", ""),
    (r"^flat batch", "flat, a batch of 32"),
    (r"^entered at .* of middle", "entered at level 2's rows"),
    (r"gathered, re-scores", "level 2 walks, rows gathered ahead, re-score"),
    (r"^middle from .*by prefixes", "one graph: level 2 walks, re-score"),
    (r"^middle from .*diverse", "level 2 walks from diverse rows, re-score"),
    (r"^middle from", "level 2 walks, re-score"),
    (r"^entered at .*by prefixes", "one graph: entered"),
    (r"^entered at .* diverse", "entered at diverse rows"),
    (r"^entered at \d+( type 2)? ef", "entered"),
)
"""Patterns of labels, and what a table calls them."""

Rung = dict[str, Any]


def method_of(label: str) -> str:
    """A label without its knobs; empty for what hides behind the encoder."""
    for pattern, name in WAYS:
        if re.search(pattern, label):
            return name
    plain = re.sub(r"^entered at \d+", "entered,", re.sub(r" type 2", "", label))
    return re.sub(r" ef \d+| re-scores \d+", "", KNOBS.sub("", plain)).strip()


def frontier(rungs: Sequence[Rung]) -> list[Rung]:
    """Rungs that no other beats in both, by rising recall."""
    found: list[Rung] = []
    for rung in sorted(rungs, key=lambda r: (-r["recall"], r["ms"])):
        if not found or rung["ms"] < found[-1]["ms"]:
            found.append(rung)
    return found[::-1]


def at_recall(rungs: Sequence[Rung], target: float = TARGET) -> Rung | None:
    """`ms` and `early_ms` at the target; None if the method stays below it."""
    line = frontier(rungs)
    above = [i for i, rung in enumerate(line) if rung["recall"] >= target]
    if not above:
        return None
    high = line[above[0]]
    if above[0] == 0 or high["recall"] == target:
        return {**high, "between": [high["label"]]}
    low = line[above[0] - 1]
    share = (target - low["recall"]) / (high["recall"] - low["recall"])
    mixed = {key: low[key] + share * (high[key] - low[key]) for key in ("ms", "early_ms")}
    return {**mixed, "between": [low["label"], high["label"]]}


def methods(found: Sequence[Rung]) -> dict[str, list[Rung]]:
    """Rungs by method, in the order they ran."""
    grouped: dict[str, list[Rung]] = {}
    for rung in found:
        name = method_of(rung["label"])
        if name:
            grouped.setdefault(name, []).append(rung)
    return grouped


def cell(point: Rung | None, flat: float) -> str:
    """`ms, Flat over it`, and the early time where there is one."""
    if point is None:
        return "below"
    text = f"{point['ms']:.3f} (Flat/{flat / point['ms']:.0f})"
    return text + (f", early {point['early_ms']:.2f}" if point["early_ms"] else "")


def equal_recall(told: Any) -> str:
    """One row a method, one column a setting: milliseconds at the target recall."""
    settings = told["settings"]
    by_setting = {name: methods(own["found"]) for name, own in settings.items()}
    names = list(dict.fromkeys(name for own in by_setting.values() for name in own))
    lines = ["| at recall .99 | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
    for name in names:
        cells = []
        for own in by_setting.values():
            flat = own["flat"][0]["ms"]
            cells.append(cell(at_recall(own.get(name, [])), flat))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ladder(told: Any, match: str = "") -> str:
    """Every rung: recall / milliseconds in every setting."""
    settings = told["settings"]
    by_label: dict[str, list[str]] = {}
    for own in settings.values():
        for rung in own["found"]:
            if re.search(match, rung["label"]):
                text = f"{rung['recall']:.4f} / {rung['ms']:.3f}"
                early = f" (early {rung['early_ms']:.2f})" if rung["early_ms"] else ""
                by_label.setdefault(rung["label"], []).append(text + early)
    lines = ["| recall / ms | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
    lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in by_label.items()]
    return "\n".join(lines)


def print_tables(results: Path, names: Sequence[str], whole: bool) -> None:
    """Tables of all results, or of those whose file name holds one of `names`."""
    for path in sorted(results.glob("peers_*.json")):
        if names and not any(name in path.stem for name in names):
            continue
        told = json.loads(path.read_text())
        loads = {name: [round(x, 1) for x in own["load"]] for name, own in told["settings"].items()}
        head = f"{told['rows']} rows, {told['queries']} queries, {told['passes']} passes"
        print(f"\n### {path.stem}: {head}, {told['pages']} pages {told['malloc']}, load {loads}\n")
        print(ladder(told) if whole else equal_recall(told))

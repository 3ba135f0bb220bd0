"""hivlp-small by its variants, over left-out things and seeds: which way of making early exits?

    python bench/small_runs.py --set train.batch=64          # 800 steps, three seeds
    python bench/small_runs.py --variants nested --seeds 0 --steps 0 --max-seconds 3600 --name hour

Needs the demo's pictures (`hivlp demo --no-serve` makes them). Things, not pictures, are dealt into
five folds; a seed leaves out the fold of its number, trains on the rest, and is asked for what it
left out: among all pictures, and among the left-out ones alone. Variants:

- nested, per_exit: the two forms of the losses, docs/papers.md;
- one_level: the last exit alone, as wide as the others' finest level;
- exits_after: early exits fitted on the frozen towers of one_level, in its own space.

All variants take as many steps with the same batches, so that what else the machine does changes
nothing but the time. Every step is a command of `hivlp`; a finished one is not run again, and a
killed training goes on. Kept under HIVLP_BENCH_HOME.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, WORK

from hivlp.index.snapshot.store import default_home

FOLDS = 5
RERANKED = 20
VARIANTS = ("nested", "per_exit", "one_level", "exits_after")
DIMS = (64, 128, 256)
CHANGES = {
    "nested": ['form="nested"'],
    "per_exit": ['form="per_exit"'],
    "one_level": ['form="nested"', f"model.dims=[{DIMS[-1]}]"],
}
METADATA = "metadata.jsonl"
GALLERIES = ("all", "among")
AT = ("1", "5", "10")
SHOWN = ("query", "searched", "queries", "rows", "systems", "by_width", "width_needed")
HEADING = "| variant | system | R@1 / R@5 / R@10 | ANN recall@10 | seeds |"
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One variant of one seed."""

    variant: str
    seed: int
    folder: Path
    corpora: Path

    @property
    def trained(self) -> Path:
        """The folder of its training run; exits_after has that of one_level."""
        name = "one_level" if self.variant == "exits_after" else self.variant
        return self.folder.parent / f"{name}-{self.seed}" / "run"

    @property
    def artifact(self) -> Path:
        return self.folder / "artifacts" / "small"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=default_home() / "demo" / "corpus")
    parser.add_argument("--name", default="short", help="folder of these runs, and their results")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=range(FOLDS), default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800, help="0: as long as --max-seconds")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="PART.FIELD=VALUE")
    options = parser.parse_args()
    if "exits_after" in options.variants and "one_level" not in options.variants:
        parser.error("--variants: exits_after is fitted on one_level, which must be given too")
    options.variants.sort(key=VARIANTS.index)
    home = WORK / "small" / options.name
    results = []
    for seed in options.seeds:
        corpora = split_corpus(options.corpus, home, seed)
        for variant in options.variants:
            run = Run(variant, seed, home / f"{variant}-{seed}", corpora)
            results.append(measured(run, options))
            save(options, results)
            print(tables(results), flush=True)
    return 0


def split_corpus(corpus: Path, home: Path, seed: int) -> Path:
    """Three folders of pictures: what is trained on, everything, and what was left out."""
    folder = home / f"corpora-{seed}"
    if folder.is_dir():
        return folder
    lines = (corpus / METADATA).read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    things = sorted({item["concept"] for item in items})
    dealt = np.random.default_rng(0).permutation(len(things)) % FOLDS
    left = {thing for thing, fold in zip(things, dealt, strict=True) if fold == seed}
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for item in items:
        kept = {name: item[name] for name in ("id", "file_name", "captions", "concept")}
        never_seen = item["concept"] in left
        line = json.dumps(kept | {"never_seen": never_seen}, ensure_ascii=False) + "\n"
        for name in ("all", "among" if never_seen else "train"):
            picture = part / name / item["file_name"]
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(corpus / item["file_name"], picture)  # readers refuse links that lead out
            with (part / name / METADATA).open("a", encoding="utf-8") as table:
                table.write(line)
    part.rename(folder)
    return folder


def measured(run: Run, options: argparse.Namespace) -> Record:
    """Train, export, index and evaluate one run; what was kept of it before."""
    kept = run.folder / "measured.json"
    if kept.is_file():
        before = dict(json.loads(kept.read_text(encoding="utf-8")))
        if before["options"] != told(options):
            sys.exit(f"{run.folder} was run with {before['options']}; give another --name")
        return before
    run.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    trained = make_model(run, options)
    found: Record = {"variant": run.variant, "seed": run.seed, "options": told(options), **trained}
    found["sitting_seconds"] = round(time.monotonic() - started)
    if not run.artifact.is_dir():
        hivlp("export", str(trained["model"]), "--out", str(run.artifact))
    for gallery in GALLERIES:
        found[gallery] = evaluated(run, gallery, options)
    del found["model"]
    kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def make_model(run: Run, options: argparse.Namespace) -> Record:
    """Train, or fit exits on what was trained; `model` is what can be exported."""
    if run.variant == "exits_after":
        fit = run.folder / "fit"
        pairs = str(run.corpora / "train")
        dims = ",".join(map(str, DIMS))
        if not (fit / "fit.json").is_file():
            hivlp(
                *("fit-exits", "--towers", str(run.trained), "--pairs", pairs, "--out", str(fit)),
                *("--group", "concept", "--dims", dims, "--threads", str(options.threads)),
            )
        fitted = json.loads((fit / "fit.json").read_text(encoding="utf-8"))
        return {"model": fit, "measured": fitted["measured"]}
    changes = [*CHANGES[run.variant], f"train.seed={run.seed}", *options.set]
    if options.steps:
        changes += [f"train.steps={options.steps}", "train.epochs=1000000"]
    if math.isfinite(options.max_seconds):
        changes.append(f"train.max_seconds={options.max_seconds}")
    hivlp(
        *("train", "hivlp-small", "--corpus", str(run.corpora / "train")),
        *("--group", "concept", "--out", str(run.trained), "--threads", str(options.threads)),
        *(part for change in changes for part in ("--set", change)),
    )
    lines = (run.trained / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    return {"model": run.trained, "steps": last["step"], "seconds": last["seconds"]}


def evaluated(run: Run, gallery: str, options: argparse.Namespace) -> Record:
    """Index a gallery, and ask it for what was left out."""
    report = run.folder / f"{gallery}.json"
    if not report.is_file():
        home = ("--home", str(run.folder / "home"))
        corpus = str(run.corpora / f"{gallery}")
        index = ("--index", gallery, "--artifact", str(run.artifact))
        hivlp("build", corpus, *home, *index, "--metadata-group", "concept")
        asks = json.dumps({"field": "never_seen", "eq": True})
        reranked = () if run.variant == "exits_after" else ("--rerank", str(RERANKED))
        hivlp(
            *("evaluate", *home, *index, "--group", "concept", "--sample", "all"),
            *("--queries", asks, "--directions", "text-image,image-text", *reranked),
            *("--resamples", "0", "--threads", str(options.threads), "--json", str(report)),
        )
    found = json.loads(report.read_text(encoding="utf-8"))["directions"]
    return {"directions": [{name: each[name] for name in SHOWN} for each in found]}


def hivlp(*arguments: str) -> None:
    """Run a command of ours. Raises CalledProcessError."""
    print("hivlp", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "hivlp.service.main", *arguments], check=True)


def told(options: argparse.Namespace) -> Record:
    """What shapes a run besides its variant and seed."""
    limit = None if math.isinf(options.max_seconds) else options.max_seconds
    return {"steps": options.steps, "max_seconds": limit, "set": options.set}


def save(options: argparse.Namespace, results: Sequence[Record]) -> None:
    """Keep the results beside the others'."""
    text = json.dumps({"options": told(options), "runs": results}, indent=1)
    (RESULTS / f"small_runs_{options.name}.json").write_text(text + "\n", encoding="utf-8")


def tables(results: Sequence[Record]) -> str:
    """Means over seeds as Markdown: R@1 / R@5 / R@10 and ANN recall of every system, and by K1."""
    lines = []
    for gallery in GALLERIES:
        for query, searched in (("text", "image"), ("image", "text")):
            lines += [f"\n{query} to {searched}, gallery: {gallery}\n"]
            lines += [HEADING, "|" + "---|" * 5]
            lines += rows(results, gallery, query, searched)
            lines += [f"\nANN recall@10 of level 1's first K1, {query} to {searched}, {gallery}\n"]
            lines += widths(results, gallery, query, searched)
    return "\n".join(lines)


def rows(results: Sequence[Record], gallery: str, query: str, searched: str) -> Iterator[str]:
    """A line a variant and system."""
    for variant, found in directions(results, gallery, query, searched):
        for system in found[0]["systems"]:
            each = [direction["systems"][system] for direction in found]
            recalls = " / ".join(spread([s["recalls"][k]["value"] for s in each]) for k in AT)
            ann = [s["ann10"]["value"] for s in each if s["ann10"]]
            cells = (variant, system, recalls, spread(ann) if ann else "", len(each))
            yield f"| {' | '.join(map(str, cells))} |"


def widths(results: Sequence[Record], gallery: str, query: str, searched: str) -> Iterator[str]:
    """A line a variant: by K1, and the K1 for .99."""
    shown = ("10", "20", "50", "100", "200", "500")
    yield f"| variant | {' | '.join(shown)} | K1 for .99 |"
    yield "|" + "---|" * (len(shown) + 2)
    for variant, found in directions(results, gallery, query, searched):
        first = [direction["by_width"].get("1", {}) for direction in found]
        if not all(first) or variant == "one_level":
            continue
        cells = [spread([each[k] for each in first]) if k in first[0] else "" for k in shown]
        needed = [max(d["width_needed"].items(), key=lambda n: int(n[0]))[1] for d in found]
        yield f"| {variant} | {' | '.join(cells)} | {statistics.mean(needed):.0f} |"


def directions(
    results: Sequence[Record], gallery: str, query: str, searched: str
) -> Iterator[tuple[str, list[Record]]]:
    """Each variant with one direction of all its seeds."""
    for variant in VARIANTS:
        found = [
            direction
            for run in results
            if run["variant"] == variant
            for direction in run[gallery]["directions"]
            if (direction["query"], direction["searched"]) == (query, searched)
        ]
        if found:
            yield variant, found


def spread(values: Sequence[float]) -> str:
    """The mean, and how far the seeds lie from each other."""
    mean = f"{statistics.mean(values):.3f}".removeprefix("0")
    if len(values) < 2:
        return mean
    return f"{mean} ±{statistics.stdev(values):.3f}".replace("±0", "±")


if __name__ == "__main__":
    sys.exit(main())

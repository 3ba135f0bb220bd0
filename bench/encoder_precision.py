"""Experiment 2: which low-precision encoder ranks as fp32 does, whatever batch it is in?

    python bench/encoder_precision.py [text|image] [--only w8-heads-b32-a4] [--passes 60]

Needs the demo under HIVLP_HOME (`hivlp demo --no-serve` makes it). Every variant is made of the
demo's own stage graphs; queries are the demo's captions and dictionary texts, or its pictures, and
search the index's own fp32 rows (texts search pictures, pictures search captions). Nothing that
calibrates a static variant is asked as a query. How the variants are made: `precision_variants.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from measure import WORK, exact_top, interleaved, machine, median, overlap
from precision_variants import UNFOLDED, VARIANTS, Feeds, make_variant

from hivlp.index.snapshot.store import default_home
from hivlp.models.artifact import EMBEDDING_NAME, Artifact, TowerRecord
from hivlp.models.levels import nested_prefix
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training.graphs import GraphRunner
from hivlp.models.training.pairs import read_texts

TOP = 10
CAPTIONS, GLOSSES, PICTURES, CALIBRATING = 200, 100, 200, {"text": 400, "image": 200}
LONGER = 16
"""Tokens that a padded text is made longer by."""
TIMED = ((1, 6), (1, 16), (8, 16))
"""Batch and tokens of the texts timed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Queries of one tower, prepared one by one, and what they search.

    `feeds`: one of batch 1 for each query. `group` (n,): the item it shows or -1; `rows` (N, D)
    float32 and `row_group` (N,); `keeps`: the index's own widths.
    """

    feeds: Feeds
    calibrating: Feeds
    group: np.ndarray
    rows: np.ndarray
    row_group: np.ndarray
    keeps: tuple[int, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("towers", nargs="*", default=["text", "image"])
    parser.add_argument("--only", action="append", default=[], help="a variant besides fp32")
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    artifact = Artifact.open(default_home() / "artifacts" / "demo")
    print(machine())
    for name in options.towers:
        tower = artifact.manifest.tower(name)
        assert tower is not None
        chosen = [v for v in VARIANTS[name] if not options.only or v in ("fp32", *options.only)]
        if not (artifact.path.parent / UNFOLDED).is_dir():
            chosen = [v for v in chosen if v != "unfolded"]
        report(artifact, tower, chosen, options.passes)
    return 0


def report(artifact: Artifact, tower: TowerRecord, names: Sequence[str], passes: int) -> None:
    """Print one tower's two tables: ranking, and time."""
    asked = _texts(artifact) if tower.modality == "text" else _pictures(artifact)
    runners: dict[str, Stages] = {}
    for name in names:
        folder = WORK / "precision" / artifact.manifest.query_encoder[:12] / name
        runners[name] = Stages(
            tower, make_variant(artifact, tower, name, folder, asked.calibrating)
        )
    exact = runners["fp32"].alone(asked.feeds)
    print(f"\n## {tower.modality}: {len(asked.feeds)} queries, {len(asked.rows)} rows\n")
    print(
        "| | same top 10: batch 8 | longer | largest score difference | against fp32: finest |"
        " level 1 | cascade ANN@10 | R@1 / R@10 | MB |\n" + "|---" * 9 + "|"
    )
    for name, stages in runners.items():
        print(_ranks(name, stages, asked, exact), flush=True)
    _times(runners, asked, passes)


class Stages:
    """A tower's graphs, run one after the other."""

    def __init__(self, tower: TowerRecord, files: Sequence[Path]) -> None:
        self.dims = tuple(spec.dim for spec in tower.levels)
        self.files = files
        self.runners = [GraphRunner(file, threads=1) for file in files]

    def __call__(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Every level's (n, dim) float32."""
        tensors, found = dict(feed), []
        for runner in self.runners:
            tensors |= runner(tensors)
            found.append(tensors[EMBEDDING_NAME])
        return found

    def alone(self, feeds: Feeds) -> list[np.ndarray]:
        """Every query in a batch of its own."""
        return [np.concatenate(level) for level in zip(*map(self, feeds), strict=True)]

    def together(self, feeds: Feeds, size: int, longer: int = 0) -> list[np.ndarray]:
        """Queries in batches of `size`, in the order given, padded to the longest and `longer`."""
        parts = [join(feeds[i : i + size], longer) for i in range(0, len(feeds), size)]
        return [np.concatenate(level) for level in zip(*map(self, parts), strict=True)]

    @property
    def megabytes(self) -> float:
        return sum(file.stat().st_size for file in self.files) / 1e6


def join(feeds: Feeds, longer: int = 0) -> dict[str, np.ndarray]:
    """Several batches of one as one, texts padded."""
    if "pixel_values" in feeds[0]:
        return {"pixel_values": np.concatenate([feed["pixel_values"] for feed in feeds])}
    width = max(feed["input_ids"].shape[1] for feed in feeds) + longer
    return {
        name: np.concatenate(
            [np.pad(feed[name], ((0, 0), (0, width - feed[name].shape[1]))) for feed in feeds]
        )
        for name in feeds[0]
    }


def _ranks(name: str, stages: Stages, asked: Asked, exact: list[np.ndarray]) -> str:
    alone = stages.alone(asked.feeds)
    eight = stages.together(asked.feeds, 8)
    longer = stages.together(asked.feeds, 8, LONGER) if "input_ids" in asked.feeds[0] else eight
    last, rows = len(stages.dims) - 1, asked.rows
    first = nested_prefix(rows, stages.dims[0])
    truth = exact_top(rows, exact[last], TOP)
    found = exact_top(rows, alone[last], TOP)
    early = exact_top(first, alone[0], TOP)
    same = [np.mean((exact_top(rows, v[last], TOP) == found).all(1)) for v in (eight, longer)]
    alike = [np.abs((v[0] - alone[0]) @ first.T).max() for v in (eight, longer)]
    same1 = [np.mean((exact_top(first, v[0], TOP) == early).all(1)) for v in (eight, longer)]
    apart = max(np.abs((v[last] - alone[last]) @ rows.T).max() for v in (eight, longer))
    against = overlap(found, truth), overlap(early, exact_top(first, exact[0], TOP))
    ann = overlap(_cascade(alone, asked, stages.dims), truth)
    paired = asked.group >= 0
    right = asked.row_group[found[paired]] == asked.group[paired, None]
    cells = [
        name,
        *(f"{fine:.3f} (level 1 {one:.3f})" for fine, one in zip(same, same1, strict=True)),
        f"{apart:.1e} (level 1 {max(alike):.1e})",
        f"{against[0]:.4f}",
        f"{against[1]:.4f}",
        f"{ann:.4f}",
        f"{right[:, 0].mean():.3f} / {right.any(1).mean():.3f}",
        f"{stages.megabytes:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _cascade(levels: list[np.ndarray], asked: Asked, dims: Sequence[int]) -> list[np.ndarray]:
    """Each query's last ten, by the index's own widths."""
    kept = exact_top(nested_prefix(asked.rows, dims[0]), levels[0], asked.keeps[0])
    for level, keep in enumerate((*asked.keeps[1:], TOP), 1):
        rows = nested_prefix(asked.rows, dims[level])
        scores = np.einsum("qkd,qd->qk", rows[kept], levels[level])
        kept = np.take_along_axis(kept, np.argsort(-scores, axis=1)[:, :keep], axis=1)
    return list(kept)


def _times(runners: dict[str, Stages], asked: Asked, passes: int) -> None:
    """Medians of stages and of whole towers, all variants interleaved."""
    for size, tokens in TIMED if "input_ids" in asked.feeds[0] else ((1, 0), (8, 0)):
        feed = join(asked.feeds[:size])
        if tokens:  # of one length, so that figures can be compared
            feed = {name: np.resize(rows, (size, tokens)) for name, rows in feed.items()}
            feed["attention_mask"][:] = 1
        calls: dict[str, Callable[[int], object]] = {}
        states = dict(feed)
        for runner in runners["fp32"].runners:
            states |= runner(states)
        for name, stages in runners.items():
            calls[name] = partial(_call, stages, feed)
            for i, runner in enumerate(stages.runners, 1):
                calls[f"{name}/{i}"] = partial(_call, runner, dict(states))
        took = {name: median(t) for name, t in cpu_times(calls, passes).items()}
        count = len(runners["fp32"].runners)
        shape = next(iter(feed.values())).shape
        print(f"\nCPU ms at batch {size}, {shape}: stages, all, times fp32\n")
        for name in runners:
            each = " / ".join(f"{took[f'{name}/{i + 1}']:.2f}" for i in range(count))
            print(f"| {name} | {each} | {took[name]:.2f} | {took['fp32'] / took[name]:.2f} |")


def _call(runner: Stages | GraphRunner, feed: dict[str, np.ndarray], _: int) -> object:
    return runner(feed)


def cpu_times(calls: dict[str, Callable[[int], object]], passes: int) -> dict[str, list[float]]:
    """Milliseconds of the calling thread, which is where one-threaded sessions compute.

    Waiting for a core that other work has taken doesn't count; `interleaved` does the rest.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}

    def timed(name: str, number: int) -> None:
        started = time.thread_time()
        calls[name](number)
        took[name].append((time.thread_time() - started) * 1e3)

    interleaved({name: partial(timed, name) for name in calls}, passes, warm=3)
    return {name: times[3:] for name, times in took.items()}


def _texts(artifact: Artifact) -> Asked:
    tower = artifact.manifest.tower("text")
    assert tower is not None
    assert tower.text is not None
    tokenizer = Tokenizer(artifact.path, tower.text)
    rng = np.random.default_rng(0)
    captions = _arrow("text/texts.arrow")["text"].to_pylist()
    owner = np.load(_snapshot() / "text" / "row_items.npy")
    order = rng.permutation(len(captions))
    glosses = read_texts([default_home() / "demo" / "texts.txt.gz"], most=1000, seed=1)
    chosen = order[:CAPTIONS]
    count = CALIBRATING["text"] // 2
    said = [captions[i] for i in chosen] + glosses[:GLOSSES]
    other = [captions[i] for i in order[-count:]] + glosses[-count:]
    concept = _concepts()
    return Asked(
        [dict(tokenizer.encode([text]).inputs) for text in said],
        [dict(tokenizer.encode([text]).inputs) for text in other],
        np.concatenate([concept[owner[chosen]], np.full(GLOSSES, -1)]),
        np.load(_snapshot() / "image" / "rows.npy").astype(np.float32),
        concept[np.load(_snapshot() / "image" / "row_items.npy")],
        _keeps("text", "image"),
    )


def _pictures(artifact: Artifact) -> Asked:
    tower = artifact.manifest.tower("image")
    assert tower is not None
    assert tower.image is not None
    spec, corpus = tower.image, default_home() / "demo" / "corpus"
    names = _arrow("items.arrow")["image"].to_pylist()
    order = np.random.default_rng(0).permutation(len(names))

    def prepared(items: np.ndarray) -> Feeds:
        read = [decode_image((corpus / names[i]).read_bytes(), ImageLimits()) for i in items]
        return [{"pixel_values": preprocess([picture], spec)} for picture in read]

    chosen, concept = order[:PICTURES], _concepts()
    return Asked(
        prepared(chosen),
        prepared(order[-CALIBRATING["image"] :]),
        concept[chosen],
        np.load(_snapshot() / "text" / "rows.npy").astype(np.float32),
        concept[np.load(_snapshot() / "text" / "row_items.npy")],
        _keeps("image", "text"),
    )


def _snapshot() -> Path:
    folder = default_home() / "indexes" / "default"
    return folder / json.loads((folder / "CURRENT").read_text(encoding="utf-8"))["history"][-1]


def _arrow(name: str) -> pa.Table:
    with pa.memory_map(str(_snapshot() / name)) as source:
        return pa.ipc.open_file(source).read_all()


def _concepts() -> np.ndarray:
    """(items,) which thing each item shows."""
    return np.unique(_arrow("items.arrow")["concept"].to_pylist(), return_inverse=True)[1]


def _keeps(query: str, searched: str) -> tuple[int, ...]:
    manifest = json.loads((_snapshot() / "manifest.json").read_text(encoding="utf-8"))
    wanted = {"query": query, "searched": searched, "plan": "cascade", "k": TOP, "family": "scan"}
    return next(tuple(w["keeps"]) for w in manifest["widths"] if wanted.items() <= w.items())


if __name__ == "__main__":
    sys.exit(main())

"""What each group of `peers.py` runs: contenders by label, over one setting's queries.

A label says it all: `cold ef 256`, `entered at 40 ef 16`, `early: ...` for what hides behind the
encoder. `Group.plan` takes the queries and gives contenders; early answers are found once for all
queries, outside the clock, and timed by contenders of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from entered import (
    Answers,
    Contender,
    Links,
    Walker,
    diverse,
    flat_over,
    hnsw_links,
    inverse_norms,
    placed,
    rescored,
    vamana_links,
)
from measure import WORK
from peer_indexes import PEERS
from peer_kit import K, file_of
from synthetic import DIM, DIMS, Queries

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

EARLY = ((64, 20), (128, 40), (160, 80), (256, 160))
SPREAD = ((8, 80), (8, 160), (16, 160))
BEAMS = (10, 16, 32, 64)
WIDE = (16, 32, 48, 64, 96, 128)
COLD = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BATCH = 32
BEST = ("early: middle from 40 ef 64", "early: middle from 8 diverse of 160 type 2 ef 64")
KINDS = {1: "", 2: " type 2"}
CODES = ("fp16", "sq8")


@dataclass
class Run:
    """The contenders of one setting, and which early ones each waits for."""

    queries: Queries
    contenders: dict[str, Contender] = field(default_factory=dict)
    waits: dict[str, list[str]] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.queries.targets)

    def level(self, level: int) -> np.ndarray:
        """(n, dim) float32 of one exit, 1 to 3."""
        return np.ascontiguousarray(self.queries.levels[level - 1])

    def add(self, label: str, one: Callable[[int], np.ndarray], *waits: str) -> None:
        """A contender; `one` takes the number of a query."""
        self.contenders[label] = one
        early = [w for name in waits for w in (*self.waits.get(name, []), name)]
        self.waits[label] = list(dict.fromkeys(early))

    def answers(self, label: str) -> Answers:
        """What a contender finds for every query, missing rows left out."""
        found = [self.contenders[label](i) for i in range(self.count)]
        return [f[f >= 0] for f in found]


@dataclass
class World:
    """Rows and graphs in memory: what every group measures against."""

    rows: np.ndarray
    finest: Walker
    early: Walker
    flat: Any
    pages: str
    prefixes: dict[int, Walker] = field(default_factory=dict)

    @staticmethod
    def of(source: np.ndarray, pages: str) -> World:
        rows = placed(source, pages)
        links = hnsw_links(len(rows), DIM, pages)
        small = hnsw_links(len(rows), DIMS[0], pages)
        prefix = rows[:, : DIMS[0]] / np.linalg.norm(rows[:, : DIMS[0]], axis=1, keepdims=True)
        prefix = placed(prefix, pages)
        flat = flat_over(rows)
        finest = Walker.over(flat, links, rows)
        return World(
            rows, finest, Walker.over(flat_over(prefix, DIMS[0]), small, prefix), flat, pages
        )

    def by_prefix(self, dim: int) -> Walker:
        """The finest graph walked by the first `dim` numbers of its rows, in place."""
        if dim not in self.prefixes:
            flat, inverse = flat_over(self.rows, dim), inverse_norms(self.rows, dim)
            self.prefixes[dim] = Walker.over(flat, self.links(), self.rows, inverse)
        return self.prefixes[dim]

    def links(self) -> Links:
        return self.finest.index.referenced_objects[1]


def flat_alone(run: Run, world: World) -> None:
    """faiss's exact scan, one query."""
    finest = run.level(3)
    run.add("flat", lambda i: world.flat.search(finest[i : i + 1], K)[1][0])


def anchors(run: Run, world: World) -> None:
    """Flat-768 alone and in a batch, the cold graph, and the entered graph at its best knobs."""
    flat_alone(run, world)
    finest = run.level(3)
    run.add(f"flat batch {BATCH}", partial(flat_batch, world.flat, finest))
    run.batches.append(f"flat batch {BATCH}")
    cold(run, world.finest, COLD)
    early(run, world.early, EARLY)
    spread(run, world)
    for keep in (40, 80):
        entered(run, world.finest, f"early: graph keeps {keep}", str(keep), BEAMS)
        entered(run, world.finest, f"early: graph keeps {keep}", str(keep), WIDE, kind=2)
    middle(run, world, "early: graph keeps 40", "40", (48, 64))
    for of in (80, 160):
        waits, name = f"early: 8 diverse of {of}", f"8 diverse of {of}"
        entered(run, world.finest, waits, name, WIDE, kind=2)
        middle(run, world, waits, name, (64,))
        middle(run, world, waits, name, (64, 96), kind=2)
    middle(run, world, "early: graph keeps 80", "80", (128,))
    for waits in BEST:
        between(run, world, waits, (10, 20), (16, 32))
        for keep in (20, 40, 64):
            gathered(run, world, waits, keep)


def flat_batch(flat: Any, finest: np.ndarray, number: int) -> np.ndarray:
    """A batch's answers; its time is divided by its size later."""
    at = number % (len(finest) - BATCH)
    return flat.search(finest[at : at + BATCH], K)[1][0]


def cold(run: Run, walker: Walker, beams: tuple[int, ...], name: str = "") -> None:
    """The graph from its own entry point with the finest query."""
    finest = run.level(3)
    for ef in beams:
        run.add(f"cold{name} ef {ef}", lambda i, ef=ef: walker.cold(finest[i], K, ef))


def early(run: Run, walker: Walker, knobs: Any, name: str = "graph") -> None:
    """Level 1's search with the first exit's query."""
    first = run.level(1)
    for ef, keep in knobs:
        label = f"early: {name} keeps {keep}"
        run.add(label, lambda i, ef=ef, keep=keep: walker.cold(first[i], keep, ef))


def entered(
    run: Run, walker: Walker, waits: str, name: str, beams: tuple[int, ...], kind: int = 1
) -> None:
    """The finest search entered at what an early contender found."""
    finest, found = run.level(3), run.answers(waits)
    for ef in beams:
        label = f"entered at {name}{KINDS[kind]} ef {ef}"
        if label not in run.contenders:
            run.add(label, lambda i, ef=ef: walker.entered(finest[i], K, ef, found[i], kind), waits)


def middle(
    run: Run, world: World, waits: str, name: str, beams: tuple[int, ...], kind: int = 1
) -> None:
    """Level 2 walks the finest graph by prefixes of its rows; the last exit only scores again."""
    second, finest, found = run.level(2), run.level(3), run.answers(waits)
    walker = world.by_prefix(DIMS[1])
    for ef in beams:
        label = f"early: middle from {name}{KINDS[kind]} ef {ef}"
        if label in run.contenders:
            continue
        run.add(label, lambda i, ef=ef: walker.entered(second[i], ef, ef, found[i], kind), waits)
        mids = run.answers(label)
        for keep in sorted({20, 40, 64, ef}):
            if keep <= ef:
                after = f"middle from {name}{KINDS[kind]} ef {ef} re-scores {keep}"
                run.add(after, partial(again, world.rows, finest, mids, keep), label)


def again(
    rows: np.ndarray, finest: np.ndarray, found: Answers, keep: int, number: int
) -> np.ndarray:
    """The ten best of the first `keep` found."""
    return rescored(rows, finest[number], found[number][:keep], K)


def gathered(run: Run, world: World, waits: str, keep: int) -> None:
    """The re-score when level 2's rows were copied side by side before the last exit answered."""
    finest, found = run.level(3), [f[:keep] for f in run.answers(waits)]
    side_by_side = [world.rows.take(rows, axis=0) for rows in found]

    def score(number: int) -> np.ndarray:
        scores = side_by_side[number] @ finest[number]
        return found[number][np.argpartition(scores, -K)[-K:]]

    def copy(number: int) -> np.ndarray:
        world.rows.take(found[number], axis=0)
        return found[number]

    label = f"early: gathers {keep} of {waits[7:]}"
    run.add(label, copy, waits)
    run.add(f"{waits[7:]} gathered, re-scores {keep}", score, label)


def spread(run: Run, world: World) -> None:
    """Entry rows that lie apart: some of level 1's best 80 or 160."""
    first = run.level(1)
    for most, of in SPREAD:
        waits = f"early: graph keeps {of}"
        pick = partial(picked, world.early.rows, first, run.answers(waits), most)
        run.add(f"early: {most} diverse of {of}", pick, waits)


def picked(
    rows: np.ndarray, first: np.ndarray, found: Answers, most: int, number: int
) -> np.ndarray:
    """The diverse ones of a query's early rows."""
    return diverse(rows, first[number], found[number], most)


def entered_group(run: Run, world: World) -> None:
    """Every way to enter: rows kept, beams, types, diversity, one graph, a level between."""
    anchors(run, world)
    for _, keep in EARLY:
        waits = f"early: graph keeps {keep}"
        if keep < 160:
            entered(run, world.finest, waits, str(keep), BEAMS)
            middle(run, world, waits, str(keep), (32, 64, 128))
        if keep > 20:
            entered(run, world.finest, waits, str(keep), WIDE, kind=2)
            middle(run, world, waits, str(keep), (64, 128), kind=2)
    for most, of in SPREAD:
        waits, name = f"early: {most} diverse of {of}", f"{most} diverse of {of}"
        entered(run, world.finest, waits, name, BEAMS)
        entered(run, world.finest, waits, name, WIDE, kind=2)
        middle(run, world, waits, name, (32, 64))
        middle(run, world, waits, name, (32, 64, 128), kind=2)
    for waits in BEST:
        between(run, world, waits, (10, 20, 40), (16, 32, 64))
    one_graph(run, world)


def between(
    run: Run, world: World, waits: str, keeps: tuple[int, ...], beams: tuple[int, ...]
) -> None:
    """The finest walk entered at level 2's walk instead of level 1's."""
    finest, found = run.level(3), run.answers(waits)

    def walk(keep: int, beam: int, number: int) -> np.ndarray:
        return world.finest.entered(finest[number], K, beam, found[number][:keep], 2)

    for keep in keeps:
        for beam in beams:
            label = f"entered at {keep} of {waits[7:]}, type 2 ef {beam}"
            run.add(label, partial(walk, keep, beam), waits)


def one_graph(run: Run, world: World) -> None:
    """No graph of level 1's own: its query walks the finest graph by prefixes of its rows."""
    early(run, world.by_prefix(DIMS[0]), ((128, 40), (256, 80), (512, 160)), "prefixes")
    entered(run, world.finest, "early: prefixes keeps 40", "40 by prefixes", BEAMS)
    for keep in (40, 80, 160):
        waits = f"early: prefixes keeps {keep}"
        entered(run, world.finest, waits, f"{keep} by prefixes", WIDE[2:], kind=2)
        middle(run, world, waits, f"{keep} by prefixes", (64, 128), kind=2)


def codes_group(run: Run, world: World, walkers: Mapping[str, Walker]) -> None:
    """The finest graph over other codes or by other links; codes are followed by a re-score."""
    anchors(run, world)
    for name, walker in walkers.items():
        if name not in CODES:
            cold(run, walker, COLD[:-2], f" {name}")
            if name == "panorama":
                continue  # faiss enters level 0 without its pruning
            for keep in (40, 80):
                waits = f"early: graph keeps {keep}"
                entered(run, walker, waits, f"{keep} {name}", BEAMS)
                entered(run, walker, waits, f"{keep} {name}", WIDE, kind=2)
            continue
        for wide in (20, 40):
            over_codes(run, world, walker, name, wide)


def over_codes(run: Run, world: World, walker: Walker, name: str, wide: int) -> None:
    """Cold and entered walks over codes, whose best rows fp32 scores again."""
    finest, found = run.level(3), run.answers("early: graph keeps 40")

    def cold_again(ef: int, number: int) -> np.ndarray:
        candidates = walker.cold(finest[number], wide, ef)
        return rescored(world.rows, finest[number], candidates, K)

    def entered_again(ef: int, number: int) -> np.ndarray:
        candidates = walker.entered(finest[number], wide, ef, found[number], 2)
        return rescored(world.rows, finest[number], candidates, K)

    for ef in (64, 128, 256, 384, 512):
        run.add(f"cold {name} ef {ef} re-scores {wide}", partial(cold_again, ef))
    for ef in WIDE[1:]:
        label = f"entered at 40 {name} type 2 ef {ef} re-scores {wide}"
        run.add(label, partial(entered_again, ef), "early: graph keeps 40")


def coded(world: World, kind: int) -> Walker:
    """The finest graph over codes of another kind."""
    storage = faiss.IndexScalarQuantizer(DIM, kind, faiss.METRIC_INNER_PRODUCT)
    storage.train(np.ascontiguousarray(world.rows[:: max(1, len(world.rows) // 50_000)]))
    for start in range(0, len(world.rows), 50_000):
        storage.add(world.rows[start : start + 50_000])
    return Walker.over(storage, world.links(), world.rows)


def panorama(world: World) -> Walker:
    """The finest graph over rows that panorama prunes; it is for L2, whose order is the same here.

    faiss fills its sums only as it adds, so a hasty graph is built and the good links put in.
    """
    index = faiss.IndexHNSWFlatPanorama(DIM, 32, 8)
    index.hnsw.efConstruction = 1
    for start in range(0, len(world.rows), 50_000):
        index.add(world.rows[start : start + 50_000])
    method = index.hnsw.search_method
    index.hnsw = world.links().hnsw
    index.hnsw.search_method, index.hnsw.is_similarity = method, False
    return Walker(index, world.rows)


def walkers_of(world: World) -> dict[str, Walker]:
    """Other codes and other links for the finest graph."""
    quantizer = faiss.ScalarQuantizer
    found = {
        "fp16": coded(world, quantizer.QT_fp16),
        "sq8": coded(world, quantizer.QT_8bit_uniform),
        "panorama": panorama(world),
    }
    folder = WORK / f"vamana-{len(world.rows)}"
    if (folder / "graph").exists():
        links = vamana_links(folder, len(world.rows), world.pages)
        found["vamana links"] = Walker.over(world.flat, links, world.rows)
    return found


def opened(names: tuple[str, ...], world: World) -> dict[str, Any]:
    """The peers of a group that are built, ready to search."""
    found = {}
    for name in names:
        path = file_of(name.replace(" ", "-"), len(world.rows), PEERS[name].suffix)
        if path.exists():
            found[name] = PEERS[name].open(path, world.flat)
        else:
            print(f"{name}: not built", flush=True)
    return found


def peers_group(run: Run, world: World, searches: Mapping[str, Any]) -> None:
    """Peers, each over its ladder, beside the anchors and the cold graph."""
    anchors(run, world)
    finest = run.level(3)

    def ask(search: Any, knob: Any, number: int) -> np.ndarray:
        return search(finest[number : number + 1], knob)

    for name, search in searches.items():
        for knob in PEERS[name].ladder:
            run.add(f"{name} {knob}", partial(ask, search, knob))

"""The `pages` group of `peers.py`: does it matter where rows and links lie in memory?

The same graph and rows four times: rows in their file, mapped; in 4 KiB pages; in 2 MiB pages; in
2 MiB pages with near rows beside each other (by the cells of a k-means of 4,096 on the prefixes, or
in the order a breadth-first walk of the links meets them).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from entered import Links, Walker, copied, flat_over, hnsw_links, placed
from peer_groups import KINDS, Run
from peer_kit import K
from synthetic import DIM, DIMS

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

CELLS, DEGREE = 4096, 64


def by_cells(rows: np.ndarray) -> np.ndarray:
    """Row numbers sorted by cell, cells along a greedy chain of near centres."""
    prefix = np.ascontiguousarray(rows[:, : DIMS[0]])
    cells = min(CELLS, len(rows) // 40)
    means = faiss.Kmeans(DIMS[0], cells, niter=5, max_points_per_centroid=64, seed=3)
    means.train(prefix)
    cell = means.index.search(prefix, 1)[1][:, 0]
    near = means.centroids @ means.centroids.T
    chain, left = [0], np.ones(cells, bool)
    left[0] = False
    while left.any():
        chain.append(int(np.where(left, near[chain[-1]], -np.inf).argmax()))
        left[chain[-1]] = False
    place = np.empty(cells, np.int64)
    place[chain] = np.arange(cells)
    return np.argsort(place[cell], kind="stable")


def by_walk(links: Links, count: int) -> np.ndarray:
    """Row numbers in the order in which a breadth-first walk of layer 0 meets them."""
    offsets = faiss.vector_to_array(links.hnsw.offsets).astype(np.int64)[:count]
    seen = np.zeros(count, bool)
    frontier = np.array([links.hnsw.entry_point])
    order = []
    while len(frontier):
        seen[frontier] = True
        order.append(frontier)
        met = links.neighbours[offsets[frontier][:, None] + np.arange(DEGREE)].ravel()
        met = met[met >= 0]
        met = met[~seen[met]]
        frontier = met[np.sort(np.unique(met, return_index=True)[1])].astype(np.int64)
    order.append(np.flatnonzero(~seen))
    return np.concatenate(order)


class Ordered:
    """A walker over rows in another order; it takes and gives the numbers of the first order."""

    def __init__(self, rows: np.ndarray, links: Links, order: np.ndarray, pages: str) -> None:
        hnsw = copied(links.hnsw)
        hnsw.permute_entries(faiss.swig_ptr(np.ascontiguousarray(order, np.int64)))
        moved = faiss.rev_swig_ptr(hnsw.neighbors.data(), hnsw.neighbors.size())
        self.order = order
        self.place = np.empty(len(order), np.int64)
        self.place[order] = np.arange(len(order))
        own = placed(rows, pages, order)
        self.walker = Walker.over(flat_over(own), Links.of(hnsw, moved, pages), own)

    def cold(self, query: np.ndarray, k: int, ef: int) -> np.ndarray:
        return self.order[self.walker.cold(query, k, ef)]

    def entered(
        self, query: np.ndarray, k: int, ef: int, entry: np.ndarray, kind: int = 1
    ) -> np.ndarray:
        return self.order[self.walker.entered(query, k, ef, self.place[entry], kind)]


def walkers(world: Any, mapped: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """The named places; each but the file and the world's own copies the rows."""
    links = world.links()
    small = hnsw_links(len(world.rows), DIM, "small")
    found: dict[str, Any] = {}
    for name in names:
        if name == "mapped":
            found["mapped file"] = Walker.over(flat_over(mapped), small, mapped)
        elif name == "small":
            own = placed(world.rows, "small")
            found["4 KiB pages"] = Walker.over(flat_over(own), small, own)
        elif name == "cells":
            found["2 MiB by cells"] = Ordered(world.rows, links, by_cells(world.rows), "huge")
        elif name == "walk":
            order = by_walk(links, len(world.rows))
            found["2 MiB by walk"] = Ordered(world.rows, links, order, "huge")
    return {**found, "2 MiB pages": world.finest}


def pages_group(run: Run, places: dict[str, Any]) -> None:
    """Each place: two cold beams, and entered ones at level 1's 40."""
    finest, found = run.level(3), run.answers("early: graph keeps 40")

    def cold(walker: Any, ef: int, number: int) -> np.ndarray:
        return walker.cold(finest[number], K, ef)

    def entered(walker: Any, ef: int, kind: int, number: int) -> np.ndarray:
        return walker.entered(finest[number], K, ef, found[number], kind)

    for name, walker in places.items():
        for ef in (128, 256, 384):
            run.add(f"cold {name} ef {ef}", partial(cold, walker, ef))
        for ef, kind in ((16, 1), (32, 1), (16, 2), (64, 2)):
            label = f"entered at 40 {name}{KINDS[kind]} ef {ef}"
            run.add(label, partial(entered, walker, ef, kind), "early: graph keeps 40")

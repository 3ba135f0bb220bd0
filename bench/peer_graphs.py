"""Graph peers: hnswlib, hnswlib over faiss's links, usearch, and SVS's Vamana over fp16 and int8.

None of their searches takes entry rows: hnswlib's and usearch's start at the top layer's node,
SVS's at the one node that its configuration names.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entered import rescored
from peer_kit import BLOCK, K, Search, blocks, file_of, said
from synthetic import DIM

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

DEGREE, CONSTRUCTION = 32, 200
VAMANA_PARTS = ("config", "graph", "data")


def build_hnswlib(rows: np.ndarray, path: Path, threads: int) -> None:
    import hnswlib

    index = hnswlib.Index("ip", rows.shape[1])
    index.init_index(len(rows), M=DEGREE, ef_construction=CONSTRUCTION)
    started, done = time.monotonic(), 0
    for part in blocks(rows):
        index.add_items(part, np.arange(done, done + len(part)), num_threads=threads)
        done += len(part)
        said("hnswlib", done, started)
    index.save_index(str(path))


def open_hnswlib(path: Path, _anchor: Any) -> Search:
    import hnswlib

    index = hnswlib.Index("ip", DIM)
    index.load_index(str(path))
    index.set_num_threads(1)

    def search(query: np.ndarray, ef: int) -> np.ndarray:
        index.set_ef(ef)
        return index.knn_query(query, K)[0][0].astype(np.int64)

    return search


def build_hnswlib_links(rows: np.ndarray, path: Path, _threads: int) -> None:
    """hnswlib's file with the links of faiss's graph of the same M and efConstruction.

    The same rules built it, so this asks what hnswlib's walk is worth without building it again.
    """
    from entered import hnsw_links

    links = hnsw_links(len(rows), DIM, "small")
    levels = faiss.vector_to_array(links.hnsw.levels)
    offsets = faiss.vector_to_array(links.hnsw.offsets).astype(np.int64)
    wide, count = 2 * DEGREE, len(rows)
    node = np.dtype([("n", "<u4"), ("links", "<u4", wide), ("row", "<f4", DIM), ("label", "<u8")])
    head = [0, count, count, node.itemsize, node.itemsize - 8, 4 + 4 * wide]
    top = np.array([levels.max() - 1, links.hnsw.entry_point], "<i4")
    degrees = np.array([DEGREE, wide, DEGREE], "<u8")
    with path.open("wb") as out:
        out.write(np.array(head, "<u8").tobytes() + top.tobytes() + degrees.tobytes())
        out.write(np.array([1 / np.log(DEGREE)], "<f8").tobytes())
        out.write(np.array([CONSTRUCTION], "<u8").tobytes())
        for start in range(0, count, BLOCK):
            stop = min(count, start + BLOCK)
            part = np.zeros(stop - start, node)
            own = links.neighbours[offsets[start:stop, None] + np.arange(wide)]
            part["n"], part["links"] = (own >= 0).sum(1), np.maximum(own, 0)
            part["row"], part["label"] = rows[start:stop], np.arange(start, stop)
            out.write(part.tobytes())
        for at in range(count):
            out.write(upper_links(links.neighbours, int(offsets[at]), int(levels[at]) - 1))


def upper_links(neighbours: np.ndarray, offset: int, layers: int) -> bytes:
    """One node's layers above the lowest, as hnswlib writes them: their size, then each."""
    told = [np.array([4 * (1 + DEGREE) * layers], "<u4").tobytes()]
    for layer in range(layers):
        start = offset + (2 + layer) * DEGREE
        own = neighbours[start : start + DEGREE]
        own = own[own >= 0]
        told.append(np.pad(np.r_[len(own), own], (0, DEGREE - len(own))).astype("<u4").tobytes())
    return b"".join(told)


def usearch_index(kind: str) -> Any:
    from usearch.index import Index

    return Index(ndim=DIM, metric="ip", dtype=kind, connectivity=DEGREE, expansion_add=CONSTRUCTION)


def build_usearch(rows: np.ndarray, path: Path, threads: int) -> None:
    index = usearch_index("f16")
    started, done = time.monotonic(), 0
    for part in blocks(rows):
        index.add(np.arange(done, done + len(part)), np.asarray(part), threads=threads)
        done += len(part)
        said("usearch", done, started)
    index.save(str(path))


def open_usearch(path: Path, _anchor: Any) -> Search:
    index = usearch_index("f16")
    index.load(str(path))

    def search(query: np.ndarray, expansion: int) -> np.ndarray:
        index.expansion_search = expansion
        return index.search(query[0], K, threads=1).keys.astype(np.int64)

    return search


def build_vamana(rows: np.ndarray, path: Path, threads: int) -> None:
    import svs

    parameters = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128)
    halved = np.asarray(rows).astype(np.float16)
    index = svs.Vamana.build(parameters, halved, svs.DistanceType.MIP, threads)
    path.mkdir(parents=True, exist_ok=True)
    index.save(*(str(path / part) for part in VAMANA_PARTS))


def load_vamana(path: Path) -> Any:
    """The saved graph over fp16 rows; one thread."""
    import svs

    config, graph, data = (str(path / part) for part in VAMANA_PARTS)
    loader = svs.VectorDataLoader(data, svs.DataType.float16, DIM)
    return svs.Vamana(config, svs.GraphLoader(graph), loader, svs.DistanceType.MIP, num_threads=1)


@dataclass(frozen=True)
class Window:
    """SVS's knobs: search window, buffer capacity (None: the window), prefetching."""

    size: int
    capacity: int | None = None
    lookahead: int = 4
    step: int = 1
    visited: bool = True

    def parameters(self) -> Any:
        import svs

        buffer = svs.SearchBufferConfig(self.size, self.capacity or self.size)
        return svs.VamanaSearchParameters(buffer, self.visited, self.lookahead, self.step)

    def __str__(self) -> str:
        text = f"window {self.size}"
        if self.capacity:
            text += f" of {self.capacity}"
        if (self.lookahead, self.step) != (4, 1):
            text += f" prefetch {self.lookahead}/{self.step}"
        return text if self.visited else text + " no visited set"


def open_vamana(path: Path, _anchor: Any) -> Search:
    index = load_vamana(path)
    kept: dict[Window, Any] = {}

    def search(query: np.ndarray, window: Window) -> np.ndarray:
        if window not in kept:
            kept[window] = window.parameters()
        index.search_parameters = kept[window]
        return index.search(query, K)[0][0].astype(np.int64)

    return search


@dataclass(frozen=True)
class Again:
    """A window over int8 rows, and how many of its rows fp32 scores again."""

    window: Window
    wide: int

    def __str__(self) -> str:
        return f"{self.window} re-scores {self.wide}"


def build_vamana8(rows: np.ndarray, path: Path, _threads: int) -> None:
    """int8 rows for the graph that was built over fp16: only a conversion.

    SVS writes no int8 file itself; its fp16 file's header says the same for int8.
    """
    scale = 127 / max(float(np.abs(part).max()) for part in blocks(rows))
    graph = file_of("vamana", len(rows), "")
    path.mkdir(parents=True, exist_ok=True)
    with (graph / "data" / "data_0.svs").open("rb") as halved:
        header = halved.read(1024)
    with (path / "data_0.svs").open("wb") as out:
        out.write(header)
        for part in blocks(rows):
            out.write(np.rint(part * scale).astype(np.int8).tobytes())
    for part_name in VAMANA_PARTS[:2]:
        (path / part_name).symlink_to(graph / part_name)


def open_vamana8(path: Path, anchor: Any) -> Search:
    import svs

    config, graph = (str(path / part) for part in VAMANA_PARTS[:2])
    loader = svs.VectorDataLoader(str(path / "data_0.svs"), svs.DataType.int8, DIM)
    index = svs.Vamana(
        config, svs.GraphLoader(graph), loader, svs.DistanceType.MIP, svs.DataType.int8
    )
    kept: dict[Again, Any] = {}
    rows = anchor.referenced_objects[0]

    def search(query: np.ndarray, knob: Again) -> np.ndarray:
        if knob not in kept:
            kept[knob] = knob.window.parameters()
        index.search_parameters = kept[knob]
        coarse = np.rint(query * (127 / np.abs(query).max())).astype(np.int8)
        found = index.search(coarse, knob.wide)[0][0].astype(np.int64)
        return rescored(rows, query[0], found, K)

    return search


AHEAD = (32, 8)  # prefetching that was quickest at a window of 32
AGAIN = [Again(Window(w, None, *AHEAD), 16) for w in (32, 64, 96, 128, 192, 256)]
AGAIN += [Again(Window(w, None, *AHEAD), 30) for w in (128, 192)]
WINDOWS = [
    *(Window(w) for w in (32, 64, 96, 128, 192, 256)),
    *(Window(w, None, *AHEAD) for w in (32, 64, 96, 128, 192, 256)),
    *(Window(w, 2 * w) for w in (32, 128)),
    *(Window(w, 2 * w, *AHEAD) for w in (32, 128)),
    *(Window(32, None, a, s) for a, s in ((0, 1), (8, 2), (16, 4), (64, 16))),
    Window(32, None, 4, 1, False),
]

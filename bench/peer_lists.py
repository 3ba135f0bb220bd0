"""Peers that scan: panorama's pruned exact scan, ScaNN, faiss's inverted lists with a re-score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer_kit import K, Search, blocks, sample
from synthetic import DIM

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

LEAVES = 2000


def build_scann(rows: np.ndarray, path: Path, threads: int) -> None:
    import scann

    leaves = min(LEAVES, 4 * int(len(rows) ** 0.5))
    builder = scann.scann_ops_pybind.builder(np.asarray(rows), K, "dot_product")
    builder = builder.set_n_training_threads(threads)
    builder = builder.tree(
        num_leaves=leaves, num_leaves_to_search=100, training_sample_size=min(len(rows), 250_000)
    )
    builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100)
    searcher = builder.build()
    path.mkdir(parents=True, exist_ok=True)
    searcher.serialize(str(path))


def open_scann(path: Path, _anchor: Any) -> Search:
    import scann

    searcher = scann.scann_ops_pybind.load_searcher(str(path))

    def search(query: np.ndarray, knob: tuple[int, int]) -> np.ndarray:
        leaves, reorder = knob
        return searcher.search(
            query[0],
            final_num_neighbors=K,
            pre_reorder_num_neighbors=reorder,
            leaves_to_search=leaves,
        )[0].astype(np.int64)

    return search


SCANN = [(20, 100), (40, 100), (40, 200), (80, 200), (80, 500), (150, 300), (150, 1000)]
SCANN += [(300, 500), (300, 1000), (500, 1000)]


# faiss's exact scan that prunes


def build_panorama(rows: np.ndarray, path: Path, _threads: int) -> None:
    index = faiss.IndexFlatIPPanorama(DIM, 8)
    for part in blocks(rows):
        index.add(np.ascontiguousarray(part))
    faiss.write_index(index, str(path))


def open_panorama(path: Path, _anchor: Any) -> Search:
    index = faiss.read_index(str(path))

    def search(query: np.ndarray, _knob: str) -> np.ndarray:
        return index.search(query, K)[1][0]

    return search


# faiss inverted lists with a re-score by the anchor's fp32 rows


def lists_of(rows: int) -> int:
    """2048 lists for a million rows, fewer for fewer."""
    return 2048 if rows > 500_000 else 512


def build_rabitq(rows: np.ndarray, path: Path, threads: int, bits: int = 1) -> None:
    """A random rotation, then IVF with RaBitQ codes: fast-scan at one bit a number."""
    faiss.omp_set_num_threads(threads)
    rotation = faiss.RandomRotationMatrix(DIM, DIM)
    rotation.init(7)
    lists = lists_of(len(rows))
    coarse = faiss.IndexFlatIP(DIM)
    base = faiss.IndexIVFRaBitQFastScan(coarse, DIM, lists, faiss.METRIC_INNER_PRODUCT)
    if bits > 1:
        base = faiss.IndexIVFRaBitQ(coarse, DIM, lists, faiss.METRIC_INNER_PRODUCT, True, bits)
    index = faiss.IndexPreTransform(rotation, base)
    index.train(sample(rows, 40 * lists))
    for part in blocks(rows):
        index.add(np.ascontiguousarray(part))
    faiss.write_index(index, str(path))
    faiss.omp_set_num_threads(1)


def build_rabitq4(rows: np.ndarray, path: Path, threads: int) -> None:
    build_rabitq(rows, path, threads, 4)


def build_ivfpq(rows: np.ndarray, path: Path, threads: int) -> None:
    faiss.omp_set_num_threads(threads)
    code = f"IVF{lists_of(len(rows))},PQ192x4fs"
    index = faiss.index_factory(DIM, code, faiss.METRIC_INNER_PRODUCT)
    index.train(sample(rows, 40 * lists_of(len(rows))))
    for part in blocks(rows):
        index.add(np.ascontiguousarray(part))
    faiss.write_index(index, str(path))
    faiss.omp_set_num_threads(1)


def open_lists(path: Path, anchor: Any) -> Search:
    """Inverted lists whose best k_factor * 10 rows are scored again in the anchor's flat rows."""
    base = faiss.read_index(str(path))
    refined = faiss.IndexRefine(base, anchor)
    turned = isinstance(base, faiss.IndexPreTransform)
    inner = faiss.downcast_index(base.index) if turned else base
    rabitq = isinstance(inner, faiss.IndexIVFRaBitQ)

    def search(query: np.ndarray, knob: tuple[int, int]) -> np.ndarray:
        probes, factor = knob
        kind = faiss.IVFRaBitQSearchParameters if rabitq else faiss.SearchParametersIVF
        own = kind(nprobe=probes)
        if rabitq:
            own.qb = 8
        outer = faiss.SearchParametersPreTransform(index_params=own) if turned else own
        params = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=outer)
        return refined.search(query, K, params=params)[1][0]

    return search


LISTS = [(8, 4), (16, 4), (16, 10), (32, 4), (32, 10), (64, 4), (64, 10), (64, 30), (128, 4)]
LISTS += [(128, 10), (128, 30), (256, 4), (256, 10), (256, 30)]

"""Every kind of searchable level, opened over given vectors, and the oracle to compare it with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss as faiss_untyped
import numpy as np
import pytest

from hivlp.index.backends.choose import (
    Chosen,
    codec_for,
    open_graph,
    open_level,
    write_graph,
    write_level,
)
from hivlp.index.backends.faiss_gpu import DeviceLevel, Owner
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import RowArray
from hivlp.index.level_index import Codec, LevelIndex, SearchParams
from hivlp.models.levels import FloatArray

faiss: Any = faiss_untyped
PARAMS = SearchParams(ef=100_000)  # a beam as wide as any level here: a graph is exact
Open = Callable[[FloatArray, int], LevelIndex]
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EXACT = ("numpy", "flat", "graph", "gpu-fake")
LOSSY: tuple[Codec, ...] = ("sq8", "pq64x4fs", "rabitqfs")
CPU = (*EXACT, *LOSSY)
FAKE_LIMIT = 16
OWNER = Owner()


class FakeDevice:
    """A device index without a device: fp16 numbers, few rows a search, one thread for all calls"""

    def __init__(self, dim: int) -> None:
        self._index = faiss.IndexFlatIP(dim)
        self._thread = threading.get_ident()
        self.asked: list[int] = []

    def add(self, vectors: FloatArray) -> None:
        assert threading.get_ident() == self._thread, "a device index has one owner thread"
        self._index.add(vectors.astype(np.float16).astype(np.float32))

    def search(self, queries: FloatArray, k: int) -> tuple[FloatArray, RowArray]:
        assert threading.get_ident() == self._thread, "a device index has one owner thread"
        assert 1 <= k <= FAKE_LIMIT, k
        self.asked.append(k)
        scores, rows = self._index.search(queries, k)
        return scores, rows


def on_fake_device(host: LevelIndex, rows: LevelRows) -> DeviceLevel:
    """A level on the fake device, before its host."""
    return DeviceLevel(host, rows, FakeDevice, FAKE_LIMIT, OWNER)


def opener(kind: str, folder: Path) -> Open:
    """Writes and opens a level of one kind; a codec that few rows can't have is flat."""

    def opened(vectors: FloatArray, dim: int) -> LevelIndex:
        inverse = inverse_norms(vectors, dim) if dim < vectors.shape[1] else None
        rows = LevelRows(vectors, dim, inverse)
        file = folder / "level.faiss"
        codec: Codec = kind if kind in LOSSY else "flat"  # type: ignore[assignment]
        write_level(file, rows, codec_for(codec, len(vectors)))
        named: dict[str, Chosen] = {"numpy": "numpy", "gpu": "faiss-gpu"}
        level = open_level(1, rows, file, named.get(kind, "faiss-cpu"))
        if kind == "gpu-fake":
            return on_fake_device(level, rows)
        if kind != "graph":
            return level
        write_graph(folder / "level.hnsw", rows)
        return open_graph(folder / "level.hnsw", rows, level)

    return opened


def oracle(vectors: FloatArray, query: FloatArray, k: int) -> tuple[RowArray, FloatArray]:
    """Sort every row by score, then by row, in float64."""
    scores = vectors.astype(np.float64) @ query.astype(np.float64)
    order = sorted(range(len(vectors)), key=lambda row: (-round(scores[row], 9), row))[:k]
    return np.array(order, dtype=np.int64), scores[order]


def recall(level: LevelIndex, vectors: FloatArray, queries: FloatArray, **options: object) -> float:
    """Mean share of the exact ten best that a search for ten finds."""
    params = SearchParams(**options)  # type: ignore[arg-type]
    found = level.search(queries, 10, params, None, None)
    truth = [oracle(vectors, query, 10)[0] for query in queries]
    return float(
        np.mean([len(np.intersect1d(f.rows, t)) / 10 for f, t in zip(found, truth, strict=True)])
    )

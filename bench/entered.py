"""The entered graph: one array of rows and one array of links in memory, walked at any width.

Nested rows need no copy for their early levels: an index of 128 or 300 numbers whose codes lie
3,072 bytes apart reads the prefixes of the finest rows where they are, so that one graph serves
every level. Prefixes are not normalised again there, which only changes who is a candidate.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import WORK
from synthetic import DIM

import faiss  # isort: skip  threads are pinned by `measure`
import numpy as np

BLOCK = 50_000
_NOBODY = faiss.IndexFlatIP(1)  # lends its empty owner to views of memory that Python owns


def room(shape: tuple[int, ...], dtype: Any, pages: str) -> np.ndarray:
    """An empty array in fresh memory of huge (2 MiB) or small (4 KiB) pages."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def placed(source: np.ndarray, pages: str, order: np.ndarray | None = None) -> np.ndarray:
    """A copy of an array in memory of the named pages, its rows in another order if asked."""
    out = room(source.shape, source.dtype, pages)
    for start in range(0, len(source), BLOCK):
        stop = min(len(source), start + BLOCK)
        out[start:stop] = source[start:stop] if order is None else source[order[start:stop]]
    return out


def huge_share() -> float:
    """The share of this process's own memory that lies in huge pages."""
    told = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        told[name.rstrip(":")] = int(size)
    return round(told["AnonHugePages"] / max(1, told["Anonymous"]), 2)


def flat_over(rows: np.ndarray, dim: int = DIM) -> faiss.IndexFlatIP:
    """An index of the first `dim` numbers of rows (n, 768) float32, reading them in place."""
    index = faiss.IndexFlatIP(dim)
    index.code_size = rows.strides[0]
    vector = faiss.MaybeOwnedVectorUInt8
    view = vector.create_view(_address(rows), rows.nbytes, _NOBODY.codes.owner)
    index.codes, index.ntotal = view, len(rows)
    index.referenced_objects = [rows]
    return index


def _address(array: np.ndarray) -> Any:
    return faiss.swig_ptr(array.reshape(-1).view(np.uint8))


@dataclass(frozen=True)
class Links:
    """A graph without rows: faiss's HNSW whose neighbours lie in `neighbours`."""

    hnsw: Any
    neighbours: np.ndarray

    @staticmethod
    def of(hnsw: Any, neighbours: np.ndarray, pages: str) -> Links:
        kept = placed(neighbours, pages)
        vector = faiss.MaybeOwnedVectorInt32
        hnsw.neighbors = vector.create_view(faiss.swig_ptr(kept), kept.size, _NOBODY.codes.owner)
        return Links(hnsw, kept)


def copied(hnsw: Any) -> Any:
    """A copy of an HNSW; the index that faiss needs around it is kept with it."""
    around = faiss.IndexHNSW(_NOBODY, 32)
    around.hnsw = hnsw
    found = around.hnsw
    found.around = around
    return found


def hnsw_links(count: int, dim: int, pages: str) -> Links:
    """The links of the graph that `graph_entry.py` builds; kept without its rows beside it."""
    path = WORK / f"links-{dim}-{count}.hnsw"
    if not path.exists():
        whole = faiss.read_index(str(WORK / f"hnsw-{dim}-{count}.faiss"))
        faiss.write_index(whole, str(path), faiss.IO_FLAG_SKIP_STORAGE)
    index = faiss.read_index(str(path))
    neighbours = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    links = Links.of(copied(index.hnsw), neighbours, pages)
    links.hnsw.is_similarity = True
    return links


def vamana_links(folder: Path, count: int, pages: str) -> Links:
    """SVS's saved graph as an HNSW of one layer: what its links are worth, walked by faiss."""
    file = next(p for p in sorted((folder / "graph").iterdir()) if p.suffix == ".svs")
    table = np.fromfile(file, np.uint32)
    degree = 64
    table = table[len(table) - count * (degree + 1) :].reshape(count, degree + 1)
    lengths, neighbours = table[:, 0], table[:, 1:].astype(np.int32)
    neighbours[np.arange(degree) >= lengths[:, None]] = -1
    hnsw = faiss.HNSW(degree // 2)
    faiss.copy_array_to_vector(np.ones(count, np.int32), hnsw.levels)
    faiss.copy_array_to_vector(np.arange(count + 1, dtype=np.uint64) * degree, hnsw.offsets)
    hnsw.max_level, hnsw.is_similarity = 0, True
    config = next((folder / "config").glob("*.toml")).read_text()
    entry = next(line for line in config.splitlines() if "entry_point" in line)
    hnsw.entry_point = int("".join(c for c in entry.split("=")[1] if c.isdigit()))
    return Links.of(hnsw, neighbours.reshape(-1), pages)


@dataclass(frozen=True)
class Walker:
    """Links over a storage; `rows` hold the fp32 numbers that entry rows are scored by.

    A walk by prefixes in place ranks by their inner products; with `inverse`, one over each
    prefix's norm, what the whole beam found is ranked again by cosine before it is cut to k.
    """

    index: Any
    rows: np.ndarray
    inverse: np.ndarray | None = None

    @staticmethod
    def over(
        storage: Any, links: Links, rows: np.ndarray, inverse: np.ndarray | None = None
    ) -> Walker:
        index = faiss.IndexHNSW(storage, 32)
        index.hnsw, index.ntotal, index.is_trained = links.hnsw, storage.ntotal, True
        index.referenced_objects = [storage, links]
        return Walker(index, rows, inverse)

    def cold(self, query: np.ndarray, k: int, ef: int) -> np.ndarray:
        """The k nearest from the graph's own entry point: (k,) int64."""
        wide = k if self.inverse is None else ef
        scores, found = self.index.search(query[None], wide, params=_params(ef))
        return self.by_cosine(scores[0], found[0], k)

    def by_cosine(self, scores: np.ndarray, found: np.ndarray, k: int) -> np.ndarray:
        """The k best by cosine, best first; as they are where rows are whole."""
        if self.inverse is None:
            return found
        found, scores = found[found >= 0], scores[found >= 0]
        return found[np.argsort(-scores * self.inverse[found])[:k]]

    def entered(
        self, query: np.ndarray, k: int, ef: int, entry: np.ndarray, kind: int = 1
    ) -> np.ndarray:
        """The k nearest from given rows; faiss wants their inner products beside them."""
        entry = np.ascontiguousarray(entry, np.int32)
        scores = self.rows.take(entry, axis=0)[:, : len(query)] @ query
        wide = k if self.inverse is None else max(k, ef)
        found_s, found = np.empty(wide, np.float32), np.empty(wide, np.int64)
        pointer = faiss.swig_ptr
        self.index.search_level_0(
            1,
            pointer(query),
            wide,
            pointer(entry),
            pointer(scores),
            pointer(found_s),
            pointer(found),
            len(entry),
            kind,
            _params(ef),
        )
        return self.by_cosine(found_s, found, k)


_PARAMS: dict[int, Any] = {}


def _params(ef: int) -> Any:
    if ef not in _PARAMS:
        _PARAMS[ef] = faiss.SearchParametersHNSW(efSearch=ef)
    return _PARAMS[ef]


def rescored(rows: np.ndarray, query: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
    """The k best of some candidates by the finest rows: (k,) int64."""
    candidates = candidates[candidates >= 0]
    scores = rows.take(candidates, axis=0) @ query
    if len(candidates) <= k:
        return candidates
    return candidates[np.argpartition(scores, -k)[-k:]]


def diverse(rows: np.ndarray, query: np.ndarray, found: np.ndarray, most: int) -> np.ndarray:
    """Of rows found, best first, at most `most` that are nearer to the query than to one another.

    The rule by which HNSW chooses links: a row is dropped when one kept before is nearer to it than
    the query is, since a walk from the kept one would get there anyway.
    """
    own = rows.take(found, axis=0)[:, : len(query)]
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    between, to_query = own @ own.T, own @ query
    free = np.ones(len(found), bool)
    kept: list[int] = []
    while len(kept) < most and free.any():
        one = int(free.argmax())
        kept.append(one)
        free &= between[one] < to_query
        free[one] = False
    return found[kept]


def inverse_norms(rows: np.ndarray, dim: int) -> np.ndarray:
    """One over the norm of each row's first `dim` numbers: (n,) float32."""
    parts = [rows[start : start + BLOCK, :dim] for start in range(0, len(rows), BLOCK)]
    return np.concatenate([1 / np.linalg.norm(part, axis=1) for part in parts]).astype(np.float32)


Answers = Sequence[np.ndarray]
"""One array of row numbers for each query."""

Contender = Callable[[int], np.ndarray]
"""A query's number to its row numbers."""

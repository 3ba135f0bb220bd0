"""A level as an HNSW graph on the CPU, begun cold or at the rows that an earlier exit found.

Seeding a graph's search is known (Lucene's SeededKnnVectorQuery, after arXiv 2307.16779; adaptive
entry points, arXiv 2402.04713); seeding it with the encoder's own early answer is this project's.
Notable: a graph file holds links alone, and what it walks over is not stored twice. Level 1 shares
the scanned codes; other levels read the rows where they are, a flat index being told that its codes
lie a whole row apart. So the level before the finest walks the finest level's own links by the
prefixes of its rows, at no cost in memory, while the encoder's last stage still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faiss as faiss_untyped
import numpy as np

from hivlp.index.backends.exact import best_rows
from hivlp.index.backends.faiss_cpu import SLACK, FaissLevel, finite, one_thread, read, write
from hivlp.index.backends.rows import LevelRows, check_queries, ranked_scores
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.level_index import Capabilities, SearchParams
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray

faiss: Any = faiss_untyped  # its stubs know half of what it holds
LINKS, BUILD_EF = 32, 200
"""Neighbours a row (twice as many on the ground level), and the beam's width while building."""
DEFAULT_EF = 128
SMALL = 1_000
"""Up to so many rows an exhaustive search is as fast, and exact."""
CHUNK = 10_000
MOSTLY = 0.75
WIDENED = (1, 4, 16)
_NOBODY = faiss.IndexFlatIP(1)
"""Lends its empty owner to views of memory that is numpy's: faiss must not free it."""
ONE_BY_ONE = 1
"""faiss's search_type: begin at each entry row in turn, sharing what was seen."""

CAPABILITIES = Capabilities(
    methods=frozenset({"graph", "rescore"}),
    mask=True,
    entry_rows=True,
    max_k=None,
    exact=False,
    batch=False,
)


class GraphLevel:
    """A `LevelIndex` over an HNSW graph; rows found are scored and ranked by the kernel.

    Where the beam is as wide as the level, or the graph can't reach k rows (equal rows crowd each
    other out), the level is searched exhaustively: min(k, rows allowed) rows always come back.
    A mask is meant to hide few rows, such as deleted ones: hidden rows are walked through and left
    out of what is found, and where they crowd a query's neighbourhood its beam is widened.
    """

    def __init__(
        self,
        level: int,
        rows: LevelRows,
        index: Any,
        keep: tuple[Any, ...],
        *,
        coarse: bool = False,
    ) -> None:
        self._level = level
        self._rows = rows
        self._index = index
        self._keep = keep  # what faiss points into
        self._coarse = coarse  # the walk's own order is rough: everything in the beam is ranked
        self._walked = LevelRows(rows.matrix, rows.dim) if coarse else rows

    @property
    def level(self) -> int:
        """1 (coarsest) to L."""
        return self._level

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""
        return self._rows.dim

    @property
    def size(self) -> int:
        """Number of rows."""
        return self._rows.size

    @property
    def capabilities(self) -> Capabilities:
        """Graph search with entry rows, under a mask of most rows, and re-score."""
        return CAPABILITIES

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,
        entry_rows: Sequence[RowArray] | None,
        mask: RowMask | None,
    ) -> list[Candidates]:
        """About the best min(k, rows allowed) rows of each query (n, dim), unique, best first.

        Raises InputError for NaN, Inf or a wrong shape.
        """
        assert k >= 1, k
        checked = check_queries(queries, self.dim)
        ef = max(params.ef or DEFAULT_EF, k)
        one_thread()
        entries = [None] * len(checked) if entry_rows is None else entry_rows
        walk = self._walk if mask is None else partial(self._walk_masked, mask=mask)
        return [
            best_rows(self._rows, query, k, mask)
            if ef >= self.size or self.size <= SMALL
            else walk(query, k, ef, entry)
            for query, entry in zip(checked, entries, strict=True)
        ]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return ranked_scores(self._rows, check_queries(queries, self.dim), rows)

    def _walk(self, query: FloatArray, k: int, ef: int, entry: RowArray | None) -> Candidates:
        fetch = ef if self._coarse else min(ef, k + SLACK)
        real = self._reached(query, fetch, ef, entry)
        if len(real) < k:
            return best_rows(self._rows, query, k)
        return Candidates.ranked(real, self._rows.score(query, real), k)

    def _walk_masked(
        self, query: FloatArray, k: int, ef: int, entry: RowArray | None, mask: RowMask
    ) -> Candidates:
        """The whole beam, hidden rows left out: MOSTLY as many as it is wide must be left.

        Else the beam is widened, up to 16 times; beyond, the rows allowed are scored one by
        one, as for a query whose neighbourhood was deleted.
        """
        first = ef * self.size // max(mask.count, 1)
        for times in WIDENED:
            beam = min(first * times, self.size)
            real = self._reached(query, beam, beam, entry)
            able = real[mask.allowed[real]]
            if len(able) >= max(k, MOSTLY * ef):
                return Candidates.ranked(able, self._rows.score(query, able), k)
        return best_rows(self._rows, query, k, mask)

    def _reached(self, query: FloatArray, fetch: int, ef: int, entry: RowArray | None) -> RowArray:
        """Up to `fetch` different rows that a walk with a beam of `ef` found."""
        params = faiss.SearchParametersHNSW(efSearch=ef)
        if entry is None or not len(entry):
            found = self._index.search(query[None], fetch, params=params)[1][0]
        else:
            found = self._enter(query, fetch, params, entry)
        return np.unique(found[found >= 0])

    def _enter(self, query: FloatArray, fetch: int, params: Any, entry: RowArray) -> RowArray:
        """Search the ground level from given rows: (fetch,) int64, -1 where nothing was found.

        faiss wants the rows' inner products beside them, with their own sign, as the walk has them.
        """
        scores = self._walked.score(query, entry)
        rows = np.ascontiguousarray(entry, dtype=np.int32)
        found_scores, found = np.empty(fetch, np.float32), np.empty(fetch, np.int64)
        self._index.search_level_0(
            1,
            faiss.swig_ptr(query),
            fetch,
            faiss.swig_ptr(rows),
            faiss.swig_ptr(scores),
            faiss.swig_ptr(found_scores),
            faiss.swig_ptr(found),
            len(rows),
            ONE_BY_ONE,
            params,
        )
        return found


def write_graph(
    path: Path,
    rows: LevelRows,
    threads: int = 1,
    step: Callable[[int], None] | None = None,
) -> None:
    """Build a graph over a level's unit vectors with `threads` threads and write its links.

    With one thread the graph is a function of the rows; with more, rows are linked in whatever
    order the threads come to them, and two builds differ, about equally good. `step` is told of
    every part of the rows that was added. Needs the level in memory as fp32 besides, while it
    builds. Raises OSError, and ValueError for NaN or Inf.
    """
    assert threads >= 1, threads
    index = faiss.IndexHNSWFlat(rows.dim, LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_EF
    try:
        faiss.omp_set_num_threads(threads)  # holds for the calling thread alone
        for start in range(0, rows.size, CHUNK):
            part = np.arange(start, min(start + CHUNK, rows.size))
            index.add(finite(rows.vectors(part)))
            if step is not None:
                step(len(part))
    finally:
        faiss.omp_set_num_threads(1)
    write(index, path, faiss.IO_FLAG_SKIP_STORAGE)


def open_graph(path: Path, level: int, rows: LevelRows, codes: FaissLevel | None) -> GraphLevel:
    """Memory-map a graph, to walk over scanned codes, or else over the rows themselves in place.

    The links may be those of a finer level whose rows' prefixes these are: near rows are near at
    every level. Raises ValueError for what is no graph of these rows.
    """
    index = read(path, faiss.IO_FLAG_SKIP_STORAGE)
    if not isinstance(index, faiss.IndexHNSW) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{type(index).__name__} where an inner-product HNSW graph is expected")
    if index.ntotal != rows.size or index.d not in (rows.dim, rows.matrix.shape[1]):
        raise ValueError(f"a graph of {index.ntotal} vectors of {index.d} numbers")
    storage, keep = (codes.index, codes) if codes is not None else (in_place(rows), rows.matrix)
    index.storage, index.d = storage, rows.dim
    index.own_fields = False
    by_length = codes is None and rows.inverse_norms is not None
    return GraphLevel(level, rows, index, (storage, keep), coarse=by_length)


def in_place(rows: LevelRows) -> Any:
    """A faiss index of a level's numbers that reads them where they are, copying nothing.

    Its codes lie a whole row apart, of which it reads the first numbers: a prefix that is not made
    unit length again. It borrows its memory from `rows.matrix`, which must outlive it.
    """
    matrix = rows.matrix
    assert matrix.flags.c_contiguous, "faiss is given the matrix's own memory, not a copy's"
    if matrix.dtype == np.float16:
        kind = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexScalarQuantizer(rows.dim, kind, faiss.METRIC_INNER_PRODUCT)
        index.sq.code_size = matrix.strides[0]
    else:
        index = faiss.IndexFlatIP(rows.dim)
    index.code_size = matrix.strides[0]
    if rows.size:
        data = faiss.swig_ptr(matrix.reshape(-1).view(np.uint8))
        view = faiss.MaybeOwnedVectorUInt8.create_view
        index.codes = view(data, matrix.nbytes, _NOBODY.codes.owner)
    index.ntotal = rows.size
    return index

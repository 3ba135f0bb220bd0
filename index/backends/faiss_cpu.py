"""A level as a FAISS index on the CPU.

FAISS finds; the project's own kernel scores what was found and breaks ties by row, so the answer is
the oracle's. FAISS alone breaks ties as its heap likes, and says -1 where it found nothing.
Notable: the file is memory-mapped (`IO_FLAG_MMAP_IFC`; `IO_FLAG_MMAP` does nothing for flat
indexes), OpenMP threads are set for each calling thread because the setting holds for that thread
only, and BLAS is reached from small batches on, not from faiss's 128,000 numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from hivlp.index.backends.exact import CAPABILITIES, best_rows
from hivlp.index.backends.rows import LevelRows, check_queries, ranked_scores
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.level_index import Capabilities, SearchParams
from hivlp.models.levels import FloatArray

VERSION: str = faiss.__version__
BLAS_FROM = 4_096
"""Queries x dimension from which faiss multiplies matrices instead of scanning query by query."""
SLACK = 32
"""Rows asked for beyond k, so that rows tied with the k-th are seen."""
MARGIN = 1e-5
"""More than faiss's inner product of unit vectors can differ from ours by rounding."""

CHUNK, PART = 65_536, 4_096

_thread = threading.local()


class _FlatRows:
    """The vectors inside a flat index, scored by the project's own kernel.

    They are copied out a part at a time: in a memory-mapped file they begin at any byte, and numpy
    answers a `take` from an unaligned array by copying the whole array first.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @property
    def size(self) -> int:
        """Number of rows."""
        return int(self._index.ntotal)

    def scan(self, query: FloatArray) -> FloatArray:
        """Scores of every row for one query (dim,) float32: (N,) float32."""
        parts = (
            np.vecdot(self._index.reconstruct_n(start, min(PART, self.size - start)), query)
            for start in range(0, self.size, PART)
        )
        return np.concatenate(list(parts))

    def score(self, query: FloatArray, rows: RowArray) -> FloatArray:
        """Scores of given rows (m,) int64 for one query (dim,) float32: (m,) float32."""
        _one_thread()
        scores: FloatArray = np.vecdot(self._index.reconstruct_batch(rows), query)
        return scores


class FaissLevel:
    """A `LevelIndex` over one flat FAISS index of unit vectors, inner product."""

    def __init__(self, level: int, index: Any) -> None:
        self._level = level
        self._index = index
        self._rows = _FlatRows(index)

    @property
    def level(self) -> int:
        """1 (coarsest) to L."""
        return self._level

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""
        return int(self._index.d)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self._rows.size

    @property
    def capabilities(self) -> Capabilities:
        """Scan and re-score, any k."""
        return CAPABILITIES

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,  # noqa: ARG002  a flat index has nothing to tune
        entry_rows: Sequence[RowArray] | None,
    ) -> list[Candidates]:
        """The best min(k, size) rows of each query (n, dim), ties to the lower row.

        Raises InputError for NaN, Inf or a wrong shape.
        """
        assert k >= 1, k
        assert entry_rows is None, "a scan has no entry rows"
        checked = check_queries(queries, self.dim)
        fetch = k + SLACK
        if fetch >= self.size:  # nearly everything is wanted: no heap can help
            return [best_rows(self._rows, query, k) for query in checked]
        found, rows = self._scan(checked, fetch)
        return [self._settle(query, k, found[i], rows[i]) for i, query in enumerate(checked)]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return ranked_scores(self._rows, check_queries(queries, self.dim), rows)

    def _scan(self, queries: FloatArray, fetch: int) -> tuple[FloatArray, RowArray]:
        """faiss's own (n, fetch) scores and rows, -1 where there is none."""
        _one_thread()
        return self._index.search(queries, fetch)  # type: ignore[no-any-return]

    def _settle(self, query: FloatArray, k: int, found: FloatArray, rows: RowArray) -> Candidates:
        """Re-score what faiss found; scan by ourselves where more rows tie than were fetched."""
        if found[-1] >= found[k - 1] - MARGIN:
            return best_rows(self._rows, query, k)
        real = rows[rows >= 0]
        return Candidates.ranked(real, self._rows.score(query, real), k)


def write_flat(path: Path, rows: LevelRows) -> None:
    """Write a level's unit vectors as an IndexFlatIP file. Raises OSError."""
    index = faiss.IndexFlatIP(rows.dim)
    for start in range(0, rows.size, CHUNK):
        index.add(rows.vectors(np.arange(start, min(start + CHUNK, rows.size))))
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(f"{path.name}: {str(error).splitlines()[-1]}") from error


def open_flat(path: Path, level: int) -> FaissLevel:
    """Memory-map an IndexFlatIP file. Raises ValueError for anything else."""
    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise ValueError(f"not a readable FAISS index: {str(error).splitlines()[0]}") from error
    if not isinstance(index, faiss.IndexFlat) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{type(index).__name__} where a flat inner-product index is expected")
    return FaissLevel(level, index)


def _one_thread() -> None:
    """Keep OpenMP to the calling thread; the setting holds for that thread only."""
    if not getattr(_thread, "single", False):
        faiss.omp_set_num_threads(1)
        _thread.single = True

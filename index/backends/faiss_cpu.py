"""A level's codes as a FAISS index on the CPU: flat, one byte a number (SQ8), PQ or RaBitQ.

FAISS finds; the project's own kernel scores what was found and breaks ties by row, so over flat
codes the answer is the oracle's, and over lossy ones only which rows were found differs. FAISS
alone breaks ties as its heap likes, and says -1 where it found nothing.
Notable: the file is memory-mapped (`IO_FLAG_MMAP_IFC`; `IO_FLAG_MMAP` does nothing for flat
indexes), OpenMP threads are set for each calling thread because the setting holds for that thread
only, and BLAS is reached from small batches on, not from faiss's 128,000 numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss as faiss_untyped
import numpy as np

from hivlp.index.backends.exact import best_rows
from hivlp.index.backends.rows import LevelRows, Rows, check_queries, ranked_scores
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.level_index import FAST_SCAN, Capabilities, Codec, SearchParams
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray

faiss: Any = faiss_untyped  # its stubs know half of what it holds
VERSION: str = faiss.__version__
BLAS_FROM = 4_096
"""Queries x dimension from which faiss multiplies matrices instead of scanning query by query."""
SLACK = 32
"""Rows asked for beyond k, so that rows tied with the k-th are seen."""
FETCH: dict[Codec, int] = {"flat": 1, "sq8": 1, "pq64x4fs": 8, "rabitqfs": 4}
"""Rows scored by the kernel for each row wanted: fast-scan's own order is coarse, and the prefixes
of 4,000 rows are scored in a millisecond, where re-scoring them at the next level costs several.
RaBitQ with 4 holds as much of the finest level's best as PQ with 8 (`bench/fast_scan_fetch.py`)."""
RABITQ_NUMBERS = 256
"""RaBitQ's error falls as the root of the dimension: below 64 numbers, more rows are scored."""
QUERY_BITS = 8
"""RaBitQ's bits of a query number: 6 loses nothing either, 4 a point, and none is faster."""
MARGIN = 1e-5
"""More than faiss's inner product of unit vectors can differ from ours by rounding."""

LEAST_PQ = 1_000
"""Fewer rows can't train a product quantiser; they stay flat."""
TRAINED_ON = 100_000
MOST_SUBSPACES = 64
FEW = 5_000
"""Up to so many allowed rows are scored by the kernel: sooner done than a masked scan."""
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
        one_thread()
        parts = (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
        scores = [np.vecdot(self._index.reconstruct_batch(part), query) for part in parts]
        return np.concatenate(scores) if scores else np.empty(0, np.float32)


class FaissLevel:
    """A `LevelIndex` over one FAISS index of unit vectors' codes, inner product."""

    def __init__(self, level: int, index: Any, codec: Codec, rows: Rows) -> None:
        self._level = level
        self.index = index
        self.codec: Codec = codec
        self._rows = rows
        self._margin = MARGIN if codec == "flat" else 0.0

    @property
    def level(self) -> int:
        """1 (coarsest) to L."""
        return self._level

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""
        return int(self.index.d)

    @property
    def size(self) -> int:
        """Number of rows."""
        return int(self.index.ntotal)

    @property
    def capabilities(self) -> Capabilities:
        """Scan and re-score, any k; a mask unless the codes are fast-scan, which refuse one."""
        return Capabilities(
            methods=frozenset({"scan", "rescore"}),
            mask=self.codec not in FAST_SCAN,
            entry_rows=False,
            max_k=None,
            exact=self.codec == "flat",
            batch=self.codec == "flat",
        )

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,  # noqa: ARG002  a scan has nothing to tune
        entry_rows: Sequence[RowArray] | None,
        mask: RowMask | None,
    ) -> list[Candidates]:
        """The best min(k, allowed) rows of each query (n, dim), ties to the lower row.

        Raises InputError for NaN, Inf or a wrong shape.
        """
        assert k >= 1, k
        assert entry_rows is None, "a scan has no entry rows"
        assert mask is None or self.capabilities.mask, f"{self.codec} codes take no mask"
        checked = check_queries(queries, self.dim)
        fetch = _rows_each(self.codec, self.dim) * k + SLACK
        allowed = self.size if mask is None else mask.count
        if fetch >= allowed or (mask is not None and allowed <= FEW):  # no heap can help
            return [best_rows(self._rows, query, k, mask) for query in checked]
        found, rows = self._scan(checked, fetch, mask)
        return [
            self._settle(query, k, (found[i], rows[i]), mask) for i, query in enumerate(checked)
        ]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return ranked_scores(self._rows, check_queries(queries, self.dim), rows)

    def _scan(
        self, queries: FloatArray, fetch: int, mask: RowMask | None
    ) -> tuple[FloatArray, RowArray]:
        """faiss's own (n, fetch) scores and rows, -1 where there is none."""
        one_thread()
        params = None
        if mask is not None:
            selector = faiss.IDSelectorBitmap(mask.size, faiss.swig_ptr(mask.bits))
            params = faiss.SearchParameters(sel=selector)
        return self.index.search(queries, fetch, params=params)  # type: ignore[no-any-return]

    def _settle(
        self, query: FloatArray, k: int, seen: tuple[FloatArray, RowArray], mask: RowMask | None
    ) -> Candidates:
        """Re-score what faiss found; scan by ourselves where more rows tie than were fetched."""
        found, rows = seen
        if found[-1] >= found[k - 1] - self._margin:
            return best_rows(self._rows, query, k, mask)
        real = rows[rows >= 0]
        return Candidates.ranked(real, self._rows.score(query, real), k)


def _rows_each(codec: Codec, dim: int) -> int:
    """Rows scored by the kernel for each row wanted of a level of this dimension."""
    return max(FETCH[codec], RABITQ_NUMBERS // dim if codec == "rabitqfs" else 1)


def codec_for(codec: Codec, rows: int) -> Codec:
    """The codec that so many rows can have: too few to train a product quantiser stay flat."""
    return "flat" if codec == "pq64x4fs" and rows < LEAST_PQ else codec


def write_codes(path: Path, rows: LevelRows, codec: Codec) -> None:
    """Write a level's unit vectors as a FAISS file: trained on a spread of rows, then all added.

    Raises OSError, and ValueError for NaN or Inf and for fast-scan codes of fewer than `LEAST_PQ`
    rows.
    """
    if codec != codec_for(codec, rows.size):
        raise ValueError(f"{codec} needs at least {LEAST_PQ} rows, there are {rows.size}")
    one_thread()
    index = _empty(codec, rows.dim)
    if not index.is_trained and rows.size:
        step = max(1, rows.size // TRAINED_ON)
        index.train(finite(rows.vectors(np.arange(0, rows.size, step))))
    for start in range(0, rows.size, CHUNK):
        index.add(finite(rows.vectors(np.arange(start, min(start + CHUNK, rows.size)))))
    write(index, path, 0)


def open_codes(path: Path, level: int, rows: LevelRows) -> FaissLevel:
    """Memory-map a file of `write_codes`. Raises ValueError for anything else."""
    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
    index = read(path, 0)
    codec = _codec_of(index)
    if codec is None or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{type(index).__name__} where a level's codes are expected")
    return FaissLevel(level, index, codec, _FlatRows(index) if codec == "flat" else rows)


def read(path: Path, flags: int) -> Any:
    """A FAISS file, memory-mapped. Raises ValueError for what can't be read as one."""
    try:
        mapped = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY
        return faiss.read_index(str(path), mapped | flags)
    except RuntimeError as error:
        raise ValueError(f"not a readable FAISS index: {str(error).splitlines()[0]}") from error


def write(index: Any, path: Path, flags: int) -> None:
    """Write a FAISS file. Raises OSError, for a full disk say."""
    try:
        faiss.write_index(index, str(path), flags)
    except RuntimeError as error:
        raise OSError(f"{path.name}: {str(error).splitlines()[-1]}") from error


def finite(vectors: FloatArray) -> FloatArray:
    """The vectors themselves. Raises ValueError where one holds NaN or Inf."""
    if not np.isfinite(vectors).all():
        raise ValueError("vectors hold NaN or Inf")
    return vectors


def one_thread() -> None:
    """Keep OpenMP to the calling thread; the setting holds for that thread only."""
    if not getattr(_thread, "single", False):
        faiss.omp_set_num_threads(1)
        _thread.single = True


def subspaces(dim: int) -> int:
    """Subspaces of fast-scan PQ: the most, up to 64, that divide the dimension."""
    return max(m for m in range(1, min(dim, MOST_SUBSPACES) + 1) if dim % m == 0)


def _empty(codec: Codec, dim: int) -> Any:
    if codec == "flat":
        return faiss.IndexFlatIP(dim)
    if codec == "sq8":  # one range for all numbers: as good as a range each, and faster
        kind = faiss.ScalarQuantizer.QT_8bit_uniform
        return faiss.IndexScalarQuantizer(dim, kind, faiss.METRIC_INNER_PRODUCT)
    if codec == "rabitqfs":
        index = faiss.IndexRaBitQFastScan(dim, faiss.METRIC_INNER_PRODUCT)
        index.qb = QUERY_BITS
        return index
    return faiss.IndexPQFastScan(dim, subspaces(dim), 4, faiss.METRIC_INNER_PRODUCT)


def _codec_of(index: Any) -> Codec | None:
    if isinstance(index, faiss.IndexFlat):
        return "flat"
    if isinstance(index, faiss.IndexPQFastScan):
        return "pq64x4fs"
    if isinstance(index, faiss.IndexRaBitQFastScan):
        return "rabitqfs" if index.rabitq.nb_bits == 1 else None
    uniform = faiss.ScalarQuantizer.QT_8bit_uniform
    if isinstance(index, faiss.IndexScalarQuantizer) and index.sq.qtype == uniform:
        return "sq8"
    return None

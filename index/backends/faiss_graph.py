"""A level as an HNSW graph on the CPU, begun cold or at the rows that an earlier exit found.

Seeding a graph's search is known (Lucene's SeededKnnVectorQuery, after arXiv 2307.16779; adaptive
entry points, arXiv 2402.04713); seeding it with the encoder's own early answer is this project's.
Notable: a graph file holds links alone. What it walks over is not stored twice: level 1 shares the
scanned codes, and the finest level reads `rows.npy` in place. faiss knows no such array, so the
first bytes of a private, copy-on-write mapping of the file, npy's header, are replaced by the
header of an index of the same shape, and faiss reads the mapping without copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss as faiss_untyped
import numpy as np
import numpy.typing as npt

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
NPY_HEADER = 128
CHUNK = 10_000
ONE_BY_ONE = 1
"""faiss's search_type: begin at each entry row in turn, sharing what was seen."""

CAPABILITIES = Capabilities(
    methods=frozenset({"graph", "rescore"}),
    mask=False,
    entry_rows=True,
    max_k=None,
    exact=False,
    batch=False,
)


class GraphLevel:
    """A `LevelIndex` over an HNSW graph; rows found are scored and ranked by the kernel.

    Where the beam is as wide as the level, or the graph can't reach k rows (equal rows crowd each
    other out), the level is searched exhaustively: min(k, size) rows always come back.
    """

    def __init__(self, level: int, rows: LevelRows, index: Any, keep: tuple[Any, ...]) -> None:
        self._level = level
        self._rows = rows
        self._index = index
        self._keep = keep  # what faiss points into

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
        """Graph search with entry rows, and re-score; no mask."""
        return CAPABILITIES

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,
        entry_rows: Sequence[RowArray] | None,
        mask: RowMask | None,
    ) -> list[Candidates]:
        """About the best min(k, size) rows of each query (n, dim), unique, best first.

        Raises InputError for NaN, Inf or a wrong shape.
        """
        assert k >= 1, k
        assert mask is None, "a graph takes no mask: scan under a filter"
        checked = check_queries(queries, self.dim)
        ef = max(params.ef or DEFAULT_EF, k)
        if ef >= self.size or self.size <= SMALL:
            return [best_rows(self._rows, query, k) for query in checked]
        one_thread()
        entries = [None] * len(checked) if entry_rows is None else entry_rows
        return [
            self._walk(query, k, ef, entry) for query, entry in zip(checked, entries, strict=True)
        ]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return ranked_scores(self._rows, check_queries(queries, self.dim), rows)

    def _walk(self, query: FloatArray, k: int, ef: int, entry: RowArray | None) -> Candidates:
        fetch = min(ef, k + SLACK)
        params = faiss.SearchParametersHNSW(efSearch=ef)
        if entry is None or not len(entry):
            found = self._index.search(query[None], fetch, params=params)[1][0]
        else:
            found = self._enter(query, fetch, params, entry)
        real = np.unique(found[found >= 0])
        if len(real) < k:
            return best_rows(self._rows, query, k)
        return Candidates.ranked(real, self._rows.score(query, real), k)

    def _enter(self, query: FloatArray, fetch: int, params: Any, entry: RowArray) -> RowArray:
        """Search the ground level from given rows: (fetch,) int64, -1 where nothing was found.

        faiss wants the rows' inner products beside them, with their own sign.
        """
        scores = self._rows.score(query, entry)
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


def write_graph(path: Path, rows: LevelRows) -> None:
    """Build a graph over a level's unit vectors and write its links.

    One thread: the same rows give the same graph. Needs the level in memory as fp32 besides, while
    it builds. Raises OSError, and ValueError for NaN or Inf.
    """
    one_thread()
    index = faiss.IndexHNSWFlat(rows.dim, LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_EF
    for start in range(0, rows.size, CHUNK):
        index.add(finite(rows.vectors(np.arange(start, min(start + CHUNK, rows.size)))))
    write(index, path, faiss.IO_FLAG_SKIP_STORAGE)


def open_graph(
    path: Path, level: int, rows: LevelRows, codes: FaissLevel | None, rows_file: Path | None
) -> GraphLevel:
    """Memory-map a graph, to walk over scanned codes, or else over a rows file, or else a copy.

    Raises ValueError for what is no graph of these rows.
    """
    index = read(path, faiss.IO_FLAG_SKIP_STORAGE)
    if not isinstance(index, faiss.IndexHNSW) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{type(index).__name__} where an inner-product HNSW graph is expected")
    if (index.ntotal, index.d) != (rows.size, rows.dim):
        raise ValueError(f"a graph of {index.ntotal} vectors of {index.d} numbers")
    storage, keep = (codes.index, (codes,)) if codes is not None else _storage(rows, rows_file)
    index.storage = storage
    index.own_fields = False
    return GraphLevel(level, rows, index, (storage, *keep))


def _storage(rows: LevelRows, rows_file: Path | None) -> tuple[Any, tuple[Any, ...]]:
    """The rows as a faiss index, in place where they are all of a file, and what it points into."""
    whole = rows.inverse_norms is None and rows.dim == rows.matrix.shape[1]
    if rows_file is None or not whole or not rows.size:
        index = faiss.IndexFlatIP(rows.dim)
        if rows.size:
            index.add(rows.vectors(np.arange(rows.size)))
        return index, ()
    mapped = np.memmap(rows_file, dtype=np.uint8, mode="c").view(np.ndarray)
    head = _faiss_header(rows)
    begin = _npy_offset(rows_file) - len(head)
    if begin < 0:
        raise ValueError(f"{rows_file.name}: its header is too short")
    mapped[begin : begin + len(head)] = head
    body: npt.NDArray[np.uint8] = mapped[begin:]
    reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(body), len(body))
    return faiss.read_index(reader, faiss.IO_FLAG_MMAP_IFC), (mapped, reader)


def _faiss_header(rows: LevelRows) -> npt.NDArray[np.uint8]:
    """What precedes the numbers in a faiss file of such rows.

    Taken from an index of one row, with two int64 set: the number of rows, behind the type and the
    dimension, and the length of the codes, the last. An index of two rows is the check.
    """
    one, two = (_header_of(rows, count) for count in (1, 2))
    assert (_counted(one, 2) == two).all(), "faiss's header has another form"
    return _counted(one, rows.size)


def _counted(one: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    """The header of `count` rows, from that of one."""
    header = one.copy()
    for place in (slice(8, 16), slice(len(one) - 8, len(one))):
        number = int.from_bytes(one[place].tobytes(), "little") * count
        header[place] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return header


def _header_of(rows: LevelRows, count: int) -> npt.NDArray[np.uint8]:
    half = rows.matrix.dtype == np.float16
    kind = faiss.ScalarQuantizer.QT_fp16
    metric = faiss.METRIC_INNER_PRODUCT
    index = (
        faiss.IndexScalarQuantizer(rows.dim, kind, metric) if half else faiss.IndexFlatIP(rows.dim)
    )
    index.add(np.zeros((count, rows.dim), np.float32))
    data: npt.NDArray[np.uint8] = faiss.serialize_index(index)
    return data[: len(data) - count * rows.dim * rows.matrix.dtype.itemsize]


def _npy_offset(path: Path) -> int:
    """Where the numbers of an npy file begin, in bytes."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            np.lib.format.read_array_header_1_0(file)
        else:
            np.lib.format.read_array_header_2_0(file)
        return file.tell()

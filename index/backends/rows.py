"""The rows of one level: scored in bulk, or by number, always by the same kernel.

One kernel everywhere (`np.vecdot`, one dot product a row) because a matrix product rounds a row by
where it lies in the block: with BLAS, equal vectors get scores that differ in the last bit, and a
tie would be broken by the backend instead of by the row. It is also as fast as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hivlp.index.candidates import Candidates, RowArray
from hivlp.models.errors import InputError
from hivlp.models.levels import NORM_EPSILON, FloatArray, normalise

NORM_CHUNK = 65_536
CAST_CHUNK = 8_192
BLOCK_SCORES = 16_000_000
StoredArray = npt.NDArray[np.float32] | npt.NDArray[np.float16]
"""Rows as they are kept: fp32, or fp16 in half the memory."""


class Rows(Protocol):
    """Rows of one level that can be scored, wherever they are kept."""

    @property
    def size(self) -> int:
        """Number of rows."""

    def scan(self, query: FloatArray) -> FloatArray:
        """Scores of every row for one query (dim,) float32: (N,) float32."""

    def score(self, query: FloatArray, rows: RowArray) -> FloatArray:
        """Scores of given rows (m,) int64 for one query (dim,) float32: (m,) float32."""


@dataclass(frozen=True, slots=True)
class LevelRows:
    """`matrix` (N, D >= dim), memory-mapped or not; the level is its first `dim` columns.

    `inverse_norms` (N,) float32 make a nested prefix unit length; None where rows already are.
    float16 rows are cast to float32 as they are read: numpy's own half-precision sums are neither
    fast nor precise.
    """

    matrix: StoredArray
    dim: int
    inverse_norms: FloatArray | None = None

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.matrix)

    def part(self, rows: slice) -> LevelRows:
        """Some rows in a row, numbered anew from 0; nothing is copied."""
        norms = self.inverse_norms
        return LevelRows(self.matrix[rows], self.dim, None if norms is None else norms[rows])

    def scan(self, query: FloatArray) -> FloatArray:
        """Scores of every row for one query (dim,) float32: (N,) float32."""
        scores = np.concatenate([np.vecdot(part, query) for part in self._parts()])
        return scores if self.inverse_norms is None else scores * self.inverse_norms

    def scan_many(self, queries: FloatArray) -> FloatArray:
        """Scores of every row for n queries (n, dim) float32: (n, N) float32, for measuring.

        One matrix product, many times faster than n scans, but equal rows may differ in the last
        bits: whoever compares these scores allows for it.
        """
        scores = np.concatenate([queries @ part.T for part in self._parts()], axis=1)
        if self.inverse_norms is not None:
            scores *= self.inverse_norms
        return scores

    def score(self, query: FloatArray, rows: RowArray) -> FloatArray:
        """Scores of given rows (m,) int64 for one query (dim,) float32: (m,) float32."""
        scores: FloatArray = np.vecdot(self._taken(rows), query)
        return scores if self.inverse_norms is None else scores * self.inverse_norms.take(rows)

    def vectors(self, rows: RowArray) -> FloatArray:
        """The level's unit vectors of given rows: (m,) int64 in, (m, dim) float32 out."""
        taken = self._taken(rows)
        exact = self.inverse_norms is None and self.matrix.dtype == np.float32
        return taken if exact else normalise(taken)

    def _taken(self, rows: RowArray) -> FloatArray:
        """The level's columns of given rows, copied: (m, dim) float32, C-contiguous."""
        # Indexing both axes reads the prefix alone, in half the time of `take` on whole rows or
        # less; whole rows `take` is best at (on a slice it would copy the whole matrix first).
        if self.dim == self.matrix.shape[1]:
            return self.matrix.take(rows, axis=0).astype(np.float32, copy=False)
        return np.ascontiguousarray(self.matrix[rows, : self.dim], dtype=np.float32)

    def _parts(self) -> Iterator[FloatArray]:
        """Every row in order, (m, dim) float32 each: all at once where nothing must be cast."""
        step = max(self.size, 1) if self.matrix.dtype == np.float32 else CAST_CHUNK
        for start in range(0, max(self.size, 1), step):
            part = self.matrix[start : start + step, : self.dim]
            yield part.astype(np.float32, copy=False)


def ranked_scores(rows: Rows, queries: FloatArray, wanted: Sequence[RowArray]) -> list[Candidates]:
    """Score `wanted[i]` for `queries[i]`: all of them, best first, ties to the lower row."""
    assert len(queries) == len(wanted), (len(queries), len(wanted))
    return [
        Candidates.ranked(found, rows.score(query, found), len(found)) if len(found) else _NONE
        for query, found in zip(queries, wanted, strict=True)
    ]


def query_blocks(count: int, rows: int) -> Iterator[slice]:
    """Slices of `count` queries, each small enough to hold its scores of `rows` rows."""
    step = max(1, BLOCK_SCORES // max(rows, 1))
    return (slice(start, start + step) for start in range(0, count, step))


def inverse_norms(matrix: StoredArray, dim: int) -> FloatArray:
    """1 / norm of each row's first `dim` columns: (N, D) in, (N,) float32 out, in bounded memory.

    A zero prefix gets 0, so that it scores 0 and is never favoured.
    """
    found = np.empty(len(matrix), dtype=np.float32)
    for start in range(0, len(matrix), NORM_CHUNK):
        part = matrix[start : start + NORM_CHUNK, :dim].astype(np.float32, copy=False)
        norms = np.linalg.norm(part, axis=1)
        safe = np.where(norms > NORM_EPSILON, norms, np.inf)
        found[start : start + NORM_CHUNK] = 1.0 / safe
    return found


def check_queries(queries: FloatArray, dim: int) -> FloatArray:
    """Queries as (n, dim) float32, contiguous. Raises InputError for a wrong shape, NaN or Inf."""
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InputError(
            "invalid_vector",
            f"query vectors must have the shape (n, {dim}), got {queries.shape}",
            param="vector",
            limit=dim,
        )
    if not np.isfinite(queries).all():
        raise InputError("invalid_vector", "a query vector holds NaN or Inf", param="vector")
    return np.ascontiguousarray(queries, dtype=np.float32)


_NONE = Candidates.none()

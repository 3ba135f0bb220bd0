"""Exhaustive search in numpy: the slow obvious version, and the oracle of every other backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hivlp.index.backends.rows import LevelRows, Rows, check_queries, ranked_scores
from hivlp.index.candidates import Candidates, RowArray, merged
from hivlp.index.level_index import Capabilities, SearchParams
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray

CAPABILITIES = Capabilities(
    methods=frozenset({"scan", "rescore"}),
    mask=True,
    entry_rows=False,
    max_k=None,
    exact=True,
    batch=False,
)
SLICE_NUMBERS = 16_000_000
"""Numbers scored between two pauses: 64 MB, or some 6 ms of reading memory."""
SPARSE = 8
"""Allowed rows are gathered where they are fewer than one in this many; else all are scanned."""


@dataclass(frozen=True, slots=True)
class ExactLevel:
    """A `LevelIndex` that scores every row; a nested level is a prefix of the shared rows."""

    level: int
    rows: LevelRows

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""
        return self.rows.dim

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.rows.size

    @property
    def capabilities(self) -> Capabilities:
        """Scan and re-score, any k."""
        return CAPABILITIES

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,  # noqa: ARG002  nothing to tune here
        entry_rows: Sequence[RowArray] | None,
        mask: RowMask | None,
    ) -> list[Candidates]:
        """The best min(k, allowed) rows of each query (n, dim), exactly. Raises InputError."""
        assert k >= 1, k
        assert entry_rows is None, "a scan has no entry rows"
        checked = check_queries(queries, self.dim)
        return [best_rows(self.rows, query, k, mask) for query in checked]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return ranked_scores(self.rows, check_queries(queries, self.dim), rows)


def best_rows(rows: Rows, query: FloatArray, k: int, mask: RowMask | None = None) -> Candidates:
    """The best min(k, allowed) rows for one query (dim,) float32, by exhaustive search."""
    if mask is None:
        every = np.arange(rows.size)
        return Candidates.ranked(every, rows.scan(query), k) if rows.size else Candidates.none()
    assert mask.size == rows.size, (mask.size, rows.size)
    allowed = mask.rows
    if not len(allowed):
        return Candidates.none()
    sparse = SPARSE * len(allowed) < rows.size
    scores = rows.score(query, allowed) if sparse else rows.scan(query)[allowed]
    return Candidates.ranked(allowed, scores, k)


def best_rows_in_turns(
    rows: LevelRows,
    query: FloatArray,
    k: int,
    between: Callable[[], None],
    mask: RowMask | None = None,
) -> Candidates:
    """As `best_rows`, a slice of rows at a time: `between` is called after each, and may wait."""
    assert mask is None or mask.size == rows.size, (mask.size, rows.size)
    step = max(1, SLICE_NUMBERS // rows.dim)
    best = Candidates.none()
    for start in range(0, rows.size, step):
        part = rows.part(slice(start, start + step))
        allowed = None if mask is None else RowMask.of(mask.allowed[start : start + step])
        found = best_rows(part, query, k, allowed)
        best = merged((best, Candidates(found.rows + start, found.scores)), k)
        between()
    return best

"""The contract of one searchable level. Read-only: nothing changes it once it is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hivlp.index.candidates import Candidates, RowArray
from hivlp.models.levels import FloatArray

Method = Literal["scan", "rescore", "graph"]


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Knobs of one search; they travel with the call and are never stored on the index.

    `ef` is the width of a graph's beam (None: the index's own default).
    """

    ef: int | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a level can do. `max_k` None means no limit of its own."""

    methods: frozenset[Method]
    mask: bool
    entry_rows: bool
    max_k: int | None


class LevelIndex(Protocol):
    """One level of one gallery side; rows 0..size-1 are the same in every level of a snapshot.

    Safe to call from several threads at once.
    """

    @property
    def level(self) -> int:
        """1 (coarsest) to L."""

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""

    @property
    def size(self) -> int:
        """Number of rows."""

    @property
    def capabilities(self) -> Capabilities:
        """What may be asked of it."""

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,
        entry_rows: Sequence[RowArray] | None,
    ) -> list[Candidates]:
        """The best min(k, size) rows for each of `queries` (n, dim) float32, normalised.

        `entry_rows`, one array a query, are where a graph begins; only for levels that declare it.
        """

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, ranked by this level."""

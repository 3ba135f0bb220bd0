"""The contract of one searchable level. Read-only: nothing changes it once it is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray

Method = Literal["scan", "rescore", "graph"]
Codec = Literal["flat", "sq8", "pq64x4fs", "rabitqfs"]
"""How a level's scanned codes are kept: fp32, one byte a number, four bits for some numbers
(product quantiser), or one bit a number and two factors a row (RaBitQ)."""
CODECS: tuple[Codec, ...] = ("flat", "sq8", "pq64x4fs", "rabitqfs")
FAST_SCAN: frozenset[Codec] = frozenset({"pq64x4fs", "rabitqfs"})
"""Codes that are scanned in registers, 32 rows at once: coarse, and they refuse a mask."""
MASKABLE: Codec = "sq8"
"""What is kept beside fast-scan codes for masked searches."""
Must = Literal["mask", "batch", "rebuild"]
"""What an index is for: masked searches (filters, deletions), many queries at once, being rebuilt
often."""
MUSTS: tuple[Must, ...] = ("mask", "batch", "rebuild")
Family = Literal["scan", "graph"]
"""How an index finds: level 1 scanned and the rest re-scored, or two graphs (and the scan too)."""
FAMILIES: tuple[Family, ...] = ("scan", "graph")
RowsType = Literal["fp32", "fp16"]
"""How rows are kept."""
ROWS_TYPES: tuple[RowsType, ...] = ("fp32", "fp16")


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Knobs of one search; they travel with the call and are never stored on the index.

    `ef` is the width of a graph's beam (None: the index's own default).
    """

    ef: int | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a level can do. `max_k` None means no limit of its own.

    `exact`: a search finds what exhaustive search of this level would. `batch`: many queries at
    once cost less than one by one. `mask` False: a search must not be given a mask.
    """

    methods: frozenset[Method]
    mask: bool
    entry_rows: bool
    max_k: int | None
    exact: bool
    batch: bool


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
        mask: RowMask | None,
    ) -> list[Candidates]:
        """The best min(k, rows allowed) rows for each of `queries` (n, dim) float32, normalised.

        `entry_rows`, one array a query, are where a graph begins; `mask` (None: every row) says
        which rows may be returned. Each only for levels that declare it. Scores are this level's
        own, by the project's kernel, whatever found the rows.
        """

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, ranked by this level."""

"""Which rows answer a query rightly: those of its own item, and of items of the same group."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hivlp.index.candidates import RowArray
from hivlp.index.snapshot.catalogue import id_hash


@dataclass(frozen=True, slots=True)
class Answers:
    """`rows` (N,) int64: the group of each row of a side; `wanted` (n,): the group of each query.

    -1 where a query has no right row but itself: it says nothing about retrieval.
    """

    rows: RowArray
    wanted: RowArray

    def rank(self, number: int, found: RowArray) -> float | None:
        """1-based rank of the first right row among those found for a query, inf without one.

        None for a query without right rows.
        """
        group = self.wanted[number]
        if group < 0:
            return None
        right = np.flatnonzero(self.rows[found] == group)
        return float(right[0]) + 1 if len(right) else float("inf")


def answers_for(
    ordinals: RowArray, row_items: RowArray, groups: RowArray, *, same_side: bool
) -> Answers | None:
    """The right rows of queries taken from the corpus itself; None where no query has one.

    `ordinals` (n,) are the queries' items, `row_items` (N,) those of the side's rows, `groups`
    (items,) their groups. `same_side`: each query is a row of this side, and no answer to itself.
    """
    rows, wanted = groups[row_items], groups[ordinals]
    counts = np.bincount(rows, minlength=int(max(rows.max(), wanted.max())) + 1)
    enough = counts[wanted] > (1 if same_side else 0)
    if not enough.any():
        return None
    return Answers(rows, np.where(enough, wanted, -1).astype(np.int64))


def item_groups(values: Iterable[Any] | None, count: int) -> RowArray:
    """(items,) int64: items of one number answer each other.

    `values` are the items' values of the grouping column; an item without one is a group of its
    own, and so is every item where there is no such column (None). Values are told apart by 64-bit
    hashes, so that a column of any size is passed over and not held.
    """
    own = np.arange(count, dtype=np.int64)
    if values is None:
        return own
    hashes, ordinals = array("Q"), array("q")
    for ordinal, value in enumerate(values):
        if value is not None:
            hashes.append(id_hash(repr(value)))
            ordinals.append(ordinal)
    if hashes:
        having = np.frombuffer(ordinals, dtype=np.int64)
        first, group = np.unique(hashes, return_index=True, return_inverse=True)[1:]
        own[having] = having[first][group]
    return own

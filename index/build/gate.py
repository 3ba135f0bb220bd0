"""What must hold before a version is published; each failure names the rows or items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from hivlp.index.backends.exact import best_rows
from hivlp.index.backends.rows import StoredArray
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.cells import far_times, reason_of, values_of
from hivlp.index.build.seen import SeenHashes
from hivlp.index.build.spool import Items
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError
from hivlp.index.level_index import LevelIndex, SearchParams
from hivlp.index.snapshot.catalogue import ID, NO_VALUE, id_hash

NORM_TOLERANCE = 1e-3
SCORE_TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-3
"""The same for rows kept as fp16: their norms differ, so that a near one may score a little more"""
SELF_SAMPLE = 200
LOSSY_MISSES = 0.1
NAMED = 5
CHUNK = 65_536


class Ids(Protocol):
    """The ids of items, by ordinal."""

    def __getitem__(self, ordinal: int, /) -> str: ...


class ItemIds:
    """The ids of items that are on disk: each is looked for when an error must name it."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __getitem__(self, ordinal: int, /) -> str:
        return next(islice(iter(self._items), ordinal, None)).id


def check_items(items: Items) -> None:
    """Ids are unique; 8 bytes an item. Raises BuildError naming an id and both its places."""
    seen = SeenHashes()
    for ordinal, item in enumerate(items):
        if not seen.add(id_hash(item.id)):
            continue
        earlier = enumerate(islice(iter(items), ordinal))
        first = next((number for number, other in earlier if other.id == item.id), None)
        if first is not None:  # else two ids of one hash
            raise BuildError(f"id {item.id!r} is there twice: items {first} and {ordinal}, from 0")


def check_side(side: BuiltSide, items: Items) -> None:
    """Counts agree, all numbers are finite, rows have unit length. Raises BuildError."""
    for level, rows in side.rows.items():
        where = f"{side.modality} level {level}"
        if rows.size != side.size:
            raise BuildError(f"{where}: {rows.size} rows for {side.size} entries of the item map")
        check_rows(rows.matrix, side.row_items, ItemIds(items), where)


def check_rows(matrix: StoredArray, row_items: RowArray, ids: Ids, where: str) -> None:
    """Raises BuildError naming rows (N, D) that hold NaN or Inf, or are not of unit length."""
    for start in range(0, len(matrix), CHUNK):
        norms = np.linalg.norm(matrix[start : start + CHUNK].astype(np.float32, copy=False), axis=1)
        for reason, bad in (
            ("NaN or Inf", ~np.isfinite(norms)),
            ("not of unit length", np.abs(norms - 1) > NORM_TOLERANCE),
        ):
            if bad.any():
                rows = (np.flatnonzero(bad) + start).tolist()
                raise BuildError(f"{where}: {reason} in {_named(rows, row_items, ids)}")


def check_metadata(table: Any, rng: np.random.Generator) -> None:
    """Items as they were written can be read again: all their times, and all of a sample of rows.

    Raises BuildError naming the column and an item.
    """
    for name in table.column_names:
        first = 0
        for chunk in table.column(name).chunks if pa.types.is_temporal(table[name].type) else ():
            far = np.flatnonzero(far_times(chunk))
            if len(far):
                raise BuildError(f"column {name!r}: {_item(table, first + int(far[0]))} has a time "
                                 "outside of the years 1 to 9999")  # fmt: skip
            first += len(chunk)
    count = min(SELF_SAMPLE, table.num_rows)
    for row in np.sort(rng.choice(table.num_rows, count, replace=False)).tolist():
        for name in table.column_names:
            try:
                table.column(name)[row].as_py()
            except NO_VALUE as error:
                raise BuildError(
                    f"column {name!r}: {_item(table, row)}: {reason_of(error)}"
                ) from error


def _item(table: Any, row: int) -> str:
    return f"row {row} (item {values_of(table.column(ID).slice(row, 1))[0][0]!r})"


def check_self_retrieval(
    side: BuiltSide,
    opened: Mapping[int, LevelIndex],
    ids: Ids,
    rng: np.random.Generator,
) -> float:
    """A sample of rows finds itself, or an equal, at the top of every level as it was written.

    Lossy codes may lose a tenth of them. Returns the number of rows tried. Raises BuildError.
    """
    count = min(SELF_SAMPLE, side.size)
    sample = np.sort(rng.choice(side.size, count, replace=False)).astype(np.int64)
    for level, index in opened.items():
        rows = side.rows[level]
        queries = rows.vectors(sample)
        found = index.search(queries, 1, SearchParams(), None, None)
        top = np.array([candidates.scores[0] for candidates in found])
        own = np.array([rows.score(q, sample[i : i + 1])[0] for i, q in enumerate(queries)])
        oracle = np.array([best_rows(rows, q, 1).scores[0] for q in queries[:NAMED]])
        half = rows.matrix.dtype == np.float16
        bad = np.abs(top - own) > (HALF_TOLERANCE if half else SCORE_TOLERANCE)
        bad[: len(oracle)] |= np.abs(top[: len(oracle)] - oracle) > SCORE_TOLERANCE
        allowed = 0.0 if index.capabilities.exact else LOSSY_MISSES * count
        if bad.sum() > allowed:
            named = _named(sample[bad].tolist(), side.row_items, ids)
            raise BuildError(f"{side.modality} level {level}: {named} do not find themselves")
    return float(count)


def _named(rows: Sequence[int], row_items: RowArray, ids: Ids) -> str:
    some = ", ".join(f"row {row} (item {ids[int(row_items[row])]!r})" for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return some + more

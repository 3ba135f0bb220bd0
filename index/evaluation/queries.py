"""The queries of an evaluation: captions and pictures of the version's own items, encoded.

Notable: a query is known by its item's id, a caption by that and its place among the item's
captions (`391895#2`), so that two versions that hold the same items can be compared query by query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet, image_queries, text_queries
from hivlp.index.build.vectors.queries import vector_queries
from hivlp.index.candidates import RowArray
from hivlp.index.errors import PlanError
from hivlp.index.filters import parse_filter
from hivlp.index.snapshot.catalogue import IMAGE
from hivlp.index.snapshot.side import Side
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.levels import Modality

SEED = 11
CHUNK = 1_024
"""Queries that are encoded and measured together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Queries and the row each one is in its own modality's side."""

    queries: QuerySet
    own_rows: RowArray


def sample_queries(
    snapshot: Snapshot, model: Model, limit: int, seed: int = SEED
) -> tuple[dict[Modality, Sampled], int]:
    """Up to `limit` captions and pictures of the snapshot, encoded through every exit; where
    vectors were imported and `model` encodes nothing, rows as they are.

    Besides, how many of the pictures could not be read.
    """
    rng = np.random.default_rng(seed)
    found: dict[Modality, Sampled] = {}
    unread = 0
    for side in snapshot.sides.values():
        rows = _sampled(model, side, findable(snapshot, side), limit, rng)
        sampled = encoded(snapshot, model, side, rows)
        if side.modality == "image" and model.image is not None:
            unread = len(rows) - (0 if sampled is None else len(sampled.queries))
        if sampled is not None:
            found[side.modality] = sampled
    return found, unread


def query_rows(
    snapshot: Snapshot, model: Model, only: object | None, limit: int | None, seed: int = SEED
) -> dict[Modality, RowArray]:
    """Rows of each side that are queries, ascending: at most `limit` of each (None: all); of a
    version without changes.

    `only` is a filter as a search takes it: queries are rows of the items it allows. Raises
    FilterError, and PlanError where it allows none.
    """
    rng = np.random.default_rng(seed)
    found: dict[Modality, RowArray] = {}
    for side in snapshot.sides.values():
        rows = np.arange(side.size, dtype=np.int64)
        if only is not None:
            allowed = snapshot.filters.rows(parse_filter(only), side.modality, side.row_items)
            rows = rows[allowed.allowed[rows]]
        found[side.modality] = _sampled(model, side, rows, limit, rng)
    if only is not None and not any(len(rows) for rows in found.values()):
        raise PlanError("no item of the index is allowed by it", param="queries")
    return found


def findable(snapshot: Snapshot, side: Side) -> RowArray:
    """Rows of a side that are neither deleted nor replaced, ascending."""
    alive = None if snapshot.delta is None else snapshot.delta.alive(side.modality)
    return np.arange(side.size, dtype=np.int64) if alive is None else alive.rows


def _sampled(
    model: Model,
    side: Side,
    rows: RowArray,
    limit: int | None,
    rng: np.random.Generator,
) -> RowArray:
    """At most `limit` of some rows, ascending; of captions only those that aren't blank."""
    if limit is not None:
        rows = rows[np.sort(rng.choice(len(rows), min(limit, len(rows)), replace=False))]
    if side.modality == "text" and model.encodes and len(rows):
        rows = rows[[bool(side.texts[row].as_py().strip()) for row in rows.tolist()]]
    return rows


def chunks(rows: RowArray) -> Iterator[RowArray]:
    """The rows, so many at a time as are measured together."""
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))


def encoded(snapshot: Snapshot, model: Model, side: Side, rows: RowArray) -> Sampled | None:
    """Some rows of a side as queries, pictures that can't be read left out; None without any."""
    ordinals = side.row_items[rows].tolist()
    queries = _query_set(snapshot, model, side, rows, ordinals)
    if queries is None:
        return None
    own = rows
    if side.modality == "image":  # one row an item; unreadable pictures dropped out
        own = np.searchsorted(side.row_items, queries.ordinals)
    return Sampled(queries, own.astype(np.int64))


def query_ids(snapshot: Snapshot, side: Side, rows: RowArray) -> list[str]:
    """What queries are called that are given rows of a side."""
    ordinals = side.row_items[rows]
    ids = snapshot.catalogue.ids(ordinals)
    if side.modality == "image":
        return ids
    places = rows - np.searchsorted(side.row_items, ordinals)
    return [f"{item}#{place}" for item, place in zip(ids, places.tolist(), strict=True)]


def _query_set(
    snapshot: Snapshot, model: Model, side: Side, rows: RowArray, ordinals: Sequence[int]
) -> QuerySet | None:
    if not model.encodes:
        finest = side.rows[max(side.rows)].vectors(rows)
        return vector_queries(finest, snapshot.manifest.specs, rows, from_corpus=True)
    if side.modality == "text":
        return text_queries(model, [side.texts[int(row)].as_py() for row in rows], ordinals)
    images = snapshot.catalogue.table.column(IMAGE)
    refs = [images[ordinal].as_py() or "" for ordinal in ordinals]
    roots = picture_roots(snapshot.path.parent, snapshot.manifest.corpus.root)
    return image_queries(model, roots, refs, ordinals)

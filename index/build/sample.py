"""A sample of a corpus's own pictures and captions, taken from what was written of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet, image_queries, text_queries
from hivlp.index.candidates import RowArray
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import IMAGE, open_table
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.levels import Modality


def sample_queries(
    folder: Path,
    sides: Mapping[Modality, BuiltSide],
    roots: PictureRoots,
    model: Model,
    limit: int,
    rng: np.random.Generator,
) -> Mapping[Modality, QuerySet]:
    """Up to `limit` pictures and as many captions of a version being built, fully encoded.

    One of several equals only: the halves of the sample must not share a query. In the corpus's
    order, since neighbours of a table are read together; 24 bytes a row while it is drawn.
    """
    images = open_table(folder / layout.ITEMS).column(IMAGE)
    refs: list[str] = []
    texts: list[str] = []
    ordinals: dict[Modality, RowArray] = {}
    for side in layout.SIDES:
        built = sides.get(side)
        rows = np.zeros(0, dtype=np.int64) if built is None else _different(built, side, images)
        count = min(limit, len(rows))
        places = np.sort(rng.choice(max(len(rows), 1), count, replace=False))
        if built is None:
            continue
        chosen = rows[places]
        ordinals[side] = built.row_items[chosen]
        if side == "image":
            refs = [images[int(ordinal)].as_py() for ordinal in ordinals[side]]
        else:
            stored = open_table(folder / layout.TEXTS).column("text")
            texts = [stored[int(row)].as_py() for row in chosen]
    found: dict[Modality, QuerySet | None] = {}
    if refs:
        found["image"] = image_queries(model, roots, refs, ordinals["image"].tolist())
    if texts:
        found["text"] = text_queries(model, texts, ordinals["text"].tolist())
    return {query: queries for query, queries in found.items() if queries is not None}


def _different(built: BuiltSide, side: Modality, images: Any) -> RowArray:
    """The first row of every content, ascending; of pictures, only those with a reference."""
    if side == "text" or not images.null_count:
        first: RowArray = np.unique(built.contents, return_index=True)[1]
        first.sort()
        return first
    rows = np.flatnonzero(images.is_valid().to_numpy()[built.row_items])
    return np.sort(rows[np.unique(built.contents[rows], return_index=True)[1]])

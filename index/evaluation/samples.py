"""Some queries and what the cascade answered them with, right and wrong: to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from hivlp.index.build.encode import LIMITS
from hivlp.index.build.model import Model
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import CorpusError
from hivlp.index.evaluation.figures import CROSS
from hivlp.index.evaluation.queries import SEED, encoded
from hivlp.index.evaluation.reranked import CASCADE
from hivlp.index.evaluation.tally import Tally
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.uploads import PictureRoots, picture_roots
from hivlp.models.errors import ImageError
from hivlp.models.levels import Modality
from hivlp.models.runtime.images import decode_image

EACH = 4
"""Queries that were answered rightly, and as many that were not."""
HITS = 6
SIDE = 176
"""Pixels of a thumbnail's longer side."""
QUALITY = 80


@dataclass(frozen=True, slots=True)
class Shown:
    """An item: its id, its text where that is shown, and its picture as a data URI, or None."""

    id: str
    text: str | None
    picture: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One query, where its right answer stood (None: the cascade did not find it), and the first
    rows found, each with whether it is right.
    """

    query: Modality
    searched: Modality
    asked: Shown
    rank: int | None
    hits: tuple[tuple[Shown, bool], ...]


def samples(
    searcher: LocalSearcher, model: Model, tallies: Sequence[Tally], groups: RowArray
) -> list[Sample]:
    """EACH right and EACH wrong answers of both cross-modal directions; `groups` (items,)."""
    shower = _Shower(searcher)
    return [
        sample
        for tally in tallies
        if (tally.query, tally.searched) in CROSS
        for sample in _of(tally, searcher, model, groups, shower)
    ]


def picked(ranks: np.ndarray) -> RowArray:
    """Numbers of queries to show: some of rank 1, then some of worse ones."""
    rng = np.random.default_rng(SEED)
    right, wrong = np.flatnonzero(ranks == 1), np.flatnonzero(ranks > 1)
    each = [np.sort(rng.permutation(some)[:EACH]) for some in (right, wrong)]
    return np.concatenate(each).astype(np.int64)


def _of(
    tally: Tally, searcher: LocalSearcher, model: Model, groups: RowArray, shower: _Shower
) -> Iterator[Sample]:
    snapshot = searcher.snapshot
    ranks = tally.systems[CASCADE].ranks
    chosen = picked(ranks)
    asking = snapshot.sides[tally.query]
    plan = searcher.plan(PlanRequest(tally.searched, tally.query, HITS, "cascade"))
    for number in chosen.tolist():
        row = tally.rows_asked[number : number + 1]
        sampled = encoded(snapshot, model, asking, row)
        if sampled is None:
            continue
        (found,) = run_plan(searcher, tally.searched, plan, sampled.queries.outputs)
        item = int(asking.row_items[row[0]])
        rank = None if np.isinf(ranks[number]) else int(ranks[number])
        hits = tuple(shower.hits(tally.searched, found, groups, int(groups[item])))
        yield Sample(tally.query, tally.searched, shower.asked(tally.query, row[0]), rank, hits)


class _Shower:
    """Makes items of a version fit to look at."""

    def __init__(self, searcher: LocalSearcher) -> None:
        self._searcher = searcher
        snapshot = searcher.snapshot
        self._roots = picture_roots(snapshot.path.parent, snapshot.manifest.corpus.root)

    def asked(self, query: Modality, row: int) -> Shown:
        """A query: a caption alone, or a picture alone."""
        side = self._searcher.snapshot.sides[query]
        (own,) = self._searcher.snapshot.catalogue.ids(side.row_items[[row]])
        if query == "text":
            return Shown(own, self._searcher.text("text", int(row)), None)
        return Shown(own, None, self._picture(own))

    def hits(
        self, searched: Modality, found: Candidates, groups: RowArray, group: int
    ) -> Iterator[tuple[Shown, bool]]:
        """The first rows found, as ranks count them, and whether each is right."""
        rows = found.rows[:HITS]
        ordinals = self._searcher.ordinals(searched, rows)
        ids = self._searcher.snapshot.catalogue.ids(ordinals)
        for own, row, ordinal in zip(ids, rows.tolist(), ordinals.tolist(), strict=True):
            picture = self._picture(own) if searched == "image" else None
            right = bool(groups[ordinal] == group)
            yield Shown(own, self._searcher.text(searched, row), picture), right

    def _picture(self, item: str) -> str | None:
        reference = self._searcher.snapshot.catalogue.image_ref(item)
        return None if reference is None else thumbnail(self._roots, reference)


def thumbnail(roots: PictureRoots, reference: str) -> str | None:
    """A small JPEG of a picture as a data URI; None where it can't be had."""
    try:
        pixels = decode_image(roots.read(reference), LIMITS)
    except (CorpusError, ImageError):
        return None
    small = Image.fromarray(pixels)
    small.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"

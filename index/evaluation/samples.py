"""Some queries and what the cascade answered them with, right and wrong: to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from hivlp.index.build.encode import LIMITS
from hivlp.index.build.model import Model
from hivlp.index.build.widths import ROUNDING
from hivlp.index.candidates import RowArray
from hivlp.index.errors import CorpusError
from hivlp.index.evaluation.evaluate import Evaluation
from hivlp.index.evaluation.figures import CROSS
from hivlp.index.evaluation.measure import Measurer
from hivlp.index.evaluation.queries import SEED, Sampled, encoded
from hivlp.index.evaluation.reranked import CASCADE
from hivlp.index.evaluation.tally import Tally
from hivlp.index.local_searcher import LocalSearcher
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


def samples(evaluation: Evaluation, model: Model) -> list[Sample]:
    """EACH right and EACH wrong answers of both cross-modal directions, found again."""
    again = _Again(evaluation, model)
    return [
        sample
        for tally in evaluation.tallies
        if tally.direction in CROSS
        for sample in again.some(tally)
    ]


def picked(ranks: np.ndarray) -> RowArray:
    """Numbers of queries to show: some of rank 1, then some of worse ones."""
    rng = np.random.default_rng(SEED)
    right, wrong = np.flatnonzero(ranks == 1), np.flatnonzero(ranks > 1)
    each = [np.sort(rng.permutation(some)[:EACH]) for some in (right, wrong)]
    return np.concatenate(each).astype(np.int64)


class _Again:
    """Asks queries again as they were measured: by the same plan, in the same fold."""

    def __init__(self, evaluation: Evaluation, model: Model) -> None:
        self._groups, self._model = evaluation.groups, model
        self._snapshot = evaluation.searcher.snapshot
        self._measurers = lru_cache(maxsize=1)(evaluation.measurers)
        self._shower = _Shower(evaluation.searcher)

    def some(self, tally: Tally) -> Iterator[Sample]:
        """Queries of one direction, and what the cascade answers them with."""
        ranks, folds = tally.systems[CASCADE].ranks, tally.folds
        side = self._snapshot.sides[tally.query]
        for number in picked(ranks).tolist():
            row = tally.rows_asked[number : number + 1]
            sampled = encoded(self._snapshot, self._model, side, row)
            if sampled is not None:
                measurer = self._measurers(int(folds[number]))[tally.direction]
                group = int(self._groups[side.row_items[row[0]]])
                rows = first_rows(measurer, sampled, group)
                asked = self._shower.asked(tally.query, int(row[0]))
                hits = tuple(self._shower.hits(tally.searched, rows, self._groups, group))
                rank = None if np.isinf(ranks[number]) else int(ranks[number])
                yield Sample(*tally.direction, asked, rank, hits)


def first_rows(measurer: Measurer, sampled: Sampled, group: int) -> RowArray:
    """The first rows that the cascade finds for one query, as ranks count them: of what scores the
    same, what is right stands last.
    """
    gallery = measurer.gallery
    (found,) = gallery.trace(measurer.plans[CASCADE], sampled.queries.outputs)[-1]
    right = gallery.groups[found.rows] == group
    counted = found.scores - np.float32(ROUNDING) * right
    order = np.lexsort((found.rows, right, -counted))[:HITS]
    first: RowArray = found.rows[order] + gallery.first
    return first


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
        self, searched: Modality, rows: RowArray, groups: RowArray, group: int
    ) -> Iterator[tuple[Shown, bool]]:
        """Some rows, and whether each is right."""
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

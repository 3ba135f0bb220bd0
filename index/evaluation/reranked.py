"""What a re-ranker makes of the cascade's answers: ranks of the same queries, measured anew.

The first rows that the cascade found, as wide as a re-ranked search runs it, are scored again by
the same code that serves such searches; the rest stay behind them. So R@K after re-ranking is
capped by what that cascade found: its widths stand in the report. Notable: ties count against here
too. A right row enters the re-ranked part behind wrong ones of its score, and stands in it behind
wrong ones of its probability; what could not be compared counts as tied at the end. Of texts every
caption is scored, not the best of an item: that is how captions are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hivlp.index.build.encode import LIMITS
from hivlp.index.candidates import RowArray
from hivlp.index.cascade import PlanName
from hivlp.index.errors import BuildError
from hivlp.index.evaluation.measure import Head, Measured, Scored
from hivlp.index.evaluation.plain import BoolArray
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.reranking import PairMeans, rerank
from hivlp.index.searcher import FoundItem
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.encoder import RgbImage
from hivlp.models.levels import Modality
from hivlp.models.reranker import Reranker
from hivlp.models.runtime.images import decode_image

CASCADE: PlanName = "cascade"
RERANKED = "cascade, re-ranked"


class Reranking:
    """Re-ranks blocks of measured queries; `groups` (items,) tell right rows."""

    def __init__(
        self,
        searcher: LocalSearcher,
        reranker: Reranker,
        groups: RowArray,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        """`step` is called once a query."""
        snapshot = searcher.snapshot
        if reranker.fits != snapshot.manifest.gallery_space:
            raise BuildError("rerank: the re-ranker belongs to a model of another space")
        roots = picture_roots(snapshot.path.parent, snapshot.manifest.corpus.root)
        self._means = PairMeans(searcher, reranker, roots.read)
        self._searcher = searcher
        self._groups = groups
        self._step = step

    def scored(self, measured: Measured, query: Modality, searched: Modality) -> Scored:
        """Ranks of a block of queries after re-ranking; ANN recall says nothing of it: NaN."""
        head = measured.head
        assert head is not None, "measured with a depth"
        ranks = head.ranks.copy()
        right = self._right(measured.items, head, searched)
        for i, given in enumerate(self._queries(measured.rows, query)):
            rows = head.rows[i][head.rows[i] >= 0]
            wanted = right[i][: len(rows)]
            if wanted.any():
                ranks[i] = self._rank(given, rows, wanted, searched)
            self._step()
        return Scored(ranks, np.full(len(ranks), np.nan))

    def _right(self, items: RowArray, head: Head, searched: Modality) -> BoolArray:
        """(n, depth): which rows of the head are right; the query itself is not among them."""
        row_items = self._searcher.snapshot.sides[searched].row_items
        groups = self._groups[row_items[np.maximum(head.rows, 0)]]
        found: BoolArray = (groups == self._groups[items][:, None]) & (head.rows >= 0)
        return found

    def _rank(
        self, given: str | RgbImage, rows: RowArray, right: BoolArray, searched: Modality
    ) -> float:
        ids = self._searcher.snapshot.catalogue.ids(self._searcher.ordinals(searched, rows))
        items = [
            FoundItem(item, row, 0.0, self._searcher.text(searched, row))
            for item, row in zip(ids, rows.tolist(), strict=True)
        ]
        matches = rerank(given, items, self._means).matches
        scores = np.array([matches.get(row, -1.0) for row in rows.tolist()])
        return 1.0 + float(np.count_nonzero(scores[~right] >= scores[right].max()))

    def _queries(self, rows: RowArray, query: Modality) -> Iterator[str | RgbImage]:
        """The queries of given rows, as the re-ranker takes them."""
        snapshot = self._searcher.snapshot
        side = snapshot.sides[query]
        if query == "text":
            for row in rows.tolist():
                yield str(side.texts[row].as_py())
            return
        for item in snapshot.catalogue.ids(side.row_items[rows]):
            reference = snapshot.catalogue.image_ref(item)
            assert reference is not None, "its picture was read a moment ago"
            yield decode_image(self._means.read(reference), LIMITS)


def with_reranked(measured: Measured, scored: Scored) -> Measured:
    """The block with one system more, after the cascade."""
    systems: dict[str, Scored] = {}
    for name, own in measured.systems.items():
        systems[name] = own
        if name == CASCADE:
            systems[RERANKED] = scored
    return measured.with_systems(systems)

"""Re-ranking in the service: the first hits scored again, within the deadline or not at all.

The first `rerank_k` items, from the very first hit on, are sorted by the re-ranker; what was found
behind them follows as it was found. So pages of one query fit together whatever `offset` is, as
long as `rerank_k` stays the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hivlp.index.reranking import PairMeans, check_pair, rerank
from hivlp.index.searcher import FoundItem
from hivlp.models.errors import ArtifactError, DeadlinePassed, InputError
from hivlp.models.levels import Modality
from hivlp.models.reranker import Reranker
from hivlp.service.errors import not_available
from hivlp.service.overlap import Found
from hivlp.service.queries import MODALITIES, Opened, Query, Setting
from hivlp.service.schemas import SearchOptions

log = logging.getLogger("hivlp.service")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Items in the order of the answer; `matches` by row of those that were compared.

    `degraded`: not all that were to be could be, or none, for want of time or by a failure.
    """

    items: Sequence[FoundItem]
    matches: Mapping[int, float] = field(default_factory=dict)
    degraded: bool = False


def reranker_of(query: Query, options: SearchOptions, setting: Setting) -> Reranker | None:
    """What sorts the answer, or None where nothing was asked for.

    Raises InputError where it can't be, before anything is searched: no re-ranker, or no pair of a
    text and a picture.
    """
    if not options.rerank:
        return None
    sides: dict[str, Modality] = {side: side for side in MODALITIES}
    if query.kind not in sides:
        message = f"rerank: a search by {query.kind} has no text or picture to compare with"
        raise InputError("invalid_plan", message, param="rerank")
    if setting.model.reranker is None:
        raise not_available("rerank", f"the model {setting.model.name!r} has no re-ranker")
    check_pair(sides[query.kind], options.modality)
    return setting.model.reranker


def items_needed(options: SearchOptions) -> int:
    """How many items a plan must find; given widths may find fewer than could be re-ranked."""
    end = options.offset + options.k
    return max(end, options.rerank_k) if options.rerank and not options.cascade else end


def reranked(
    reranker: Reranker, options: SearchOptions, setting: Setting, opened: Opened, found: Found
) -> Ranking:
    """The page of an answer whose first `rerank_k` items were sorted by the re-ranker.

    As it was found where the deadline comes first, or the re-ranker fails. A page that begins
    behind those items needs no re-ranker: it is as it was found, whatever their order would be.
    """
    end = options.offset + options.k
    if options.offset >= options.rerank_k:
        found_there = setting.searcher.items(
            options.modality, found.candidates, options.k, options.offset
        )
        return Ranking(found_there)
    wanted = max(end, options.rerank_k)
    items = setting.searcher.items(options.modality, found.candidates, wanted, 0)
    ranking = _sorted(reranker, items, options, setting, opened)
    return replace(ranking, items=ranking.items[options.offset : end])


def _sorted(
    reranker: Reranker,
    items: Sequence[FoundItem],
    options: SearchOptions,
    setting: Setting,
    opened: Opened,
) -> Ranking:
    head, tail = items[: options.rerank_k], items[options.rerank_k :]
    content = opened.content
    assert content is not None, "reranker_of lets texts and pictures through"
    means = PairMeans(setting.searcher, reranker, setting.pictures.read)
    with setting.timeline.measure("rerank", None, len(head)) as span:
        try:
            found = rerank(content, head, means, until=_deadline(setting))
        except (DeadlinePassed, ArtifactError) as error:
            if isinstance(error, ArtifactError):  # a device out of memory, say
                log.error("re-ranking failed, answered as found: %s", error)
            span.candidates_out = 0
            return Ranking(items, degraded=True)
        span.candidates_out = len(found.matches)
    return Ranking((*found.items, *tail), found.matches, not found.complete)


def _deadline(setting: Setting) -> float:
    """When re-ranking must be done, in seconds of `time.perf_counter`."""
    own = time.perf_counter() + setting.limits.max_rerank_ms / 1e3
    return own if setting.due_s is None else min(own, setting.due_s)

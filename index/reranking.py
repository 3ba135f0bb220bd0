"""Re-ranking: the best items of a search, scored again by the cross-modal encoder.

    means = PairMeans(searcher, reranker, roots.read)
    ranked = rerank("a red heart", items, means, until=time.perf_counter() + 0.5)

A text is compared with pictures, a picture with the captions that matched it. A picture's states
come from the version where it keeps them for this re-ranker; else its file is read and encoded.
What can't be compared (an item without a picture, or whose file is gone) stays in its old order,
behind everything that could.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.index.build.encode import LIMITS
from hivlp.index.errors import CorpusError, PlanError
from hivlp.index.searcher import FoundItem, Searcher
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import DeadlinePassed, ImageError, TextError
from hivlp.models.levels import Modality
from hivlp.models.reranker import Reranker, TextStates
from hivlp.models.runtime.images import decode_image


@dataclass(frozen=True, slots=True)
class PairMeans:
    """What pairs are made of and scored with; `read` gives a picture's bytes by its reference.

    `read` raises CorpusError for a picture that is gone.
    """

    searcher: Searcher
    reranker: Reranker
    read: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Reranked:
    """Items, best match first; `matches` are the probabilities of those that have one, by row."""

    items: tuple[FoundItem, ...]
    matches: Mapping[int, float]

    @property
    def complete(self) -> bool:
        """Whether every item could be compared."""
        return len(self.matches) == len(self.items)


def check_pair(query: Modality, searched: Modality) -> None:
    """Raises PlanError unless one is a text and the other a picture."""
    if query == searched:
        message = (
            f"rerank: pairs of a text and a picture are compared, and {searched}s are searched "
            f"with a{'n' if query == 'image' else ''} {query}"
        )
        raise PlanError(message, param="rerank")


def rerank(
    query: str | RgbImage,
    items: Sequence[FoundItem],
    means: PairMeans,
    *,
    until: float | None = None,
) -> Reranked:
    """Score items against a text (items are pictures) or a picture (items are captions).

    `until` is a time of `time.perf_counter`: work that isn't done by then raises DeadlinePassed.
    """
    if isinstance(query, str):
        places, found = _with_pictures(query, items, means, until)
    else:
        places, found = _with_texts(query, items, means.reranker, until)
    matches = {items[p].row: float(value) for p, value in zip(places, found, strict=True)}
    order = [places[i] for i in np.argsort(-found, kind="stable")]
    compared = set(places)
    order += [place for place in range(len(items)) if place not in compared]
    return Reranked(tuple(items[place] for place in order), matches)


def _with_pictures(
    query: str, items: Sequence[FoundItem], means: PairMeans, until: float | None
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Places of the items that could be compared with a text, and their probabilities."""
    states = dict(_kept(items, means))
    missing = [place for place in range(len(items)) if place not in states]
    pictures = dict(_pictures(items, missing, means, until))
    if pictures:
        encoded = means.reranker.image_states(list(pictures.values()), until=until)
        states |= zip(pictures, encoded, strict=True)
    if not states:
        return [], np.empty(0, np.float32)
    places = sorted(states)
    texts = means.reranker.text_states([query], until=until)
    images = np.stack([states[place] for place in places]).astype(np.float32, copy=False)
    return places, means.reranker.match(texts, images, until=until)


def _kept(
    items: Sequence[FoundItem], means: PairMeans
) -> Iterable[tuple[int, npt.NDArray[np.float16]]]:
    """Places of items whose states the version keeps for this re-ranker, and the states."""
    rows = np.array([item.row for item in items], np.int64)
    stored = means.searcher.stored_states(rows)
    if stored is None or stored.space != means.reranker.states_space:
        return ()
    return zip(np.flatnonzero(stored.known).tolist(), stored.states, strict=True)


def _pictures(
    items: Sequence[FoundItem], places: Iterable[int], means: PairMeans, until: float | None
) -> Iterable[tuple[int, RgbImage]]:
    """The pictures of some items, decoded; those that can't be had are left out."""
    for place in places:
        if until is not None and time.perf_counter() > until:
            raise DeadlinePassed("the time was up while pictures were read")
        reference = means.searcher.image_ref(items[place].id)
        if reference is None:
            continue
        try:
            yield place, decode_image(means.read(reference), LIMITS)
        except (CorpusError, ImageError):
            continue


def _with_texts(
    query: RgbImage, items: Sequence[FoundItem], reranker: Reranker, until: float | None
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Places of the items whose text could be compared with a picture, and their probabilities."""
    places = list(range(len(items)))
    texts = [item.text or "" for item in items]
    try:
        states = reranker.text_states(texts, until=until)
    except TextError:  # of vectors that were imported with whatever stood beside them
        places = [p for p in places if _is_encodable(texts[p], reranker, until)]
        states = reranker.text_states([texts[p] for p in places], until=until)
    if not places:
        return [], np.empty(0, np.float32)
    image = reranker.image_states([query], until=until)
    return places, reranker.match(states, image, until=until)


def _is_encodable(text: str, reranker: Reranker, until: float | None) -> bool:
    try:
        states: TextStates = reranker.text_states([text], until=until)
    except TextError:
        return False
    return len(states) == 1

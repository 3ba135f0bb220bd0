"""Stored queries that a version must answer rightly before it may be served, by its own model."""

from __future__ import annotations

from collections.abc import Sequence

from hivlp.index.snapshot.activation_files import Canary
from hivlp.models.errors import HivlpError
from hivlp.models.stopping import go_on
from hivlp.service.queries import ItemQuery, Query, Setting, text_query
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import Limits
from hivlp.service.timeline import Timeline
from hivlp.service.work import find

SHOWN = 10
"""Ids that the reason of a failure names at most."""


class CanaryFailed(HivlpError):
    """A version that doesn't find what it must; the message says which query, and what it found."""

    def __init__(self, place: int, canary: Canary, found: str) -> None:
        super().__init__(f"canary {place}, {canary.what}: {found}")


def check_canaries(served: ServedVersion, canaries: Sequence[Canary], limits: Limits) -> None:
    """Run every canary on a version. Blocking.

    Raises CanaryFailed for the first that fails, Stopped.
    """
    for place, canary in enumerate(canaries):
        go_on()
        try:
            ids = _found(served, canary, limits)
        except HivlpError as error:  # no such item, no encoder, nothing on that side
            raise CanaryFailed(place, canary, str(error)) from error
        expected = set(canary.expected)
        right = len(expected.intersection(ids))
        if right < canary.needed:
            raise CanaryFailed(
                place,
                canary,
                f"{right} of {len(expected)} expected ids among {canary.k} hits, "
                f"{canary.needed} needed; found {', '.join(ids[:SHOWN]) or 'nothing'}",
            )


def _found(served: ServedVersion, canary: Canary, limits: Limits) -> list[str]:
    query: Query = (
        text_query(str(canary.query), limits) if canary.id is None else ItemQuery(canary.id)
    )
    options = SearchOptions(k=canary.k, modality=canary.modality, with_metadata=False)
    setting = Setting(
        served.searcher, served.model, canary.modality, limits, Timeline(), served.pictures
    )
    return [hit["id"] for hit in find(query, options, setting, None)["hits"]]

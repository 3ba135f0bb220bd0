"""The searcher of an opened snapshot: over its levels, and over its changes where it has any."""

from __future__ import annotations

from hivlp.index.amended_searcher import AmendedSearcher
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot.snapshot import Snapshot


def open_searcher(
    snapshot: Snapshot, query_encoder: str | None = None
) -> LocalSearcher | AmendedSearcher:
    """A searcher that owns the snapshot; `query_encoder` is that of the model that will query."""
    if snapshot.delta is None:
        return LocalSearcher(snapshot, query_encoder)
    return AmendedSearcher(snapshot, snapshot.delta, query_encoder)

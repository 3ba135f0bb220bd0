"""GET /indexes...: what is served, and the versions there are of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from hivlp.service.answers import IndexList, SnapshotList
from hivlp.service.openapi import ERRORS
from hivlp.service.responses import json_response
from hivlp.service.serving import Catalogue
from hivlp.service.state import state_of

NO_ROWS = np.empty(0, np.int64)
router = APIRouter(prefix="/indexes", tags=["indexes"], responses=ERRORS)


@router.get("", response_model=None, responses={200: {"model": IndexList}})
async def indexes(request: Request) -> Response:
    """Every index served here, with the version being searched."""
    catalogue = state_of(request).catalogue
    found = [describe_index(catalogue, name) for name in sorted(catalogue.indexes)]
    return json_response({"indexes": found, "request_id": request.state.request_id})


@router.get("/{name}/snapshots", response_model=None, responses={200: {"model": SnapshotList}})
async def snapshots(request: Request, name: str) -> Response:
    """The versions of an index, oldest first."""
    catalogue = state_of(request).catalogue
    with catalogue.lease(name) as served:
        active = served.searcher.info.version
    body = {
        "index": name,
        "active": active,
        "snapshots": catalogue.store.versions(name),
        "request_id": request.state.request_id,
    }
    return json_response(body)


def describe_index(catalogue: Catalogue, name: str) -> dict[str, Any]:
    """One index as `/indexes` and `/info` show it."""
    with catalogue.lease(name) as served:
        info, encoders = served.searcher.info, served.model.encoders
        reranker, stored = served.model.reranker, served.searcher.stored_states(NO_ROWS)
    keeps = reranker is not None and stored is not None and stored.space == reranker.states_space
    return {
        "name": info.index,
        "snapshot": info.version,
        "created_at": info.created_at,
        "model": info.model,
        "gallery": info.gallery,
        "gallery_space": info.gallery_space,
        "levels": [{"level": spec.level, "dim": spec.dim} for spec in info.levels],
        "items": info.items,
        "rows": dict(info.rows),
        "queries": sorted(encoders),
        "rerank": reranker is not None,
        "states": keeps,
    }

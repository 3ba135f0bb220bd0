"""What the server is and how it does: /info, health, metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hivlp.models.artifact import ArtifactManifest, RerankerRecord
from hivlp.service import health
from hivlp.service.answers import HealthAnswer, InfoAnswer
from hivlp.service.metrics import content_type
from hivlp.service.openapi import KEYS, NOT_READY
from hivlp.service.responses import json_response
from hivlp.service.routes.snapshots import describe_index
from hivlp.service.state import state_of

router = APIRouter(tags=["system"])


@router.get(
    "/info", response_model=None, responses={200: {"model": InfoAnswer}, **KEYS, **NOT_READY}
)
async def info(request: Request) -> Response:
    """The indexes, models, sources with their licences, and limits of this server."""
    state = state_of(request)
    catalogue = state.catalogue
    body = {
        "name": "hivlp",
        "version": version("hivlp"),
        "indexes": [describe_index(catalogue, name) for name in sorted(catalogue.indexes)],
        "models": [_describe_model(model.manifest) for model in catalogue.models()],
        "limits": state.settings.limits.model_dump(),
        "request_id": request.state.request_id,
    }
    return json_response(body)


@router.get("/livez", response_model=None, responses={200: {"model": HealthAnswer}})
async def livez() -> Response:
    """Whether the process is alive."""
    return json_response(health.liveness())


@router.get("/readyz", response_model=None, responses={200: {"model": HealthAnswer}, **NOT_READY})
async def readyz(request: Request) -> Response:
    """Whether it should be sent requests."""
    return json_response(health.readiness(state_of(request)))


@router.get(
    "/health",
    response_model=None,
    responses={200: {"model": HealthAnswer}, 503: {"model": HealthAnswer}, **KEYS},
)
async def full_health(request: Request) -> Response:
    """What is loaded, since when."""
    status, body = health.report(state_of(request))
    return json_response(body, status)


@router.get(
    "/metrics",
    response_model=None,
    responses={
        200: {"content": {"text/plain": {}}, "description": "Prometheus text format."},
        **KEYS,
    },
)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, in the form that `Accept` asks for."""
    accept = request.headers.get("accept", "")
    body = await asyncio.to_thread(state_of(request).metrics.exposition, accept)
    return Response(body, media_type=content_type(accept))


def _describe_reranker(record: RerankerRecord) -> dict[str, Any]:
    fields = {"layers", "image_tokens", "image_width", "states_space"}
    return record.model_dump(include=fields)


def _describe_model(manifest: ArtifactManifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "gallery_space": manifest.gallery_space,
        "query_encoder": manifest.query_encoder,
        "precision": manifest.precision,
        "reranker": None if manifest.reranker is None else _describe_reranker(manifest.reranker),
        "levels": {
            tower.modality: [{"level": s.level, "dim": s.dim} for s in tower.levels]
            for tower in manifest.towers
        },
        "measured": manifest.measured,
        "sources": [source.model_dump() for source in manifest.sources],
    }

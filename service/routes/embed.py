"""POST /embed/...: the early outputs of a text or a picture, level by level."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hivlp.service.answers import EmbedAnswer
from hivlp.service.bodies import read_json, read_upload
from hivlp.service.leaving import unless_left
from hivlp.service.openapi import ERRORS, json_body, upload_body
from hivlp.service.queries import ImageQuery, Query, text_query
from hivlp.service.responses import json_response
from hivlp.service.schemas import EmbedImage, EmbedText
from hivlp.service.state import state_of
from hivlp.service.timeline import Timeline

router = APIRouter(prefix="/embed", tags=["embed"], responses=ERRORS)


@router.post(
    "/text",
    response_model=None,
    responses={200: {"model": EmbedAnswer}},
    openapi_extra=json_body(EmbedText),
)
async def embed_text(request: Request) -> Response:
    """Embed a sentence as a query."""
    limits = state_of(request).settings.limits
    wanted = EmbedText.model_validate(await read_json(request, limits))
    query = text_query(wanted.text, limits, "text")
    return await _answer(request, query, wanted.index)


@router.post(
    "/image",
    response_model=None,
    responses={200: {"model": EmbedAnswer}},
    openapi_extra=upload_body(EmbedImage),
)
async def embed_image(request: Request) -> Response:
    """Embed a picture as a query."""
    state = state_of(request)
    upload = await read_upload(request, state.settings.limits, state.fetcher.fetch)
    wanted = EmbedImage.model_validate(upload.fields)
    return await _answer(request, ImageQuery(upload.image), wanted.index)


async def _answer(request: Request, query: Query, index: str) -> Response:
    state, timeline = state_of(request), Timeline(request.state.started_s)
    pipeline = state.pipeline
    with state.admission.permits():
        work = pipeline.embed(query, index, timeline)
        outputs, truncated, model = await unless_left(request, work)
    levels = [
        {"level": one.level, "dim": one.vectors.shape[1], "vector": one.vectors[0]}
        for one in outputs
    ]
    body = {
        "index": index,
        "model": model.name,
        "query_encoder": model.query_encoder,
        "gallery_space": model.gallery_space,
        "levels": levels,
        "truncated": truncated,
        "took_ms": timeline.elapsed_ms(),
        "request_id": request.state.request_id,
    }
    return json_response(body)

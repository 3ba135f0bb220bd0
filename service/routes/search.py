"""POST /search/...: by text, picture, item, vector, and several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from hivlp.models.errors import InputError
from hivlp.service.answers import BatchAnswer, SearchAnswer
from hivlp.service.bodies import (
    Fetch,
    off_loop,
    read_json,
    read_upload,
    split_image,
    with_picture,
)
from hivlp.service.errors import internal_problem, let_go, problem_of
from hivlp.service.leaving import unless_left
from hivlp.service.openapi import ERRORS, LATE, json_body, upload_body
from hivlp.service.queries import ImageQuery, ItemQuery, Query, VectorQuery, text_query
from hivlp.service.request_log import Noted, note
from hivlp.service.responses import json_response
from hivlp.service.schemas import (
    BatchSearch,
    ImageSearch,
    SearchOptions,
    SimilarSearch,
    TextSearch,
    VectorSearch,
    check_limits,
)
from hivlp.service.settings import Limits
from hivlp.service.state import ServingState, state_of
from hivlp.service.timeline import Timeline

router = APIRouter(prefix="/search", tags=["search"], responses=ERRORS)
Parsed = tuple[Query, SearchOptions]
T = TypeVar("T")


@router.post(
    "/text",
    response_model=None,
    responses={200: {"model": SearchAnswer}, **LATE},
    openapi_extra=json_body(TextSearch),
)
async def search_text(request: Request) -> Response:
    """Find pictures (or captions) by a sentence."""
    return await _answer(request, "text", await _json(request))


@router.post(
    "/image",
    response_model=None,
    responses={200: {"model": SearchAnswer}, **LATE},
    openapi_extra=upload_body(ImageSearch),
)
async def search_image(request: Request) -> Response:
    """Find pictures (or captions) by a picture: PNG, JPEG, WebP, GIF, BMP or TIFF."""
    state = state_of(request)
    upload = await read_upload(request, state.settings.limits, state.fetcher.fetch)
    return await _answer(request, "image", upload.fields, upload.image)


@router.post(
    "/similar",
    response_model=None,
    responses={200: {"model": SearchAnswer}, **LATE},
    openapi_extra=json_body(SimilarSearch),
)
async def search_similar(request: Request) -> Response:
    """Find more like an item of the index. No encoder runs."""
    return await _answer(request, "similar", await _json(request))


@router.post(
    "/vector",
    response_model=None,
    responses={200: {"model": SearchAnswer}, **LATE},
    openapi_extra=json_body(VectorSearch),
)
async def search_vector(request: Request) -> Response:
    """Find by a vector of the finest level, made by this index's model, or of imported vectors'."""
    return await _answer(request, "vector", await _json(request))


@router.post(
    "/batch",
    response_model=None,
    responses={200: {"model": BatchAnswer}},
    openapi_extra=json_body(BatchSearch),
)
async def search_batch(request: Request) -> Response:
    """Several searches; each has its own answer or error, in order."""
    state, timeline = state_of(request), _timeline(request)
    limits = state.settings.limits
    body = await read_json(request, limits, pictures=True)
    searches = _searches_of(body, limits.max_batch)
    _ = state.pipeline  # not ready is not ready, whether there is room or not
    with state.admission.permits(len(searches)):
        state.metrics.searching.batch_requests.observe(len(searches))
        request_id = str(request.state.request_id)
        work = [
            _one_of_batch(state, one, note(request, _timeline(request)), request_id)
            for one in searches
        ]
        results = await unless_left(request, _all_of(work))
    body = {"results": results, "took_ms": timeline.elapsed_ms(), "request_id": request_id}
    return json_response(body)


async def _json(request: Request) -> dict[str, Any]:
    return await read_json(request, state_of(request).settings.limits)


def _searches_of(body: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """The searches of a batch, counted before anything else is looked at."""
    wanted = body.get("searches")
    if isinstance(wanted, list) and len(wanted) > limit:
        message = f"searches: {len(wanted)} are over the limit of {limit}"
        raise InputError("out_of_range", message, param="searches", limit=limit)
    return BatchSearch.model_validate(body).searches


async def _answer(
    request: Request, kind: str, fields: Mapping[str, Any], image: bytes = b""
) -> Response:
    state: ServingState = state_of(request)
    _ = state.pipeline  # not ready is not ready, whether there is room or not
    request_id = str(request.state.request_id)
    with state.admission.permits():
        noted = note(request, _timeline(request))
        query, options = _parse(kind, fields, image, state.settings.limits)
        answer = await unless_left(request, _search(state, query, options, noted, request_id))
    return json_response({**answer, "request_id": request_id})


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*work)


async def _one_of_batch(
    state: ServingState, one: Mapping[str, Any], noted: Noted, request_id: str
) -> dict[str, Any]:
    """An answer, or the error that this search alone would have got."""
    try:
        query, options = await _parse_one(one, state.settings.limits, state.fetcher.fetch)
        answer = await _search(state, query, options, noted, request_id)
    except Exception as error:
        problem = problem_of(error) or internal_problem(error, request_id)
        let_go(error)
        return problem.body(request_id)
    return {**answer, "request_id": request_id}


async def _search(
    state: ServingState, query: Query, options: SearchOptions, noted: Noted, request_id: str
) -> dict[str, Any]:
    noted.query = query
    noted.answer = answer = await state.pipeline.search(query, options, noted.timeline)
    state.recall.offer(query, options, answer)
    state.shadow.offer(query, options, answer, request_id)
    return answer


async def _parse_one(one: Mapping[str, Any], limits: Limits, fetch: Fetch) -> Parsed:
    fields = dict(one)
    kind = fields.pop("kind", None)
    if kind not in ("text", "image", "similar", "vector"):
        message = "kind: must be text, image, similar or vector"
        raise InputError("invalid_value", message, param="kind")
    if kind != "image":
        return _parse(kind, fields, b"", limits)
    size = len(text) if isinstance(text := fields.get("image"), str) else 0
    upload = await with_picture(await off_loop(size, lambda: split_image(fields, limits)), fetch)
    return _parse(kind, upload.fields, upload.image, limits)


def _parse(kind: str, fields: Mapping[str, Any], image: bytes, limits: Limits) -> Parsed:
    """Raises ValidationError and InputError."""
    query: Query
    options: SearchOptions
    if kind == "text":
        options = TextSearch.model_validate(fields)
        query = text_query(options.query, limits)
    elif kind == "image":
        options = ImageSearch.model_validate(fields)
        query = ImageQuery(image)
    elif kind == "similar":
        options = SimilarSearch.model_validate(fields)
        query = ItemQuery(options.id)
    else:
        options = VectorSearch.model_validate(fields)
        query = VectorQuery(tuple(options.vector))
    check_limits(options, limits)
    return query, options


def _timeline(request: Request) -> Timeline:
    return Timeline(request.state.started_s)

"""GET /items/...: one item, and its picture in any size up to a limit.

Ids are arbitrary strings, slashes and line ends included, so an id may itself end in `/image`. The
path as it was sent tells where that slash is percent-encoded; else the longer id is looked up when
the shorter one doesn't exist.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated
from urllib.parse import quote, unquote_to_bytes

from fastapi import APIRouter, Query, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from hivlp.index.errors import NoSuchItem
from hivlp.models.errors import InputError
from hivlp.service.answers import ItemAnswer
from hivlp.service.openapi import ERRORS
from hivlp.service.pictures import MIN_THUMBNAIL_PX, locate
from hivlp.service.responses import json_response
from hivlp.service.state import ServingState, state_of

router = APIRouter(prefix="/items", tags=["items"], responses=ERRORS)
IndexName = Annotated[str, Query(min_length=1, max_length=256, description="The index it is in.")]
Size = Annotated[int | None, Query(description="At most this many pixels wide and high.")]
# Kept, and asked for again each time: a picture that was replaced or erased is shown no longer.
CACHE_CONTROL = "no-cache"


class _AnyId(Convertor[str]):
    """A path of any characters; Starlette's own `path` ends at a line end."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any", _AnyId())


@router.get(
    "/{id:any}/image",
    response_model=None,
    responses={
        200: {"content": {"image/*": {}}, "description": "The picture, as its content type says."},
        304: {"description": "The copy you have is still right."},
    },
)
async def item_image(
    request: Request, id: str, index: IndexName = "default", size: Size = None
) -> Response:
    """The picture of an item, or a thumbnail of it."""
    state = state_of(request)
    check_path(request)
    if request.scope.get("raw_path", b"").lower().endswith(b"%2fimage"):
        return _item(request, state, f"{id}/image", index)
    try:
        return await _picture(request, state, id, index, size)
    except NoSuchItem:
        return _item(request, state, f"{id}/image", index, missing=id)


@router.get("/{id:any}", response_model=None, responses={200: {"model": ItemAnswer}})
async def item(request: Request, id: str, index: IndexName = "default") -> Response:
    """An item and its metadata."""
    check_path(request)
    return _item(request, state_of(request), id, index)


def check_path(request: Request) -> None:
    """Refuse a path that isn't UTF-8: what stands for it in its place is another id.

    Raises InputError.
    """
    try:
        unquote_to_bytes(request.scope.get("raw_path", b"")).decode()
    except UnicodeDecodeError as error:
        message = "id: the path is not percent-encoded UTF-8"
        raise InputError("invalid_id", message, param="id") from error


def _item(
    request: Request, state: ServingState, item_id: str, index: str, missing: str | None = None
) -> Response:
    with state.catalogue.lease(index) as served:
        searcher = served.searcher
        try:
            (metadata,) = searcher.metadata([item_id], None)
        except NoSuchItem:
            raise NoSuchItem(missing or item_id) from None
        reference = searcher.image_ref(item_id)
        body = {
            "id": item_id,
            "index": index,
            "snapshot": searcher.info.version,
            "metadata": metadata,
            "image": None if reference is None else image_path(item_id, index),
            "request_id": request.state.request_id,
        }
    return json_response(body)


def image_path(item_id: str, index: str) -> str:
    """Where the picture of an item is served."""
    path = f"/items/{quote(item_id, safe='')}/image"
    return path if index == "default" else f"{path}?index={quote(index, safe='')}"


async def _picture(
    request: Request, state: ServingState, item_id: str, index: str, size: int | None
) -> Response:
    _check_size(size, state.settings.limits.max_thumbnail_px)
    with state.catalogue.lease(index) as served:
        root, reference = served.pictures.find(served.searcher.image_ref(item_id))
    loop = asyncio.get_running_loop()
    with state.picture_admission.permits():
        file = await loop.run_in_executor(state.threads.reading, locate, root, reference, item_id)
        etag = f'"{file.tag}-{size or 0}"'
        headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        pictures = state.pictures
        read = (
            partial(pictures.original, file)
            if size is None
            else partial(pictures.thumbnail, file, size)
        )
        picture = await loop.run_in_executor(state.threads.reading, read)
    # Until it is sent, which its reader may be slow in: nothing else counts it by then.
    request.state.hold(min(len(picture.data), state.body_room.limit))
    return Response(picture.data, headers=headers, media_type=picture.media_type)


def _check_size(size: int | None, limit: int) -> None:
    if size is not None and not MIN_THUMBNAIL_PX <= size <= limit:
        message = f"size: {size} is not between {MIN_THUMBNAIL_PX} and {limit}"
        raise InputError("out_of_range", message, param="size", limit=limit)

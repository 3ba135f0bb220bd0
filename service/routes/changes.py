"""PUT and DELETE /items/{id}: answered once the change is on the disk and can be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from hivlp.index.build.upserts import Draft, own_vector
from hivlp.index.snapshot.changes import Delete, Shape
from hivlp.models.errors import InputError
from hivlp.models.levels import FloatArray, Modality
from hivlp.service.answers import ChangeAnswer, ErrorAnswer
from hivlp.service.bodies import Fetch, read_item
from hivlp.service.openapi import ERRORS, upload_body
from hivlp.service.responses import json_response
from hivlp.service.routes.items import IndexName, check_path
from hivlp.service.schemas import PutItem
from hivlp.service.state import ServingState, state_of
from hivlp.service.writers import check_writer

FORBIDDEN: dict[int | str, dict[str, Any]] = {
    403: {
        "model": ErrorAnswer,
        "description": "Items can't be changed over HTTP here, or by you, or the key is wrong.",
    },
}
router = APIRouter(prefix="/items", tags=["items"], responses={**ERRORS, **FORBIDDEN})


@router.put(
    "/{id:any}",
    response_model=None,
    responses={200: {"model": ChangeAnswer}},
    openapi_extra=upload_body(PutItem, required=False),
)
async def put_item(request: Request, id: str, index: IndexName = "default") -> Response:
    """Make an item what the body says, whether it was there before or not."""
    state = state_of(request)
    check_writer(request, state.settings)
    check_path(request)
    writer = state.writer(index)
    with state.change_room.share() as take:
        counted = Request(request.scope, _counted(request.receive, take))
        fetch = _counted_fetch(state.fetcher.fetch, take)
        fields, picture = await read_item(counted, state.settings.limits, fetch)
        body = PutItem.model_validate(fields)
        _check_texts(body, state)
        draft = Draft(id, tuple(body.texts), picture, body.metadata, _vectors(body, index, state))
        # Only now: a body that is slow to come must not take the place of one that is here.
        with state.change_admission.permits():
            changed = await writer.change(draft)
    return json_response(
        {
            "id": id,
            "index": index,
            "snapshot": changed.version,
            "created": changed.created,
            "deleted": False,
            "searchable": changed.searchable,
            "request_id": request.state.request_id,
        }
    )


@router.delete("/{id:any}", response_model=None, responses={200: {"model": ChangeAnswer}})
async def delete_item(request: Request, id: str, index: IndexName = "default") -> Response:
    """Delete an item: it is found no longer. Its vectors go with the next build."""
    state = state_of(request)
    check_writer(request, state.settings)
    check_path(request)
    writer = state.writer(index)
    with state.change_admission.permits():
        changed = await writer.change(Delete(id))
    return json_response(
        {
            "id": id,
            "index": index,
            "snapshot": changed.version,
            "created": False,
            "deleted": True,
            "searchable": changed.searchable,
            "request_id": request.state.request_id,
        }
    )


def _counted(receive: Receive, take: Callable[[int], None]) -> Receive:
    """`receive`, with the bytes of the body counted as they come. Raises Overloaded."""

    async def counted() -> Message:
        message = await receive()
        take(len(message.get("body", b"")))
        return message

    return counted


def _counted_fetch(fetch: Fetch, take: Callable[[int], None]) -> Fetch:
    """`fetch`, with what it brings counted too. Raises Overloaded."""

    async def counted(url: str) -> bytes:
        data = await fetch(url)
        take(len(data))
        return data

    return counted


def _check_texts(body: PutItem, state: ServingState) -> None:
    most = state.settings.limits.max_item_texts
    if len(body.texts) > most:
        message = f"texts: {len(body.texts)} texts, at most {most}"
        raise InputError("out_of_range", message, param="texts", limit=most)


def _vectors(body: PutItem, index: str, state: ServingState) -> dict[Modality, FloatArray]:
    """The item's own rows, by side. Raises InputError."""
    if body.vector is None:
        return {}
    if body.modality == "text" and len(body.texts) > 1:
        message = f"texts: one vector stands for one text, got {len(body.texts)}"
        raise InputError("out_of_range", message, param="texts", limit=1)
    with state.catalogue.lease(index) as served:
        info = served.searcher.info
    row = own_vector(body.vector, Shape(info.levels, info.gallery), info.rotation)
    return {body.modality: row[None] if body.modality == "text" else row}

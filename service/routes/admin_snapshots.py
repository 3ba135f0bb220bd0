"""POST /admin/indexes/{name}/activate and /rollback, and how far it is: for who administers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from hivlp.index.errors import ActivationUnderWay, SnapshotError, SnapshotMissing
from hivlp.index.snapshot.activation_files import Canary, Kind
from hivlp.service.answers import ActivationAnswer, ErrorAnswer
from hivlp.service.bodies import read_json
from hivlp.service.errors import ServiceError
from hivlp.service.guard import admin_only
from hivlp.service.openapi import ERRORS, json_body
from hivlp.service.responses import json_response
from hivlp.service.schemas import ActivateSnapshot
from hivlp.service.staging import Activation
from hivlp.service.state import state_of

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": ActivationAnswer, "description": "It is active."},
    202: {"model": ActivationAnswer, "description": "It is being staged: look at Location."},
    409: {"model": ErrorAnswer, "description": "Another one is under way, or it can't be."},
}
STATES = {True: "active", False: "failed", None: "staging"}
router = APIRouter(
    prefix="/admin/indexes", tags=["admin"], responses=ERRORS, dependencies=[Depends(admin_only)]
)


@router.post(
    "/{name}/activate",
    response_model=None,
    responses=ANSWERS,
    openapi_extra=json_body(ActivateSnapshot),
)
async def activate(request: Request, name: str) -> Response:
    """Make a version the active one: every process stages it, then all flip. An index of the home
    that isn't served yet is served from then on, unless `indexes` names others.
    """
    limits = state_of(request).settings.limits
    body = ActivateSnapshot.model_validate(await read_json(request, limits))
    return await _ask(request, "activate", name, body.snapshot, body.canary)


@router.post("/{name}/rollback", response_model=None, responses=ANSWERS)
async def rollback(request: Request, name: str) -> Response:
    """Go back to the version that was active before, in the same way."""
    return await _ask(request, "rollback", name, None, None)


@router.get("/{name}/activation", response_model=None, responses={200: {"model": ActivationAnswer}})
async def activation(request: Request, name: str) -> Response:
    """The activation or rollback under way, or the last one."""
    stager = await state_of(request).admitted(name)
    found = await asyncio.to_thread(stager.activation, name)
    if found is None:
        raise ServiceError(404, "not_found", "nothing was activated here yet", param="name")
    return json_response({**_described(name, found), "request_id": request.state.request_id})


async def _ask(
    request: Request,
    kind: Kind,
    name: str,
    version: str | None,
    canaries: Sequence[Canary] | None,
) -> Response:
    stager = await state_of(request).admitted(name)
    try:
        asked = await asyncio.to_thread(
            stager.ask, kind, name, version, canaries, key=request.state.request_id
        )
    except (SnapshotMissing, ActivationUnderWay):
        raise
    except SnapshotError as error:
        param = None if version is None else "snapshot"
        raise ServiceError(409, "not_activatable", str(error), param=param) from error
    if asked is None:
        assert version is not None, "a rollback leads to another version than the active one"
        body = _active_already(name, kind, version)
    else:
        found = await asyncio.to_thread(stager.activation, name)
        mine = found is not None and found.request.id == asked.id
        body = _described(name, found if found is not None and mine else Activation(asked))
    status = 200 if body["state"] == "active" else 202
    headers = {"Location": f"/admin/indexes/{name}/activation"}
    return json_response({**body, "request_id": request.state.request_id}, status, headers)


def _active_already(name: str, kind: Kind, version: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("previous", "reason", "asked_at", "ended_at"))
    return {
        "index": name,
        "kind": kind,
        "snapshot": version,
        "state": "active",
        **unknown,
        "processes": [],
    }


def _described(name: str, found: Activation) -> dict[str, Any]:
    request, ended = found.request, found.ended
    reason = request.reason if ended is None or ended.active else ended.reason
    return {
        "index": name,
        "kind": request.kind,
        "snapshot": request.version,
        "previous": request.previous or None,
        "state": STATES[None if ended is None else ended.active],
        "reason": reason or None,
        "asked_at": _time(request.asked_at),
        "ended_at": None if ended is None else _time(ended.ended_at),
        "processes": [
            {"pid": said.pid, "state": said.state, "reason": said.reason or None}
            for said in found.reports
        ],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

"""/admin/builds: have a version built from a corpus, and follow it.

What is known of builds lies in files, so every serving process answers alike, and answers while a
model is still loading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from hivlp.index.snapshot.names import check_index_name
from hivlp.service.answers import BuildAnswer, BuildList, ErrorAnswer
from hivlp.service.bodies import read_json
from hivlp.service.errors import NotWritable
from hivlp.service.guard import admin_only
from hivlp.service.jobs.records import Build, BuildRecords
from hivlp.service.openapi import ERRORS, json_body
from hivlp.service.responses import json_response
from hivlp.service.schemas import StartBuild
from hivlp.service.state import state_of

T = TypeVar("T")
MOST = 100
REFUSED: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorAnswer, "description": "Nothing can be built over HTTP here."},
    409: {"model": ErrorAnswer, "description": "The index has a build; or the key came before."},
}
Limit = Annotated[int, Query(ge=1, le=MOST, description="At most so many, the newest first.")]
router = APIRouter(
    prefix="/admin/builds",
    tags=["admin"],
    responses=ERRORS,
    dependencies=[Depends(admin_only)],
)


@router.post(
    "",
    response_model=None,
    status_code=202,
    responses={202: {"model": BuildAnswer}, **REFUSED},
    openapi_extra=json_body(StartBuild),
)
async def start_build(request: Request) -> Response:
    """Have a version of an index built. The answer says how to follow it."""
    builds = state_of(request).builds
    limits = state_of(request).settings.limits
    asked = StartBuild.model_validate(await read_json(request, limits))
    check_index_name(asked.index)
    build = await _written(lambda: builds.start(asked))
    return _answer(request, builds.records, build, 202)


@router.get("", response_model=None, responses={200: {"model": BuildList}})
async def list_builds(request: Request, limit: Limit = 20) -> Response:
    """The builds there were and are, newest first."""
    records = state_of(request).builds.records
    found = await asyncio.to_thread(lambda: [_shown(records, b) for b in records.all(limit)])
    return json_response({"builds": found, "request_id": request.state.request_id})


@router.get("/{id}", response_model=None, responses={200: {"model": BuildAnswer}})
async def get_build(request: Request, id: str) -> Response:
    """How far a build is, and what came of it."""
    records = state_of(request).builds.records
    return _answer(request, records, await asyncio.to_thread(records.get, id), 200)


@router.delete(
    "/{id}",
    response_model=None,
    responses={200: {"model": BuildAnswer}, 202: {"model": BuildAnswer}},
)
async def cancel_build(request: Request, id: str) -> Response:
    """End a build; one that has ended stays as it is. 202 while it is still being ended."""
    records = state_of(request).builds.records
    build = await _written(lambda: records.cancel(id))
    return _answer(request, records, build, 202 if build.waiting else 200)


async def _written(change: Callable[[], T]) -> T:
    """What comes of a change to records, made in a thread. Raises NotWritable."""
    try:
        return await asyncio.to_thread(change)
    except OSError as error:
        raise NotWritable(f"builds can't be written down: {error.strerror or error}") from error


def _answer(request: Request, records: BuildRecords, build: Build, status: int) -> Response:
    body = {**_shown(records, build), "request_id": request.state.request_id}
    response = json_response(body, status)
    response.headers["Location"] = f"/admin/builds/{build.id}"
    return response


def _shown(records: BuildRecords, build: Build) -> dict[str, Any]:
    """A build as answers show it; its keys are whoever asked's."""
    shown = build.model_dump(exclude={"keys": True, "asked": {"key"}})
    progress = records.progress(build.id) if build.state == "running" else None
    return {**shown, "progress": progress}

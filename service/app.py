"""The application factory: `create_app(settings)`. Nothing is loaded and nothing runs before it.

The lifespan starts the threads and loads in one of them: the process is live and answers 503
meanwhile, and ready when everything is warm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI

from hivlp.service import cors, errors, openapi
from hivlp.service.cores import Cores
from hivlp.service.guard import Guard, warn_of_open_doors
from hivlp.service.loading import load_catalogue
from hivlp.service.middleware import Edge
from hivlp.service.routes import (
    admin_snapshots,
    builds,
    changes,
    embed,
    items,
    search,
    snapshots,
    system,
)
from hivlp.service.routes.page import page_router
from hivlp.service.settings import Settings
from hivlp.service.state import LoadCatalogue, ServingState

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

SUMMARY = "Image-text retrieval that starts searching before the encoder has finished."
# Spans are made by `tracing.py`. FastAPI's own would be a second set, with paths and queries in
# them, and an environment variable of its own could turn them on.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
OnLoaded = Callable[[BaseException | None], None]


def create_app(
    settings: Settings,
    *,
    load: LoadCatalogue = load_catalogue,
    on_loaded: OnLoaded = lambda _: None,
    load_first: bool = False,
    cores: Cores | None = None,
) -> FastAPI:
    """The app. `on_loaded` is told once: None when ready, or what loading failed of.

    `load_first`: whoever runs it accepts nothing before that. `cores` are shared with others.
    """
    state = ServingState(settings, load, cores)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.start_threads()
        tasks = [
            asyncio.create_task(_load(state, on_loaded)),
            asyncio.create_task(state.watch_loop()),
        ]
        try:
            if load_first:
                await tasks[0]
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await state.stop_threads()

    app = FastAPI(
        title="hivlp",
        version=version("hivlp"),
        summary=SUMMARY,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=NO_TELEMETRY,
    )
    app.state.hivlp = state
    warn_of_open_doors(state.keys, settings)
    app.add_middleware(Guard, keys=state.keys, settings=settings)
    cors.install(app, settings.cors)
    app.add_middleware(
        Edge,
        metrics=state.metrics,
        limits=settings.limits,
        room=state.body_room,
        ended=state.ended,
    )
    errors.install(app)
    for route in (search, embed, items, changes, snapshots, admin_snapshots, builds, system):
        app.include_router(route.router)
    app.include_router(page_router())
    openapi.install(app)
    return app


async def _load(state: ServingState, on_loaded: OnLoaded) -> None:
    try:
        await state.load()
    except Exception as error:
        on_loaded(error)
    else:
        on_loaded(None)

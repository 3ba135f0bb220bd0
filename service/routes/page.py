"""The page at `/`, the API's own documentation at `/docs`, and the files they need.

Read once when the router is made; a handful of files, so that nothing else of the package can ever
be asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
PAGES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/favicon.ico": "favicon.svg",
    "/static/style.css": "style.css",
    "/static/app.js": "app.js",
    "/static/timeline.js": "timeline.js",
    "/static/rerank.js": "rerank.js",
    "/static/drops.js": "drops.js",
    "/static/keys.js": "keys.js",
    "/static/docs.js": "docs.js",
    "/static/favicon.svg": "favicon.svg",
}


def page_router() -> APIRouter:
    """One route a file."""
    router = APIRouter(include_in_schema=False)
    folder = files("hivlp.service.web")
    for path, name in PAGES.items():
        suffix = name[name.rindex(".") :]
        data = (folder / name).read_bytes()
        router.add_api_route(
            path,
            _sender(data, MEDIA_TYPES[suffix]),
            methods=["GET", "HEAD"],
            name=f"page {path}",
            response_model=None,
        )
    return router


def _sender(data: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "Cache-Control": "no-cache"}

    async def send(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media_type)

    return send

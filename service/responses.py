"""Answers as JSON over HTTP."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`body` as JSON by orjson; what JSON has no word for (a path, a decimal) becomes a string."""
    content = orjson.dumps(body, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, status, headers, media_type="application/json")

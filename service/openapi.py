"""The OpenAPI document: bodies are read by hand, so they are described by hand.

python -m hivlp.service.openapi docs/openapi.json             write the committed copy
python -m hivlp.service.openapi --check docs/openapi.json     fail where it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from hivlp.service.answers import ErrorAnswer
from hivlp.service.responses import json_response
from hivlp.service.schemas import (
    ActivateSnapshot,
    BatchSearch,
    EmbedImage,
    EmbedText,
    ImageSearch,
    PutItem,
    SimilarSearch,
    StartBuild,
    TextSearch,
    VectorSearch,
)

BODIES: tuple[type[BaseModel], ...] = (
    TextSearch,
    ImageSearch,
    SimilarSearch,
    VectorSearch,
    BatchSearch,
    EmbedText,
    EmbedImage,
    PutItem,
    ActivateSnapshot,
    StartBuild,
)
IMAGE = "Base64, a data URI, or where switched on an http or https URL."
REF = "#/components/schemas/{model}"

KEYS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "A key is needed here, and none was sent."},
    403: {"model": ErrorAnswer, "description": "A wrong key, or not one for this."},
}
# Without keys in the settings, none is asked for.
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"header": []}, {}]
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorAnswer, "description": "Still loading, or draining."}
}
LATE: dict[int | str, dict[str, Any]] = {
    504: {"model": ErrorAnswer, "description": "`deadline_ms` passed before level 1 was searched."}
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "Malformed: not JSON, not UTF-8, not a form."},
    404: {"model": ErrorAnswer, "description": "No such index, version or item."},
    408: {"model": ErrorAnswer, "description": "The body did not come in time."},
    413: {"model": ErrorAnswer, "description": "Too many bytes or pixels."},
    415: {"model": ErrorAnswer, "description": "Not a supported picture or content type."},
    422: {"model": ErrorAnswer, "description": "A field is missing, unknown or out of range."},
    429: {"model": ErrorAnswer, "description": "Full; try again after Retry-After seconds."},
    **KEYS,
    **NOT_READY,
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes JSON."""
    content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def upload_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a picture, as a form or as JSON."""
    own = {"$ref": REF.format(model=model.__name__)}
    content = {}
    for media_type, image in (
        ("multipart/form-data", {"type": "string", "format": "binary"}),
        ("application/json", {"type": "string", "description": IMAGE}),
    ):
        properties: dict[str, Any] = {"type": "object", "properties": {"image": image}}
        if required:
            properties["required"] = ["image"]
        content[media_type] = {"schema": {"allOf": [own, properties]}}
    return {"requestBody": {"required": True, "content": content}}


def install(app: FastAPI) -> None:
    """Make the app's document hold the schemas that the bodies refer to, and serve it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    async def send() -> Response:
        return json_response(document())

    app.openapi = document  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", send, include_in_schema=False, response_model=None)


def _document(app: FastAPI) -> dict[str, Any]:
    found: dict[str, Any] = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
    )
    _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    found["security"] = SECURITY
    found["components"]["securitySchemes"] = SCHEMES
    components = found["components"]["schemas"]
    components.update(schemas["$defs"])
    # `image` travels beside the fields of these.
    for name in ("ImageSearch", "EmbedImage", "PutItem"):
        components[name].pop("additionalProperties", None)
    # Answers of ours never have FastAPI's own error body.
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    return found


def document_bytes(app: FastAPI) -> bytes:
    """The document as it is committed."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(app.openapi(), option=options)


def main(arguments: Sequence[str]) -> int:
    """Write the document to the file named, or check it, or write to standard output."""
    from hivlp.service.app import create_app
    from hivlp.service.settings import Settings

    data = document_bytes(create_app(Settings()))
    if arguments[:1] == ["--check"]:
        if Path(arguments[1]).read_bytes() != data:
            print(f"{arguments[1]} is out of date: write it anew", file=sys.stderr)
            return 1
    elif arguments:
        Path(arguments[0]).write_bytes(data)
    else:
        sys.stdout.buffer.write(data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

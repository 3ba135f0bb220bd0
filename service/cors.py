"""Pages of other sites that may ask this service: none, unless their origins are listed.

Cookies are never part of it: a page that is listed sends a key, as every other client does.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.middleware.cors import CORSMiddleware

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
METHODS = ("GET", "POST", "PUT", "DELETE")
SENT = ("Authorization", "Content-Type", "X-API-Key", "X-Request-ID")
READ = ("Retry-After", "WWW-Authenticate", "X-Request-ID")
KEPT_S = 600


def _origin(text: str) -> str:
    if ORIGIN.fullmatch(text) is None:
        raise ValueError("must be an origin, such as https://shop.example, in lower case")
    return text


class CorsSettings(BaseModel):
    """The origins whose pages may read answers. `*` is no origin: keys are for somebody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()


def install(app: FastAPI, settings: CorsSettings) -> None:
    """Answer browsers that ask for a page of a listed origin; without any, nobody is answered."""
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=METHODS,
            allow_headers=SENT,
            expose_headers=READ,
            max_age=KEPT_S,
        )

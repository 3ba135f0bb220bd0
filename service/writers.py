"""Who may change items over HTTP. Raises ReadOnly, which says why, or what keys raise.

Unless `changes.writes` says who may, it is the holder of the admin key, where there is one, and
where there are no keys at all a program of this machine. A page of another site may not, whoever
may otherwise, unless `cors.origins` lists it.
"""

from __future__ import annotations

from starlette.requests import Request

from hivlp.service.errors import ReadOnly
from hivlp.service.guard import check_admin
from hivlp.service.local import foreign_origin, why_not_local
from hivlp.service.settings import Settings

ALLOW = "HIVLP_CHANGES__WRITES=true allows it"


def check_writer(request: Request, settings: Settings) -> None:
    """Raise ReadOnly, NoKey, WrongKey or NotAdmin unless whoever asks may put and delete items."""
    if not settings.writable:
        raise ReadOnly
    origin = foreign_origin(request.headers)
    if origin is not None and origin not in settings.cors.origins:
        host = request.headers.get("host") or "no host"
        raise ReadOnly(f"a page of {origin} can't change the items of {host}")
    if settings.changes.writes is not None:
        return
    if settings.keys.has_admin:
        check_admin(request)
    elif why := why_not_local(request):
        raise ReadOnly(f"items can't be changed: {why}; {ALLOW}")

"""Who may change items over HTTP. Raises ReadOnly, which says why.

A browser sends to 127.0.0.1 whatever page asks it to, and a proxy on this machine passes on what
comes from anywhere: that the service listens on loopback alone proves nothing about who asks. So
unless `changes.writes` says who may, both ends of the connection must be this machine, the name
that was asked for its own, and nothing may say that somebody passed the request on.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request

from hivlp.service.errors import ReadOnly
from hivlp.service.settings import Settings, is_loopback

OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
FORWARDED = "x-forwarded-"
ALLOW = "HIVLP_CHANGES__WRITES=true allows it"


def check_writer(request: Request, settings: Settings) -> None:
    """Raise ReadOnly unless whoever asks may put and delete items."""
    if not settings.writable:
        raise ReadOnly
    _check_origin(request.headers)
    if settings.changes.writes is None:
        _check_local(request)


def _check_origin(headers: Headers) -> None:
    """A page of another site may not change items, whoever may otherwise."""
    host = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        scheme, mark, site = origin.lower().partition("://")
        if not (mark and scheme in ("http", "https") and site == host):
            raise ReadOnly(f"a page of {origin} can't change the items of {host or 'no host'}")


def _check_local(request: Request) -> None:
    for end in ("client", "server"):
        address = request.scope.get(end)
        if address is None or not is_loopback(str(address[0])):
            raise ReadOnly(f"only programs of this machine may change items here; {ALLOW}")
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in OWN_HOSTS:
        raise ReadOnly(f"items can be changed at localhost, not at {host or 'no host'}; {ALLOW}")
    for header in request.headers:
        if header == "forwarded" or header.startswith(FORWARDED):
            raise ReadOnly(f"the request was passed on by a proxy ({header}); {ALLOW}")

"""Whether a request comes from a program of this machine, and not from a page or through a proxy.

A browser sends to 127.0.0.1 whatever page asks it to, and a proxy on this machine passes on what
comes from anywhere: that the service listens on loopback alone proves nothing about who asks. So
both ends of the connection must be this machine, the name that was asked for its own, and nothing
may say that somebody passed the request on. A proxy of this machine that says nothing can't be told
from a program of it: nothing is granted by this where there are keys.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request

from hivlp.service.settings import is_loopback

OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
FORWARDED = ("x-forwarded-", "forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip",
             "true-client-ip")  # fmt: skip


def foreign_origin(headers: Headers) -> str | None:
    """The other site whose page sent this, if one did."""
    host = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        scheme, mark, site = origin.lower().partition("://")
        if not (mark and scheme in ("http", "https") and site == host):
            return origin
    return None


def host_name(headers: Headers) -> str:
    """The name that was asked, without its port."""
    host = headers.get("host", "")
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()


def why_not_local(request: Request) -> str | None:
    """Why a request is not of a program of this machine; None where it is."""
    for end in ("client", "server"):
        address = request.scope.get(end)
        if address is None or not is_loopback(str(address[0])):
            return "only programs of this machine may do this"
    if host_name(request.headers) not in OWN_HOSTS:
        host = request.headers.get("host") or "no host"
        return f"this can be done at localhost, not at {host}"
    for header in request.headers:
        if header.startswith(FORWARDED):
            return f"the request was passed on by a proxy ({header})"
    origin = foreign_origin(request.headers)
    return None if origin is None else f"a page of {origin} may not do this"

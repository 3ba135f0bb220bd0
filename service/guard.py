"""Who may ask for what: API keys before every route, and the dependency of admin routes.

`Guard` is ASGI middleware, so that what isn't routed, and a route that someone adds, are closed
too; `OPEN` are the paths that nobody needs a key for. It reads headers alone: a request without a
key is answered before a byte of its body is looked at.
"""

from __future__ import annotations

import logging

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hivlp.service.errors import ServiceError, problem_of, problem_response
from hivlp.service.keys import Keyring, Role
from hivlp.service.local import OWN_HOSTS, host_name, why_not_local
from hivlp.service.routes.page import PAGES
from hivlp.service.settings import Settings, is_loopback

log = logging.getLogger("hivlp.service")

# Probes have no keys, and the page must be there to ask for one.
OPEN = frozenset({"/livez", "/readyz", *PAGES})
ADMIN = "/admin"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hivlp"'}


class NoKey(ServiceError):
    """A key is needed and none was sent."""

    def __init__(self, what: str = "a key") -> None:
        message = f"{what} is needed: send Authorization: Bearer KEY, or X-API-Key: KEY"
        super().__init__(401, "missing_key", message, headers=CHALLENGE)


class WrongKey(ServiceError):
    """The key is none of this service."""

    def __init__(self) -> None:
        super().__init__(403, "wrong_key", "the key is not one of this service")


class WrongHost(ServiceError):
    """It was asked at a name that isn't its own."""

    def __init__(self, host: str) -> None:
        message = f"this service is not asked at {host}: HIVLP_HOSTS lists names besides localhost"
        super().__init__(403, "wrong_host", message)


class NotAdmin(ServiceError):
    """Only the holder of the admin key, or without one a program of this machine, may do this."""

    def __init__(self, why: str = "this needs the admin key; the key sent is an API key") -> None:
        super().__init__(403, "not_admin", why)


def warn_of_open_doors(keys: Keyring, settings: Settings) -> None:
    """Say so where whoever reaches the service may search: it may be meant, and it may be not."""
    if not keys.closed and not is_loopback(settings.host):
        log.warning(
            "whoever reaches %s may search: HIVLP_KEYS__API or HIVLP_KEYS__API_FILE asks for a key",
            settings.host,
        )


class Guard:
    """ASGI middleware around the routes. It answers by itself: within what CORS adds to answers."""

    def __init__(self, app: ASGIApp, *, keys: Keyring, settings: Settings) -> None:
        self._app = app
        self._keys = keys
        # Who reaches such a service is told by nothing else; any page whose name leads here could.
        self._any_host = keys.closed or not is_loopback(settings.host)
        self._hosts = OWN_HOSTS | {host.lower() for host in settings.hosts}
        self._admin_exists = keys.has_admin or settings.trusts_machine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its role in its state."""
        app = self._app
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServiceError as error:
                app = _refusing(scope, error)
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._any_host and "host" in headers and host_name(headers) not in self._hosts:
            raise WrongHost(headers["host"])
        given = sent_key(headers)
        role = Role.NOBODY if given is None else self._keys.role(given)
        scope.setdefault("state", {})["role"] = role
        path = scope["path"]
        if self._keys.closed and path not in OPEN and role is Role.NOBODY:
            raise NoKey if given is None else WrongKey
        if not self._admin_exists and (path == ADMIN or path.startswith(f"{ADMIN}/")):
            raise ServiceError(404, "not_found", "Not Found")


def _refusing(scope: Scope, error: ServiceError) -> ASGIApp:
    problem = problem_of(error)
    assert problem is not None, "a ServiceError is in the table"
    scope["state"]["error_code"] = problem.code
    return problem_response(problem, scope["state"]["request_id"])


def sent_key(headers: Headers) -> bytes | None:
    """The key of a request: its bearer token, or where it has none its `X-API-Key`."""
    for raw in headers.getlist("authorization"):
        scheme, _, token = raw.strip().partition(" ")
        if scheme.lower() == "bearer":
            return token.strip().encode("latin-1")
    key = headers.get("x-api-key")
    return None if key is None else key.strip().encode("latin-1")


async def admin_only(request: Request) -> None:
    """Dependency of admin routes. Raises NoKey, WrongKey, NotAdmin.

    Without any key those routes are for programs of this machine; where the service has API keys or
    listens to others, `Guard` has answered that there are none.
    """
    keys: Keyring = request.app.state.hivlp.keys
    if keys.has_admin:
        check_admin(request)
        return
    why = why_not_local(request)
    if why is not None:
        raise NotAdmin(f"{why}; HIVLP_KEYS__ADMIN or HIVLP_KEYS__ADMIN_FILE sets a key for it")


def check_admin(request: Request) -> None:
    """Raise NoKey, WrongKey or NotAdmin unless the request has the admin key."""
    if request.state.role is Role.ADMIN:
        return
    if sent_key(request.headers) is None:
        raise NoKey("the admin key")
    raise NotAdmin if request.state.role is Role.USER else WrongKey

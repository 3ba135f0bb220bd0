"""Pictures by URL: fetched from where it was allowed, in time, and no larger than they may be.

Every hop is checked as the first one is, and every address before it is connected to. No proxy, no
cookie, no password, nothing compressed (which could be far larger than what comes), and never a
word of what an upstream said but its status and content type.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from importlib.metadata import version

import httpcore
import httpx

from hivlp.models.errors import ImageError, InputError
from hivlp.service.addresses import Address, CheckedNetwork, Resolve, is_public, resolve
from hivlp.service.admission import Admission
from hivlp.service.errors import not_available
from hivlp.service.fetch_settings import FetchSettings

MAX_URL_CHARS = 2_048
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MEDIA_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}", re.ASCII)


class Fetcher:
    """Fetches pictures for one app. `resolve`, `allowed` and `tls` are those of a test."""

    def __init__(
        self,
        settings: FetchSettings,
        max_image_bytes: int,
        *,
        resolve: Resolve = resolve,
        allowed: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._max_bytes = min(settings.max_bytes, max_image_bytes)
        self._admission = Admission(settings.concurrency)
        self._pool: httpcore.AsyncConnectionPool | None = None
        if settings.hosts:
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=tls or httpx.create_ssl_context(),
                max_connections=settings.concurrency,
                max_keepalive_connections=0,  # a kept one would not be looked at again
                network_backend=CheckedNetwork(resolve, allowed),
            )

    async def fetch(self, url: str) -> bytes:
        """The bytes at a URL. Raises InputError, ImageError, Overloaded."""
        if self._pool is None:
            raise not_available("image", "pictures by URL are not available: send the bytes")
        target = self._checked(url)
        with self._admission.permits():
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._follow(self._pool, target)
            except TimeoutError:
                limit_s = self._settings.timeout_s
                raise _failed(target, f"was not all there within {limit_s:g} s") from None
            except httpcore.ProtocolError:
                raise _failed(target, "did not answer in HTTP") from None
            except (httpcore.NetworkError, OSError):  # TLS that breaks is an OSError, not mapped
                raise _failed(target, "can't be reached, or broke off") from None

    async def close(self) -> None:
        """Close what is open."""
        if self._pool is not None:
            await self._pool.aclose()

    async def _follow(self, pool: httpcore.AsyncConnectionPool, target: httpx.URL) -> bytes:
        for _ in range(self._settings.max_redirects + 1):
            where = httpcore.URL(
                scheme=target.raw_scheme,
                host=target.raw_host,
                port=target.port,
                target=target.raw_path,
            )
            async with pool.stream("GET", where, headers=_headers(target)) as response:
                if response.status not in REDIRECTS:
                    return await self._read(response, target)
                location = _header(response, b"location")
            target = self._checked(location, of=target)
        raise _failed(target, f"redirects more than {self._settings.max_redirects} times")

    async def _read(self, response: httpcore.Response, target: httpx.URL) -> bytes:
        if response.status != 200:
            said = _header(response, b"content-type").partition(";")[0].strip()
            kind = said if MEDIA_TYPE.fullmatch(said) else "no content type"
            raise _failed(target, f"answered {response.status} ({kind})")
        if _header(response, b"content-encoding").lower() not in ("", "identity"):
            raise _failed(target, "answered with something compressed")
        length = _header(response, b"content-length")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        parts, size = [], 0
        async for part in response.aiter_stream():
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    def _checked(self, text: str, of: httpx.URL | None = None) -> httpx.URL:
        """A URL that may be asked; `of` is what redirects to it."""
        if not text or len(text) > MAX_URL_CHARS:
            raise _refused(f"must be a URL of at most {MAX_URL_CHARS} characters")
        try:
            url = httpx.URL(text) if of is None else of.join(text)
            host = url.raw_host.decode("ascii").lower().removesuffix(".")
        except (httpx.InvalidURL, ValueError):
            raise _refused("is no URL") from None
        if url.scheme not in ("http", "https") or not host:
            raise _refused("must begin with http:// or https:// and a host")
        if of is not None and (of.scheme, url.scheme) == ("https", "http"):
            raise _refused("redirects from https to http")
        if url.userinfo:
            raise _refused("must not hold a name or a password")
        if (url.port or {"http": 80, "https": 443}[url.scheme]) not in self._settings.ports:
            ports = ", ".join(map(str, self._settings.ports))
            raise _refused(f"port {url.port} is not one that pictures are fetched from ({ports})")
        if not self._settings.names(host):
            raise _refused(f"{host} is not a host that pictures are fetched from")
        return url

    def _too_large(self) -> ImageError:
        message = f"the picture is larger than the limit of {self._max_bytes} bytes"
        return ImageError("image_too_large", message, param="image", limit=self._max_bytes)


def _headers(target: httpx.URL) -> list[tuple[bytes, bytes]]:
    return [
        (b"Host", target.netloc),
        (b"User-Agent", f"hivlp/{version('hivlp')}".encode()),
        (b"Accept", b"image/*"),
        (b"Accept-Encoding", b"identity"),
    ]


def _header(response: httpcore.Response, name: bytes) -> str:
    """The value of a header, or nothing."""
    found = (value for known, value in response.headers if known.lower() == name)
    return next(found, b"").decode("latin-1").strip()


def _refused(why: str) -> InputError:
    return InputError("url_not_allowed", f"image: {why}", param="image")


def _failed(target: httpx.URL, why: str) -> InputError:
    return InputError("fetch_failed", f"image: {target.host} {why}", param="image")

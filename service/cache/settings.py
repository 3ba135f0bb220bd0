"""Settings of the answer cache: the tier in this process, and the one that processes share."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

SCHEMES = ("redis", "rediss", "unix")
# What may follow the `?` of a URL: the client takes many more, which would go against what is set
# here (time-outs, retries, the size of the pool) or change what it reads.
URL_OPTIONS = frozenset(
    {"db", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"}
)
MIB = 1 << 20


def checked_url(url: SecretStr) -> SecretStr:
    """The URL of a Redis. Raises ValueError, in words that hold nothing of the URL but options."""
    try:
        parts = urlsplit(url.get_secret_value())
        place = parts.path if parts.scheme == "unix" else parts.hostname
        database = "" if parts.scheme == "unix" else parts.path.strip("/")
        _ = parts.port  # raises for one that is none
    except ValueError:
        raise ValueError("its host or port can't be read") from None
    if parts.scheme not in SCHEMES or not place:
        raise ValueError("must be redis://HOST, rediss://HOST or unix:///PATH") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options.keys() - URL_OPTIONS:
        raise ValueError(f"takes no option {name!r}; known are {', '.join(sorted(URL_OPTIONS))}")
    database = options.get("db", database or "0")
    if not (database.isascii() and database.isdigit()):
        raise ValueError("its database must be a number")
    return url


class CacheSettings(BaseModel):
    """Answers kept in this process (`max_bytes`, 0 turns it off), and where `redis_url` is given
    in a Redis besides, for all processes that share it.

    A search waits `redis_timeout_ms` for Redis at most. `breaker_failures` questions of the last
    twice as many that fail, within `breaker_window_s`, open the breaker: Redis isn't asked then
    until a trial, every `breaker_retry_s`, has succeeded. Only trials, and no search, wait
    `redis_connect_timeout_ms` for a connection.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    max_bytes: int = Field(default=64 * MIB, ge=0)
    ttl_s: float = Field(default=600.0, gt=0, le=30 * 86_400)
    redis_url: Annotated[SecretStr, AfterValidator(checked_url)] | None = None
    redis_prefix: str = Field(default="hivlp:", pattern=r"^[\x21-\x7e]{0,64}$")
    redis_timeout_ms: float = Field(default=20.0, gt=0, le=1_000)
    redis_connect_timeout_ms: float = Field(default=1_000.0, gt=0, le=60_000)
    redis_connections: int = Field(default=8, ge=1, le=1_024)
    redis_max_value_bytes: int = Field(default=MIB, ge=1_024, le=64 * MIB)
    breaker_failures: int = Field(default=5, ge=1, le=1_000)
    breaker_window_s: float = Field(default=10.0, gt=0, le=3_600)
    breaker_retry_s: float = Field(default=1.0, ge=0.01, le=3_600)

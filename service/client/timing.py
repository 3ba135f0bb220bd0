"""How long to wait, and when to try again. Plain values; nothing here sleeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from hivlp.service.client.errors import ClientError, Overloaded, Unavailable, Unreachable

# What a second try may mend. A time-out isn't: the service is slow, and has the request already.
PASSING = (Overloaded, Unavailable, Unreachable)
_SECONDS = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: for a connection, between pieces of a request or answer, and for all of a call.

    `total_s` covers every try and the waits between them.
    """

    connect_s: float = 5.0
    read_s: float = 30.0
    total_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "read_s", "total_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")

    def within(self, left_s: float) -> httpx.Timeout:
        """The time-outs of one try that has `left_s` seconds."""
        wait_s = min(self.read_s, left_s)
        connect_s = min(self.connect_s, left_s)
        return httpx.Timeout(connect=connect_s, read=wait_s, write=wait_s, pool=left_s)


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `tries` tries of a call, 1 for no second one.

    Before the n-th retry a random wait of up to `first_s` x 2^(n-1) seconds, at most `longest_s`
    (AWS's "full jitter"), on top of what the service asked for with Retry-After: many clients that
    were refused together must not come back together.
    """

    tries: int = 4
    first_s: float = 0.1
    longest_s: float = 5.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries: {self.tries} is not above 0")
        if not 0 <= self.first_s <= self.longest_s:
            raise ValueError(f"first_s: {self.first_s} is not between 0 and longest_s")

    def wait_s(self, error: ClientError, tries: int, drawn: float) -> float | None:
        """Seconds until the next try, or None for none; `drawn` is random, 0 to 1."""
        if tries >= self.tries or not isinstance(error, PASSING):
            return None
        backoff_s = min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 60))
        return (error.retry_after_s or 0.0) + drawn * backoff_s


DEFAULT_TIMEOUTS = Timeouts()
DEFAULT_RETRIES = Retries()


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None if it says neither."""
    if header is None:
        return None
    if _SECONDS.fullmatch(header.strip()):
        return float(header)
    try:
        then = parsedate_to_datetime(header)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - datetime.now(UTC)).total_seconds())

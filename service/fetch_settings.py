"""Settings of pictures by URL, which are off until hosts are named."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MIB = 1 << 20
HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def _host(text: str) -> str:
    name = text.lower().removesuffix(".")
    if HOST.fullmatch(name) is None and not _is_address(name):
        raise ValueError("must be a host name, *.NAME for all below it, or * for any")
    return name


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class FetchSettings(BaseModel):
    """Pictures are fetched from `hosts` alone: names, `*.NAME` for all below a name, `*` for any.

    Whatever the name, its addresses must be public. `timeout_s` is for all of a picture, redirects
    included; `concurrency` are fetched at once, beyond which the answer is 429.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = ()
    ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = (80, 443)
    max_bytes: int = Field(default=10 * MIB, ge=1_024)
    timeout_s: float = Field(default=10.0, gt=0, le=120)
    max_redirects: int = Field(default=3, ge=0, le=20)
    concurrency: int = Field(default=8, ge=1, le=1_000)

    def names(self, host: str) -> bool:
        """Whether this host was named."""
        return any(
            name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))
            for name in self.hosts
        )

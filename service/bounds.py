"""Bounds of connections: how many, how long a head may be and how slow, how slow a reader."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KIB = 1 << 10
# In the state of a request that came over a connection beyond `max`: the most there may be.
CROWDED = "crowded"
# In the state of every request: holds an answer of so many bytes to its connection's account.
WAITING = "waiting"


class ConnectionSettings(BaseModel):
    """Bounds of connections. `head_timeout_s` counts from a head's first byte, and from when a
    connection was made; `answer_timeout_s` is how long a client may leave an answer unread.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max: int = Field(default=512, ge=1, le=100_000)
    max_head_bytes: int = Field(default=64 * KIB, ge=KIB, le=1024 * KIB)
    max_headers: int = Field(default=100, ge=8, le=10_000)
    head_timeout_s: float = Field(default=10.0, gt=0, le=600)
    # Clients should let go of an idle connection before this.
    keep_alive_s: float = Field(default=5.0, gt=0, le=3_600)
    answer_timeout_s: float = Field(default=30.0, gt=0, le=3_600)

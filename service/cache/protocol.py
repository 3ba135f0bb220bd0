"""The answer cache: bytes by key, in this process or in Redis, behind the same two methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol


class AnswerCache(Protocol):
    """Never raises for trouble of its own: a cache that can't answer has nothing to say.

    Each counts its own results in the metrics, under the name of its tier.
    """

    async def get(self, key: str) -> bytes | None:
        """What was kept under `key`, or None."""

    async def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`, now or soon, for as long as this cache keeps things."""


class SharedCache(AnswerCache, Protocol):
    """One outside of this process, which may come and go while the app runs."""

    def watches(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What must run as long as the app does, by name; nothing is asked before it runs."""

    async def close(self) -> None:
        """End what is under way, soon, and close the connections."""

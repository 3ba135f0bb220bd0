"""The answer cache: bytes by key. In-process today; Redis fits behind the same two methods."""

from __future__ import annotations

from typing import Protocol


class AnswerCache(Protocol):
    """Never raises for trouble of its own: a cache that can't answer has nothing to say."""

    @property
    def tier(self) -> str:
        """The name of this cache in metrics."""

    async def get(self, key: str) -> bytes | None:
        """What was kept under `key`, or None."""

    async def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`, for as long as this cache keeps things."""

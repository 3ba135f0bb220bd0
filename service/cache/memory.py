"""The cache of one process: bounded in bytes and in age, least recently used first out."""

from __future__ import annotations

from collections.abc import Callable

from cachetools import TTLCache

TIER = "memory"
# What an entry costs beside its value: key, link and dictionary slot, roughly.
OVERHEAD_BYTES = 400


class MemoryCache:
    """An AnswerCache in this process. Used from the event loop alone. `max_bytes` 0 keeps none.

    `count` is told of each look-up: hit or miss.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._kept: TTLCache[str, bytes] = TTLCache(max_bytes, ttl_s, getsizeof=_size)
        self._count = count

    async def get(self, key: str) -> bytes | None:
        """What was kept under `key`, or None."""
        kept = self._kept.get(key)
        self._count("miss" if kept is None else "hit")
        return kept

    async def set(self, key: str, value: bytes) -> None:
        """Keep `value`, unless it alone is larger than the cache."""
        if _size(value) <= self._kept.maxsize:
            self._kept[key] = value


def _size(value: bytes) -> int:
    return len(value) + OVERHEAD_BYTES

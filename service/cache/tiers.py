"""The tiers of the answer cache: this process first, then the Redis that processes share, if any.

The choice of what is behind each sits here alone; redis is imported only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from hivlp.models.errors import MissingExtra
from hivlp.service.cache import memory
from hivlp.service.cache.memory import MemoryCache
from hivlp.service.cache.protocol import AnswerCache, SharedCache
from hivlp.service.cache.settings import CacheSettings
from hivlp.service.metrics import Metrics
from hivlp.service.timeline import Timeline


class Tiers:
    """Looks in the near tier, then in the far one; what the far one has is kept near."""

    def __init__(self, near: AnswerCache, far: SharedCache | None = None) -> None:
        self._near = near
        self._far = far

    async def get(self, key: str, timeline: Timeline) -> bytes | None:
        """What was kept under `key`, or None. Asking the far tier is a stage of the search."""
        kept = await self._near.get(key)
        if kept is not None or self._far is None:
            return kept
        with timeline.measure("cache"):
            kept = await self._far.get(key)
        if kept is not None:
            await self._near.set(key, kept)
        return kept

    async def set(self, key: str, value: bytes) -> None:
        """Keep `value` in every tier."""
        await self._near.set(key, value)
        if self._far is not None:
            await self._far.set(key, value)

    def watches(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What must run as long as the app does, by name."""
        return {} if self._far is None else self._far.watches()

    async def close(self) -> None:
        """Close the connections of the far tier."""
        if self._far is not None:
            await self._far.close()


def make_tiers(settings: CacheSettings, metrics: Metrics) -> Tiers:
    """The tiers that settings ask for.

    Raises MissingExtra where a Redis is asked for and its client isn't installed.
    """

    def count(result: str) -> None:
        metrics.cache_requests.labels(memory.TIER, result).inc()

    near = MemoryCache(settings.max_bytes, settings.ttl_s, count)
    if settings.redis_url is None:
        return Tiers(near)
    try:
        from hivlp.service.cache.redis import RedisCache
    except ModuleNotFoundError as error:
        raise MissingExtra("redis", "redis") from error
    return Tiers(near, RedisCache(settings.redis_url.get_secret_value(), settings, metrics))

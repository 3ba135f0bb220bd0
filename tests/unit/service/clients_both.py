"""Both clients behind one face, so that one test body holds for both."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hivlp.service.client import AsyncClient, Client

BOTH = ("blocking", "asyncio")


class Opened(Protocol):
    """Opens a client of a URL for the length of a block."""

    def __call__(self, url: str, **options: Any) -> contextlib.AbstractContextManager[Any]: ...


class Awaited:
    """An `AsyncClient` whose methods are waited for."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self._runner.run(found(*args, **options))

    def __repr__(self) -> str:
        return repr(self._client)

    def with_options(self, **options: Any) -> Awaited:
        return Awaited(self._client.with_options(**options), self._runner)


@contextlib.contextmanager
def awaited(url: str, **options: Any) -> Iterator[Any]:
    with asyncio.Runner() as runner:
        client = Awaited(AsyncClient(url, **options), runner)
        try:
            yield client
        finally:
            client.close()


def opening(kind: str) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """What opens a client of this kind."""
    return Client if kind == "blocking" else awaited

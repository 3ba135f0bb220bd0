"""A client that leaves: what is done for it is cancelled, wherever it has come to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

WATCH_AFTER_S = 0.02
"""Nobody is watched before: most answers are there by then, and watching isn't free."""

T = TypeVar("T")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or ClientDisconnect as soon as the client has left.

    The body of the request must have been read: what comes after it can only be its end.
    """
    own = asyncio.current_task()
    assert own is not None
    loop = asyncio.get_running_loop()
    watches: list[asyncio.Task[None]] = []
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        own.cancel()

    timer = loop.call_later(WATCH_AFTER_S, lambda: watches.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if left and own.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        for one in watches:
            one.cancel()

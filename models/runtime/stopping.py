"""SIGTERM as an orderly way out: what was begun is let go of, as after Ctrl-C.

Without this a process that is told to end leaves its locks to the system and its temporary folders
to whoever comes next.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM_CODE = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever handles Ctrl-C handles it."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread when SIGTERM comes, once: then what ends isn't disturbed.

    Does nothing in any other thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

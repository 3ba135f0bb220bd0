"""Threads that let searches go first: those that load, publish and read in the background."""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 10


def behind() -> None:
    """Make the calling thread give way to others where cores are short; as an initializer.

    On Linux a thread has a niceness of its own; elsewhere nothing is changed.
    """
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

"""Changing an index when its turn comes: within a deadline, and only while the service runs."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Sequence

from hivlp.index.errors import IndexBusy
from hivlp.index.snapshot.amend import LOCK, Amended, amend
from hivlp.index.snapshot.changes import Change
from hivlp.index.snapshot.store import SnapshotStore

SLICE_S = 0.2
"""How long is waited for a turn without a look whether the service is being stopped."""
LOOK_S = 0.01


def amend_in_turn(
    store: SnapshotStore,
    name: str,
    changes: Sequence[Change],
    space: str,
    *,
    wait_s: float,
    stop: threading.Event,
) -> Amended:
    """`amend`, once whoever else changes the index is done. Blocking.

    Raises IndexBusy after `wait_s` seconds, or within SLICE_S once `stop` is set; else as `amend`.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            left = max(0.0, until - time.monotonic())
            _await_turn(store, name, min(SLICE_S, left))
            return amend(store, name, changes, space)
        except IndexBusy:
            if stop.is_set() or time.monotonic() >= until:
                raise


def _await_turn(store: SnapshotStore, name: str, wait_s: float) -> None:
    """Wait until nobody holds the index's turn. Raises IndexBusy, SnapshotMissing, OSError."""
    store.current(name)
    until = time.monotonic() + wait_s
    with (store.root / name / LOCK).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    message = f"index {name!r} is being changed by another process; try again"
                    raise IndexBusy(message) from None
                time.sleep(LOOK_S)
            else:
                return

"""Changing an index when its turn comes: within a deadline, and only while the service runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hivlp.index.errors import IndexBusy
from hivlp.index.snapshot.amend import Amended, amend
from hivlp.index.snapshot.changes import Change
from hivlp.index.snapshot.store import SnapshotStore

SLICE_S = 0.2
"""How long is waited for a turn without a look whether the service is being stopped."""


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
    began = time.monotonic()
    while True:
        left_s = max(0.0, began + wait_s - time.monotonic())
        try:
            return amend(store, name, changes, space, wait_s=min(SLICE_S, left_s))
        except IndexBusy as error:
            waited_s = time.monotonic() - began
            if stop.is_set() or waited_s >= wait_s:
                raise IndexBusy(name, round(waited_s, 1)) from error

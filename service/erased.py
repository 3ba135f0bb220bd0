"""When items of an index were erased: whoever has an older version open is waited for."""

from __future__ import annotations

import math

from hivlp.index.snapshot.names import ERASED
from hivlp.index.snapshot.store import SnapshotStore


def erased_s(store: SnapshotStore, name: str) -> float:
    """In seconds since 1970, the last time; -inf for never."""
    try:
        return (store.folder(name) / ERASED).stat().st_mtime
    except FileNotFoundError:
        return -math.inf
    except OSError:  # who knows
        return math.inf

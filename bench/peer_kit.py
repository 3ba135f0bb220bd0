"""What the peers of `peers.py` share: where an index is kept, blocks of rows, a search's form."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import WORK

K = 10
BLOCK = 50_000

Search = Callable[[np.ndarray, Any], np.ndarray]
"""One query (1, d) float32 and a knob to (10,) row numbers."""


def file_of(name: str, rows: int, suffix: str) -> Path:
    """Where a peer is kept."""
    return WORK / f"{name}-{rows}{suffix}"


def said(name: str, rows: int, started: float) -> None:
    """Say how far a long build is."""
    print(f"  {name}: {rows} rows, {time.monotonic() - started:.0f} s", flush=True)


def blocks(rows: np.ndarray) -> list[np.ndarray]:
    """Views of at most BLOCK rows."""
    return [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]


def sample(rows: np.ndarray, count: int) -> np.ndarray:
    """About `count` rows, evenly spaced, in memory."""
    return np.ascontiguousarray(rows[:: max(1, len(rows) // count)])

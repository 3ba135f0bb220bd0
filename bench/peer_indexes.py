"""The peers by name: how each is built, kept, opened and asked for the ten nearest rows of a query.

A peer is built once into a file or folder under the work folder and skipped when it is there. Its
ladder holds the knobs that trade recall for time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peer_graphs as graphs
import peer_lists as lists
from peer_kit import Search


@dataclass(frozen=True)
class Peer:
    """How to make a peer's files, how to open them, and the knobs to try."""

    suffix: str
    build: Callable[[np.ndarray, Path, int], None]
    open: Callable[[Path, Any], Search]
    ladder: Sequence[Any]


BEAMS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

PEERS = {
    "hnswlib": Peer(".hnswlib", graphs.build_hnswlib, graphs.open_hnswlib, BEAMS),
    "hnswlib links": Peer(".hnswlib", graphs.build_hnswlib_links, graphs.open_hnswlib, BEAMS),
    "usearch f16": Peer(".usearch", graphs.build_usearch, graphs.open_usearch, BEAMS),
    "vamana": Peer("", graphs.build_vamana, graphs.open_vamana, graphs.WINDOWS),
    "vamana int8": Peer("", graphs.build_vamana8, graphs.open_vamana8, graphs.AGAIN),
    "panorama flat": Peer(".faiss", lists.build_panorama, lists.open_panorama, ("exact",)),
    "scann": Peer("", lists.build_scann, lists.open_scann, lists.SCANN),
    "ivf rabitq": Peer(".faiss", lists.build_rabitq, lists.open_lists, lists.LISTS),
    "ivf rabitq4": Peer(".faiss", lists.build_rabitq4, lists.open_lists, lists.LISTS),
    "ivf pq192x4fs": Peer(".faiss", lists.build_ivfpq, lists.open_lists, lists.LISTS),
}

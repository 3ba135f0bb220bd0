"""Read a version's files through before it serves: a cold page costs its first query a disk read.

    done = prefault(snapshot, available_memory())
    log.info(done.to_text())

Notable: a file is brought in through this process's own mappings of it (`MADV_POPULATE_READ`, Linux
5.14), numpy's and FAISS's alike, so that not even the page tables are left to fill. Where that
can't be, its blocks are read, which leaves the pages in the system's cache. What doesn't fit the
budget is left to the disk: level 1's codes, the graphs and the norms come first, rows last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.models.runtime.pages import advise
from hivlp.models.stopping import go_on

POPULATE_READ = 22
"""MADV_POPULATE_READ; Python has no name for it."""
BLOCK = 8 << 20
PIECE = 64 << 20
SHARE = 0.9
"""Of the memory that can be had, so much may be filled."""
MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Prefaulted:
    """Files that were read through, and those left to the disk because they didn't fit."""

    read: tuple[str, ...]
    left: tuple[str, ...]
    bytes_read: int
    seconds: float

    def to_text(self) -> str:
        """One line for a log."""
        size = self.bytes_read / 2**20
        done = f"{len(self.read)} files, {size:.1f} MiB, read through in {self.seconds:.1f} s"
        return f"{done}; left to the disk: {', '.join(self.left)}" if self.left else done


def prefault(snapshot: Snapshot, available_bytes: int | None) -> Prefaulted:
    """Read an open snapshot's files through, the most needed first, within `SHARE` of the memory.

    `available_bytes` None: no bound is known. A file that doesn't fit is passed over, smaller ones
    behind it may still be read. Raises OSError for a file that can't be read.
    """
    began = time.monotonic()
    room = None if available_bytes is None else int(SHARE * available_bytes)
    read, left, total = [], [], 0
    for name in by_need(snapshot):
        size = snapshot.manifest.files[name].size_bytes
        if room is not None and total + size > room:
            left.append(name)
            continue
        read_through(snapshot.path / name)
        read.append(name)
        total += size
    return Prefaulted(tuple(read), tuple(left), total, time.monotonic() - began)


def by_need(snapshot: Snapshot) -> list[str]:
    """The snapshot's files, those first that each query reads most of."""

    walked = {side for side, record in snapshot.manifest.sides.items() if record.graph_levels}

    def need(name: str) -> tuple[int, str]:
        last = Path(name).name
        kinds = (
            last == "level1.faiss",
            last.endswith(".hnsw"),
            last == "inverse_norms.npy",
            last == "rows.npy" and Path(name).parent.name in walked,  # each walk reads them
            last == "level1.maskable.faiss",
            last in ("row_items.npy", "item_hashes.npy", "item_ordinals.npy"),
            last.endswith(".arrow"),
            last.endswith(".faiss"),
            last != "states.npy",  # a few rows of many are read, and only to re-rank
        )
        return next((place for place, is_it in enumerate(kinds) if is_it), len(kinds)), name

    return sorted(snapshot.manifest.files, key=need)


def read_through(file: Path) -> None:
    """Bring a whole file into memory, through this process's mappings of it where that can be."""
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        mapped = list(mappings(file))
        if mapped and all(advise(*piece, POPULATE_READ) for piece in _pieces(mapped)):
            return
        buffer = bytearray(BLOCK)
        while stream.readinto(buffer):
            go_on()


def _pieces(mapped: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Mappings in pieces of `PIECE` bytes; between them it may be stopped."""
    for begin, end in mapped:
        for address in range(begin, end, PIECE):
            go_on()
            yield address, min(address + PIECE, end)


def mappings(file: Path) -> Iterator[tuple[int, int]]:
    """Where this process has mapped a file: (first address, address behind the last)."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no such thing on this platform
        return
    path = os.path.realpath(file)
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == path:
            begin, end = fields[0].split("-")
            yield int(begin, 16), int(end, 16)

"""Whether a disk has room for what is about to be written: asked first, told at once.

    check_room({staging.path: 3_400_000_000}, "index 'default', 1000000 image rows")

A part of what is free is left to others: the estimate's error, logs, items that are put meanwhile.
Quotas aren't seen, nor what others write: a disk may still fill up half-way, and that fails as any
write does.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hivlp.index.errors import NoRoom

KEPT_SHARE = 0.1
KEPT_BYTES = 16 << 20
"""What is left free: this share of what is needed, and at least so many bytes."""


def check_room(needs: Mapping[Path, int], what: str) -> None:
    """`needs`: bytes by the folder that they are to be written below, there already or not.

    Folders of one file system share its room. Raises NoRoom, naming the folder that needs most.
    """
    by_disk: dict[int, dict[Path, int]] = {}
    for folder, need in needs.items():
        there = _existing(folder)
        wanted = by_disk.setdefault(there.stat().st_dev, {})
        wanted[there] = wanted.get(there, 0) + need
    for wanted in by_disk.values():
        folder, need = max(wanted, key=lambda path: wanted[path]), sum(wanted.values())
        free, kept = free_bytes(folder), kept_bytes(need)
        if need and free is not None and free < need + kept:
            raise NoRoom(what, folder, need_bytes=need, free_bytes=free, kept_bytes=kept)


def kept_bytes(need: int) -> int:
    """How much is left free beside so many bytes."""
    return max(KEPT_BYTES, round(KEPT_SHARE * need))


def free_bytes(folder: Path) -> int | None:
    """What may still be written on a folder's file system; None where that doesn't say."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else None


def _existing(folder: Path) -> Path:
    """The folder, or the deepest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())

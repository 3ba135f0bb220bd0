"""How much memory this process may still take: what a container grants, not what the host has."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hivlp.models.runtime.cgroups import MOUNT, group, read, with_parents


def available_memory(*, root: Path = Path("/")) -> int | None:
    """Bytes that can be had without pushing others out, file pages counted as free; None: unknown.

    The least of what the system has and of what every control group (v1 or v2) that the process is
    in has left. `root` is where /proc and /sys are found.
    """
    known = [left for left in (_system(root), *_v2(root), *_v1(root)) if left is not None]
    return max(0, min(known)) if known else None


def _system(root: Path) -> int | None:
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and (words := value.split()) and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _v2(root: Path) -> list[int | None]:
    folders = with_parents(root / MOUNT, group(root, controller=""))
    names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
    return [_left(folder, *names) for folder in folders]


def _v1(root: Path) -> list[int | None]:
    folders = with_parents(root / MOUNT / "memory", group(root, controller="memory"))
    files = ("total_inactive_file", "total_active_file")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", files)
    return [_left(folder, *names) for folder in folders]


def _left(folder: Path, limit: str, used: str, reclaimable: Collection[str]) -> int | None:
    """Limit less use, where both are numbers; pages of files can be taken back."""
    most, now = read(folder / limit).strip(), read(folder / used).strip()
    if not (most.isdigit() and now.isdigit()):
        return None
    files = 0
    for line in read(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in reclaimable and words[1].isdigit():
            files += int(words[1])
    return int(most) - int(now) + files

"""Writing that survives a power cut: what is renamed into place has reached the disk before."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file below `folder`, then the folders, deepest first."""
    inside = sorted(folder.rglob("*"), key=lambda path: len(path.parts), reverse=True)
    for path in (*inside, folder):
        sync(path)


def replace_text(target: Path, text: str) -> None:
    """Replace a small file in one step: readers see the old text or the new one."""
    replace_bytes(target, text.encode())


def replace_bytes(target: Path, data: bytes) -> None:
    """Replace a file in one step, durably: readers see the old bytes or the new ones."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, target)  # noqa: PTH105  atomic by name, on purpose
    sync(target.parent)

"""Writing that survives a power cut: what is renamed into place has reached the disk before."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, already: Collection[str] = ()) -> None:
    """Flush every file below `folder`, then the folders, deepest first.

    `already`: files, relative to the folder, that have reached the disk under another name.
    """
    inside = sorted(folder.rglob("*"), key=lambda path: len(path.parts), reverse=True)
    durable = {folder / name for name in already}
    for path in (*inside, folder):
        if path not in durable:
            sync(path)


def replace_text(target: Path, text: str) -> None:
    """Replace a small file in one step: readers see the old text or the new one."""
    replace_bytes(target, text.encode())


def replace_bytes(target: Path, data: bytes) -> None:
    """Replace a file in one step, durably: readers see the old bytes or the new ones."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)  # noqa: PTH105  atomic by name, on purpose
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)

"""File systems of their own for a test, where mounting is permitted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system in memory of a given size at `folder`; skips the test where none is to be."""
    folder.mkdir(exist_ok=True)
    if trouble := _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)):
        pytest.skip(f"mounting isn't permitted here: {trouble}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def remount(folder: Path, options: str) -> None:
    """Change a mount that `tmpfs` made: its size, or to `ro`."""
    trouble = _mount("-o", f"remount,{options}", str(folder))
    assert not trouble, trouble


def _mount(*arguments: str) -> str:
    """Mount; returns what went wrong, or nothing."""
    try:
        done = subprocess.run(
            ["mount", *arguments], capture_output=True, text=True, check=False, timeout=30
        )
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""

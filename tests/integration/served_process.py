"""`hivlp serve` as a process of its own, for the length of a block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

READY = re.compile(r"hivlp is ready: (http://\S+)")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hivlp.service.main", "serve", *arguments]


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HIVLP_")}
    return {**clean, **more}


@contextmanager
def served(
    home: Path, said: IO[str] | None = None, **more: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it says that it is ready; killed in the end.

    What it logs goes to `said`.
    """
    arguments = command("--home", str(home), "--port", "0")
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if said is None else said,
        text=True,
        env=environment(**more),
    ) as process:
        try:
            assert process.stdout is not None
            found = READY.search(process.stdout.readline())
            assert found is not None
            yield process, found.group(1)
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """The processes that serve: those that this one began, but for Python's own tracker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_text()
            except (OSError, IndexError):  # gone meanwhile
                continue
            if parent == pid and "spawn_main" in words:
                found.append(int(entry.name))
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether a process runs: not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

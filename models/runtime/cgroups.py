"""Where the control groups of this process are found: what a container grants is written there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

MOUNT = Path("sys/fs/cgroup")


def group(root: Path, *, controller: str) -> str:
    """The process's group for a v1 controller, or with "" its v2 group; "/" where unknown."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return "/"


def with_parents(mount: Path, group: str) -> list[Path]:
    """The group's folder and all those above it: each may hold a smaller quota."""
    inside = PurePosixPath(group.lstrip("/"))
    if ".." in inside.parts:  # the group lies outside what this namespace shows
        return [mount]
    return [mount / folder for folder in (inside, *inside.parents)]


def read(path: Path) -> str:
    """A small file's text; empty where it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def oom_kills(*, root: Path = Path("/")) -> int:
    """How many processes of this one's v2 group were killed for want of memory, as far as told."""
    events = root / MOUNT / group(root, controller="").lstrip("/") / "memory.events"
    for line in read(events).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return 0

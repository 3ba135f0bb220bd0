"""How indexes, versions and everything beside them are named on disk."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from hivlp.models.errors import InputError

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
VERSION_PATTERN = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9]{6}")
VERSION_FORMAT = "%Y%m%dT%H%M%S-%f"
POINTER = "CURRENT"
QUARANTINE = "QUARANTINE"
ERASED = "ERASED"
ERASING = ".erasing"
LOCK = ".lock"
BUILDING = ".building-"
PULLING = ".pulling-"
REMOVING = ".removing-"


def check_index_name(name: str) -> str:
    """The name itself, or InputError."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise InputError(
            "invalid_index",
            f"{name!r} is no index name: lower-case letters, digits, - and _, at most 64, "
            "beginning with a letter or digit",
            param="index",
            limit=64,
        )
    return name


def is_version(name: str) -> bool:
    """Whether a name is a version's, and the moment it names exists."""
    if VERSION_PATTERN.fullmatch(name) is None:
        return False
    try:
        version_time(name)
    except ValueError:
        return False
    return True


def version_time(version: str) -> datetime:
    """The moment a version is named after. Raises ValueError."""
    return datetime.strptime(version, VERSION_FORMAT).replace(tzinfo=UTC)


def versions_in(folder: Path) -> list[str]:
    """Published versions in the folder of an index, oldest first; empty where there is none."""
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path.name for path in found if VERSION_PATTERN.fullmatch(path.name))

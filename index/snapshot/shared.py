"""Files a new version shares with a published one as hard links: neither copied nor hashed again.

    shared = share_files(store.path(name, version), staging.path, names)
    store.publish(staging, shared=shared)

Each version owns its names, so either may be removed; the bytes are the same, so a damaged one
damages both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.errors import SnapshotCorrupt
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest


@dataclass(frozen=True, slots=True)
class Shared:
    """`files` are said to be hard links to the files of those names in `version`."""

    version: str
    files: frozenset[str]


def share_files(source: Path, target: Path, files: Iterable[str]) -> Shared:
    """Link data files of the published version in `source` into `target`, a folder being filled.

    Raises OSError where the file system has no hard links.
    """
    names = frozenset(files)
    for name in sorted(names):
        assert name != MANIFEST_NAME, name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source / name, target / name)
    return Shared(source.name, names)


def check_shared(
    shared: Shared, target: Path, new: SnapshotManifest, source: Path, old: SnapshotManifest
) -> None:
    """Check that shared files are what they are said to be: one file, recorded alike in both.

    Raises SnapshotCorrupt naming the first that isn't.
    """
    for name in sorted(shared.files):
        reason = None
        if name not in old.files or new.files.get(name) != old.files[name]:
            reason = f"is recorded otherwise in version {shared.version}"
        elif not _same_file(target / name, source / name):
            reason = f"is not the file of version {shared.version}"
        if reason is not None:
            raise SnapshotCorrupt(new.index, new.version, name, reason)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except FileNotFoundError:
        return False

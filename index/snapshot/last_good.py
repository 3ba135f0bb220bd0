"""What is served when the active version fails: the newest one that is whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hivlp.index.backends.choose import Backend
from hivlp.index.errors import NoGoodVersion, SnapshotError, SnapshotMissing
from hivlp.index.snapshot.names import POINTER
from hivlp.index.snapshot.quarantine import Quarantined, from_error, is_lasting
from hivlp.index.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from hivlp.index.snapshot.store import SnapshotStore

log = logging.getLogger("hivlp.index")
ATTEMPTS = 5
"""How often a pointer that moves away from a version while it is opened is followed."""


def open_last_good(
    store: SnapshotStore, name: str, *, backend: Backend, hash_up_to_bytes: int | None
) -> tuple[Snapshot, list[Quarantined]]:
    """As `SnapshotStore.open_last_good`."""
    tried: dict[str, str] = {}
    passed: list[Quarantined] = []
    for version in _candidates(store, name):
        bad = {entry.version: entry for entry in _known(store, name)}
        if version in bad:
            passed.append(bad[version])
            tried[version] = bad[version].what
            continue
        try:
            opened = store.open(name, version, backend=backend, hash_up_to_bytes=hash_up_to_bytes)
        except (SnapshotError, OSError) as error:
            entry = from_error(version, error)
            tried[version] = entry.what
            if isinstance(error, SnapshotMissing) and not _is_active(store, name, version):
                continue  # of old activations, removed since
            if is_lasting(error):
                entry = store.quarantine(name).add(version, entry.file, entry.reason)
            passed.append(entry)
            continue
        return opened, passed
    raise NoGoodVersion(name, tried)


def _known(store: SnapshotStore, name: str) -> list[Quarantined]:
    try:
        return store.quarantine(name).entries()
    except SnapshotError as error:  # every version is checked as it is opened
        log.error("%s", error)
        return []


def _candidates(store: SnapshotStore, name: str) -> Iterator[str]:
    """Activations, newest first, then other versions, newest first.

    Raises SnapshotMissing where nothing was ever activated.
    """
    try:
        history = store.history(name)
    except SnapshotError as error:
        log.error("%s: the newest version that is whole is served", error)
    else:
        if not history:
            raise SnapshotMissing(name, POINTER, "no active version")
        seen: set[str] = set()
        for _ in range(ATTEMPTS):  # the active one may be superseded and removed meanwhile
            active = store.history(name)[-1]
            if active in seen:
                break
            seen.add(active)
            yield active
        yield from (v for v in dict.fromkeys(reversed(history)) if v not in seen)
        seen.update(history)
        yield from (v for v in reversed(store.versions(name)) if v not in seen)
        return
    yield from reversed(store.versions(name))


def _is_active(store: SnapshotStore, name: str, version: str) -> bool:
    try:
        return store.current(name) == version
    except SnapshotError:
        return False

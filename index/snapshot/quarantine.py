"""Versions that failed: remembered in `QUARANTINE` until a verification finds them right again.

The files of such a version stay where they are, for somebody may have it open. What a store that is
read-only can't record, this process remembers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hivlp.index.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotQuarantined,
)
from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.names import QUARANTINE, versions_in
from hivlp.index.snapshot.pointer import locked

log = logging.getLogger("hivlp.index")

PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EAGAIN}
)
"""Errors of the process or its rights, not of the files."""


class Quarantined(BaseModel):
    """One version that failed: at which file, why, and when (ISO 8601, UTC)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: str
    file: str
    reason: str
    time: datetime

    def to_text(self) -> str:
        """One line for a log or a list."""
        return f"{self.version}, {self.what}"

    @property
    def what(self) -> str:
        """File and reason."""
        return f"{self.file}: {self.reason}" if self.file else self.reason


class _Contents(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    quarantined: tuple[Quarantined, ...]


def found_wrong(version: str, file: str, reason: str) -> Quarantined:
    """The record of a version that failed now."""
    now = datetime.now(UTC).replace(microsecond=0)
    return Quarantined(version=version, file=file, reason=reason, time=now)


def from_error(version: str, error: SnapshotError | OSError) -> Quarantined:
    """The record of a version that could not be opened."""
    if isinstance(error, SnapshotCorrupt):
        return found_wrong(version, error.file, error.reason.removeprefix(f"{error.file}: "))
    if isinstance(error, SnapshotError):
        return found_wrong(version, "", error.reason)
    return found_wrong(version, Path(str(error.filename or "")).name, str(error))


def is_lasting(error: SnapshotError | OSError) -> bool:
    """Whether the files are at fault, not want of memory, descriptors or rights just now.

    Nor is a manifest that is sealed and not understood: another release of this program wrote it.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, ValidationError):
        return False
    if isinstance(cause, OSError):
        return cause.errno not in PASSING
    return isinstance(error, SnapshotCorrupt | SnapshotMissing)


class Quarantine:
    """The quarantine of one index, whose folder is given. Safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unrecorded: dict[str, Quarantined] = {}

    def entries(self) -> list[Quarantined]:
        """What is quarantined. Raises SnapshotError where that can't be read."""
        recorded = {entry.version: entry for entry in _read(self._folder)}
        return list({**self._unrecorded, **recorded}.values())

    def refuse(self, version: str) -> None:
        """Raise SnapshotQuarantined if the version is in it."""
        for entry in self.entries():
            if entry.version == version:
                raise SnapshotQuarantined(self._folder.name, version, entry.file, entry.reason)

    def add(self, version: str, file: str, reason: str) -> Quarantined:
        """Record that a version failed, durably where that can be. Logs it.

        Versions of which that file is a hard link have the same bytes, and are quarantined too.
        """
        entry = found_wrong(version, file, reason)
        same = [
            found_wrong(other, file, f"one file with that of version {version}: {reason}")
            for other in self._sharing(version, file)
        ]
        for bad in (entry, *same):
            log.error("index %s: quarantined version %s", self._folder.name, bad.to_text())
        try:
            with locked(self._folder):
                new = {bad.version: bad for bad in (*same, entry)}
                others = [old for old in self._readable() if old.version not in new]
                _write(self._folder, [*others, *new.values()])
        except (OSError, SnapshotMissing) as error:
            log.error("index %s: only this process knows: %s", self._folder.name, error)
            self._unrecorded.update({bad.version: bad for bad in (entry, *same)})
        return entry

    def _sharing(self, version: str, file: str) -> list[str]:
        """Other versions whose file of this name is the same one on disk."""
        with contextlib.suppress(OSError):
            bad = (self._folder / version / file).lstat()
            if stat.S_ISREG(bad.st_mode):
                others = (other for other in versions_in(self._folder) if other != version)
                return [v for v in others if _is_same(self._folder / v / file, bad)]
        return []

    def lift(self, version: str) -> None:
        """Forget a version that was found right."""
        if version in {entry.version for entry in self.entries()}:
            self._unrecorded.pop(version, None)
            with locked(self._folder):
                self.forget({version})

    def forget(self, versions: Collection[str]) -> None:
        """Forget versions that were removed; by whoever holds the index's lock."""
        recorded = self._readable()
        kept = [entry for entry in recorded if entry.version not in versions]
        if kept != recorded:
            _write(self._folder, kept)

    def _readable(self) -> list[Quarantined]:
        try:
            return _read(self._folder)
        except SnapshotError as error:
            log.error("%s: it is begun anew", error)
            return []


def _is_same(path: Path, other: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), other)
    except OSError:
        return False


def _read(folder: Path) -> list[Quarantined]:
    try:
        data = (folder / QUARANTINE).read_bytes()
        return list(_Contents.model_validate_json(data).quarantined)
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        reason = f"unreadable, remove it and verify the versions: {str(error).splitlines()[0]}"
        raise SnapshotError(folder.name, QUARANTINE, reason) from error


def _write(folder: Path, entries: Iterable[Quarantined]) -> None:
    text = _Contents(quarantined=tuple(entries)).model_dump_json(indent=1)
    replace_text(folder / QUARANTINE, text + "\n")

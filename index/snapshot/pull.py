"""Versions from a folder or an object store into a local store, and the other way.

    pull(store, "s3://bucket/indexes", "default")     # what is active there, verified, activated
    push(store, "s3://bucket/indexes", "default")     # data files, then manifest, then pointer

Notable: a pull is visible when it is whole. What was fetched before an interruption is kept, by
hash; what a local version has already is linked, not fetched. The manifest comes from elsewhere, so
no name in it may lead out of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hivlp.index.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest, read_manifest
from hivlp.index.snapshot.names import check_index_name, is_version
from hivlp.index.snapshot.remote import Remote
from hivlp.index.snapshot.room import check_room
from hivlp.index.snapshot.staging import Staging
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import FileRecord, file_record
from hivlp.models.runtime.progress import Progress


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did; `kept` bytes lay there from a pull before, `linked` in another version.

    `already`: the version was published here before; `active`: it is the active one now.
    """

    index: str
    version: str
    already: bool
    active: bool
    fetched_bytes: int = 0
    linked_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did; `kept` bytes were there before."""

    index: str
    version: str
    sent_bytes: int
    kept_bytes: int


def pull(
    store: SnapshotStore,
    source: str,
    name: str,
    version: str | None = None,
    *,
    activate: bool = True,
    quiet: bool = False,
) -> PullReport:
    """Fetch a version (None: the one active there), verify it, publish it, activate it.

    Raises InputError, MissingExtra, NoRoom before anything is fetched, SnapshotMissing,
    SnapshotError, and SnapshotCorrupt naming the file that isn't what its manifest says; what was
    fetched stays for the next try.
    """
    check_index_name(name)
    remote = Remote.at(source)
    wanted = _active_there(remote, name) if version is None else version
    if not is_version(wanted):
        raise SnapshotMissing(name, wanted, "is no version; a version is YYYYMMDDTHHMMSS-ffffff")
    if wanted in store.versions(name):
        return _activated(store, name, wanted, activate)
    sealed = remote.small(name, wanted, MANIFEST_NAME)
    with store.stage_pull(name, wanted) as staging:
        if wanted in store.versions(name):  # another pull was quicker
            return _activated(store, name, wanted, activate)
        manifest = _manifest(staging, sealed)
        task = _Pull(remote, staging, _local_files(store, name))
        check_room({staging.path: task.need_bytes(manifest)}, f"pull {name} {wanted}")
        with Progress(f"pull {name} {wanted}", _total(manifest), "byte", quiet=quiet) as progress:
            for file, record in manifest.files.items():
                task.file(file, record, progress)
        store.publish(staging, activate=activate, verified=manifest.files)
    return PullReport(name, wanted, False, activate, task.fetched, task.linked, task.kept)


def push(
    store: SnapshotStore,
    target: str,
    name: str,
    version: str | None = None,
    *,
    activate: bool = True,
    quiet: bool = False,
) -> PushReport:
    """Verify a version (None: the active one) and write it to a folder or an object store.

    Whoever pulls sees it when all of it is there: the pointer moves last. Files that are there and
    right are kept. Raises SnapshotError, InputError, MissingExtra.
    """
    wanted = store.current(name) if version is None else version
    store.path(name, wanted)
    store.quarantine(name).refuse(wanted)
    remote = Remote.at(target)
    snapshot = store.open(name, wanted)
    manifest, folder = snapshot.manifest, snapshot.path
    sent = kept = 0
    try:
        with Progress(f"push {name} {wanted}", _total(manifest), "byte", quiet=quiet) as progress:
            for file, record in manifest.files.items():
                if remote.has(name, record, wanted, file):
                    kept += record.size_bytes
                else:
                    remote.put(folder / file, name, wanted, file)
                    sent += record.size_bytes
                progress.step(record.size_bytes)
        remote.put(folder / MANIFEST_NAME, name, wanted, MANIFEST_NAME)
        if activate:
            remote.point(name, wanted)
    finally:
        snapshot.close()
    return PushReport(name, wanted, sent, kept)


@dataclass(slots=True)
class _Pull:
    """Brings files into a folder, each in the cheapest way, and counts bytes."""

    remote: Remote
    staging: Staging
    local: Mapping[str, Path]
    fetched: int = 0
    linked: int = 0
    kept: int = 0

    def need_bytes(self, manifest: SnapshotManifest) -> int:
        """Bytes that the disk must have room for: of files that are neither here nor linked."""
        need = 0
        for name, record in manifest.files.items():
            path = self.staging.path / name
            there = path.stat().st_size if path.is_file() else 0
            if there != record.size_bytes and record.sha256 not in self.local:
                need += max(0, record.size_bytes - there)
        return need

    def file(self, name: str, record: FileRecord, progress: Progress) -> None:
        path = self.staging.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_there(path, record):
            self.kept += record.size_bytes
        elif self._link(path, record):
            self.linked += record.size_bytes
        else:
            self._fetch(name, path, record, progress)
            self.fetched += record.size_bytes
            return
        progress.step(record.size_bytes)

    def _link(self, path: Path, record: FileRecord) -> bool:
        """Link a file of a local version, whose bytes must be right too."""
        source = self.local.get(record.sha256)
        if source is None:
            return False
        # Never written to in place: it may be a link to a published version's file.
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # no links here, or the version was removed
            os.link(source, path)
        return _is_there(path, record)

    def _fetch(self, name: str, path: Path, record: FileRecord, progress: Progress) -> None:
        index, version = self.staging.index, self.staging.version
        digest, size = hashlib.sha256(), 0
        path.unlink(missing_ok=True)
        with path.open("xb") as stream:
            for block in self.remote.blocks(index, version, name):
                stream.write(block)
                digest.update(block)
                size += len(block)
                progress.step(len(block))
                if size > record.size_bytes:
                    break
        reason = None
        if size != record.size_bytes:
            more = "more than " if size > record.size_bytes else ""
            reason = f"{more}{min(size, record.size_bytes)} bytes of {record.size_bytes}"
        elif digest.hexdigest() != record.sha256:
            reason = "its sha256 differs from the manifest"
        if reason is not None:
            path.unlink()
            raise SnapshotCorrupt(index, version, name, f"in {self.remote.url}: {reason}")


def _active_there(remote: Remote, name: str) -> str:
    history = remote.history(name)
    if not history:
        known = ", ".join(remote.names()) or "none"
        reason = f"no active version of it in {remote.url}; indexes there: {known}"
        raise SnapshotMissing(name, "current", reason)
    return history[-1]


def _activated(store: SnapshotStore, name: str, version: str, activate: bool) -> PullReport:
    active = store.history(name)[-1:] == [version]
    if activate and not active:
        store.activate(name, version)
    return PullReport(name, version, True, active or activate)


def _manifest(staging: Staging, data: bytes) -> SnapshotManifest:
    """The manifest, checked and written; and nothing but its files in the folder."""
    path, name, version = staging.path, staging.index, staging.version
    (path / MANIFEST_NAME).unlink(missing_ok=True)
    (path / MANIFEST_NAME).write_bytes(data)
    manifest = read_manifest(path, name, version)
    for file in manifest.files:
        if not _stays_inside(file):
            reason = f"names the file {file!r}, which leads out of the snapshot"
            raise SnapshotCorrupt(name, version, MANIFEST_NAME, reason)
    for found in [found for found in path.rglob("*") if not found.is_dir()]:
        if found.relative_to(path).as_posix() not in {*manifest.files, MANIFEST_NAME}:
            found.unlink()
    return manifest


def _stays_inside(name: str) -> bool:
    """Whether a name in a manifest is a plain path below the folder, and not the manifest's."""
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and bool(parts) and not {"..", "."} & set(parts)
    return (
        plain
        and not name.startswith("/")
        and not set("\\\0:") & set(name)
        and (name != MANIFEST_NAME)
    )


def _local_files(store: SnapshotStore, name: str) -> dict[str, Path]:
    """Files of local versions by sha256, of the newest version that has one."""
    bad = {entry.version for entry in store.quarantine(name).entries()}
    found: dict[str, Path] = {}
    for version in store.versions(name):
        with contextlib.suppress(SnapshotError):
            if version not in bad:
                folder = store.path(name, version)
                files = store.manifest(name, version).files
                found.update({record.sha256: folder / file for file, record in files.items()})
    return found


def _is_there(path: Path, record: FileRecord) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != record.size_bytes:
        return False
    return file_record(path) == record


def _total(manifest: SnapshotManifest) -> int:
    return sum(record.size_bytes for record in manifest.files.values())

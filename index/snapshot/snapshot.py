"""One version of an index, opened: verified, memory-mapped, read-only.

    snapshot = Snapshot.open(folder, "default", version)
    snapshot.sides["image"].levels[1].search(...)

Nothing is searched that was not checked: sizes and hashes of all files against the manifest, no
file missing and none unexpected, shapes against counts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from hivlp.index.backends.choose import Backend, choose_backend
from hivlp.index.errors import DeviceFailed, SnapshotCorrupt
from hivlp.index.filter_masks import FilterMasks
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import Catalogue
from hivlp.index.snapshot.delta import Delta
from hivlp.index.snapshot.leases import Lease
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest, read_manifest
from hivlp.index.snapshot.opening import Opener
from hivlp.index.snapshot.side import Side
from hivlp.models.artifact import file_record
from hivlp.models.levels import FloatArray, Modality

log = logging.getLogger("hivlp.index")


class Snapshot:
    """An opened version of an index. Its memory goes when it is closed and no answer uses it."""

    def __init__(
        self,
        path: Path,
        manifest: SnapshotManifest,
        catalogue: Catalogue,
        sides: Mapping[Modality, Side],
        filters: FilterMasks,
        delta: Delta | None = None,
        rotation: FloatArray | None = None,
    ) -> None:
        """`rotation` (D, D) float32 turns queries given as vectors, where rows were imported."""
        self.path = path
        self.rotation = rotation
        self.manifest = manifest
        self.delta = delta
        self._filters: FilterMasks | None = filters
        self._catalogue: Catalogue | None = catalogue
        self._sides: Mapping[Modality, Side] | None = sides
        self._lease: Lease | None = None

    @staticmethod
    def open(
        path: Path,
        index: str,
        version: str,
        *,
        backend: Backend = "faiss-cpu",
        hash_up_to_bytes: int | None = None,
        verified: Collection[str] = (),
        like: Snapshot | None = None,
    ) -> Snapshot:
        """Verify and open the version in `path`.

        Files larger than `hash_up_to_bytes` are checked by size alone (None: all are hashed), but
        for tables: a changed byte in one can end the process that reads it. Files in `verified`
        were hashed by the caller, or are files of a version that was. Where the open snapshot
        `like` has the same built files, by their hashes, its levels and tables are shared: only
        changes are opened, in milliseconds.
        Raises SnapshotCorrupt naming the first file that is missing, changed or unexpected;
        NoDevice and MissingExtra for a backend that isn't there, DeviceFailed for a GPU that can't
        take it (`auto` falls back to the CPU then).
        """
        manifest = read_manifest(path, index, version)
        if like is not None and _same_built(like, manifest):
            return _like(path, manifest, like)
        check_files(path, manifest, hash_up_to_bytes, verified)
        opener = Opener(path, manifest, choose_backend(backend))
        try:
            sides = opener.sides()
        except DeviceFailed as error:
            if backend != "auto":
                raise
            log.warning("%s: searched on the CPU", error)
            opener = Opener(path, manifest, "faiss-cpu")
            sides = opener.sides()
        catalogue = opener.catalogue()
        delta, filters = opener.delta(catalogue, sides), opener.filters(catalogue)
        rotation = opener.rotation()
        return Snapshot(path, manifest, catalogue, sides, filters, delta, rotation)

    @property
    def catalogue(self) -> Catalogue:
        """Ids and metadata."""
        assert self._catalogue is not None, "the snapshot is closed"
        return self._catalogue

    @property
    def filters(self) -> FilterMasks:
        """What filters allow."""
        assert self._filters is not None, "the snapshot is closed"
        return self._filters

    @property
    def sides(self) -> Mapping[Modality, Side]:
        """The gallery sides that hold rows."""
        assert self._sides is not None, "the snapshot is closed"
        return self._sides

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._sides is None

    def keep(self, lease: Lease) -> None:
        """Hold a lease on the folder until `close`."""
        self._lease = lease

    def close(self) -> None:
        """Let go of every mapping, and of the lease. Closing twice is fine."""
        self._sides = None
        self._catalogue = None
        self._filters = None
        self.delta = None
        if self._lease is not None:
            self._lease.release()


def _same_built(other: Snapshot, manifest: SnapshotManifest) -> bool:
    return not other.closed and other.manifest.built_files == manifest.built_files


def _like(path: Path, manifest: SnapshotManifest, other: Snapshot) -> Snapshot:
    """The version in `path`, sharing all that was built with an open one."""
    check_files(path, manifest, None, other.manifest.built_files)
    opener = Opener(path, manifest, "numpy")
    same = {
        segment.name: segment
        for segment in (other.delta.segments if other.delta else ())
        if manifest.files.get(segment.name) == other.manifest.files[segment.name]
    }
    delta = opener.delta(other.catalogue, other.sides, same)
    shared = (other.catalogue, other.sides, other.filters)
    return Snapshot(path, manifest, *shared, delta, other.rotation)


def check_files(
    path: Path,
    manifest: SnapshotManifest,
    hash_up_to_bytes: int | None,
    verified: Collection[str] = (),
) -> None:
    """Compare a folder with its manifest. Raises SnapshotCorrupt naming the first difference."""
    present = {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_symlink() or not file.is_dir()
    }
    for name in sorted(present - set(manifest.files) - {MANIFEST_NAME}):
        raise SnapshotCorrupt(manifest.index, manifest.version, name, "unexpected file")
    for name, record in manifest.files.items():
        reason = None
        if name not in present:
            reason = "missing"
        elif (size := (path / name).stat().st_size) != record.size_bytes:
            reason = f"{size} bytes, the manifest says {record.size_bytes}"
        elif (
            name not in verified
            and is_hashed(name, size, hash_up_to_bytes)
            and file_record(path / name) != record
        ):
            reason = "its sha256 differs from the manifest"
        if reason is not None:
            raise SnapshotCorrupt(manifest.index, manifest.version, name, reason)


def is_hashed(name: str, size: int, up_to_bytes: int | None) -> bool:
    """Whether opening hashes a file of this name and size."""
    return up_to_bytes is None or size <= up_to_bytes or name.endswith(layout.TABLE_SUFFIX)

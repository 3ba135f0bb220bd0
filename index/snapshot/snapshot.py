"""One version of an index, opened: verified, memory-mapped, read-only.

    snapshot = Snapshot.open(folder, "default", version)
    snapshot.sides["image"].levels[1].search(...)

Nothing is searched that was not checked: sizes and hashes of all files against the manifest, no
file missing and none unexpected, shapes against counts.
"""

from __future__ import annotations

import logging
import tokenize
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.backends.choose import (
    Backend,
    Chosen,
    choose_backend,
    link_levels,
    open_graph,
    open_level,
)
from hivlp.index.backends.rows import LevelRows, StoredArray
from hivlp.index.candidates import RowArray
from hivlp.index.errors import DeviceFailed, SnapshotCorrupt
from hivlp.index.filter_masks import FilterMasks
from hivlp.index.level_index import LevelIndex
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import Catalogue, HashArray, open_table
from hivlp.index.snapshot.changes import Segment, Shape, open_segment
from hivlp.index.snapshot.coded import (
    FOLDER,
    BrokenColumn,
    code_column,
    coded_files,
    open_coded,
)
from hivlp.index.snapshot.delta import Delta
from hivlp.index.snapshot.leases import Lease
from hivlp.index.snapshot.manifest import (
    MANIFEST_NAME,
    SegmentRecord,
    SnapshotManifest,
    read_manifest,
)
from hivlp.models.artifact import file_record
from hivlp.models.levels import FloatArray, Modality

log = logging.getLogger("hivlp.index")


@dataclass(frozen=True, slots=True)
class Side:
    """One gallery side: rows 0..N-1, the same in every level.

    The best `rows_for_items[n - 1]` rows are sure to hold n different items. `graphs` are the
    levels that a graph stage can walk, none in the scan family or without FAISS. `maskable` is
    level 1 in codes that take a mask, where its own don't. `states` (N, m x d) float16 are token
    states of pictures, zeros where a row has none; None where the version keeps none.
    """

    modality: Modality
    levels: Mapping[int, LevelIndex]
    rows: Mapping[int, LevelRows]
    row_items: RowArray
    rows_for_items: RowArray
    texts: Any = None
    graphs: Mapping[int, LevelIndex] = field(default_factory=dict)
    maskable: LevelIndex | None = None
    states: npt.NDArray[np.float16] | None = None

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.row_items)

    def rows_needed(self, items: int) -> int:
        """How many of the best rows are sure to hold `items` items, where there are as many."""
        known = len(self.rows_for_items)
        return self.size if items > known else int(self.rows_for_items[items - 1])


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
        opener = _Opener(path, manifest, choose_backend(backend))
        try:
            sides = opener.sides()
        except DeviceFailed as error:
            if backend != "auto":
                raise
            log.warning("%s: searched on the CPU", error)
            opener = _Opener(path, manifest, "faiss-cpu")
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
    opener = _Opener(path, manifest, "numpy")
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


class _Opener:
    """Opens the parts of one snapshot; every failure names the file."""

    def __init__(self, path: Path, manifest: SnapshotManifest, backend: Chosen) -> None:
        self._path = path
        self._manifest = manifest
        self._backend = backend

    def sides(self) -> dict[Modality, Side]:
        return {side: self.side(side) for side in layout.SIDES if side in self._manifest.sides}

    def catalogue(self) -> Catalogue:
        count = self._manifest.items
        table = self._table(layout.ITEMS, count)
        hashes = cast(HashArray, self._array(layout.ITEM_HASHES, (count,), np.uint64))
        ordinals = cast(RowArray, self._array(layout.ITEM_ORDINALS, (count,), np.int64))
        return Catalogue(table, hashes, ordinals)

    def filters(self, catalogue: Catalogue) -> FilterMasks:
        """Columns in coded form: stored since format 3, made in memory for older versions."""
        table, names = catalogue.table, catalogue.metadata_names
        files = coded_files(names, table)
        try:
            if any(name not in self._manifest.files for name in files):
                columns = {name: code_column(name, table.column(name)) for name in names}
            else:
                columns = open_coded(self._path, table, names)
        except BrokenColumn as error:
            raise self._corrupt(error.file, str(error)) from error.__cause__
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise self._corrupt(FOLDER, str(error)) from error
        return FilterMasks(columns, self._manifest.items)

    def delta(
        self,
        catalogue: Catalogue,
        sides: Mapping[Modality, Side],
        opened: Mapping[str, Segment] = MappingProxyType({}),
    ) -> Delta | None:
        """The changes that are not in the levels, or None without any.

        `opened` are segments that another version over the same levels has open already.
        """
        changes = self._manifest.changes
        if changes is not None:
            for record in set(changes.segments) - set(changes.pending):
                self._segment(record, None)
        erased = self._erased()
        if not len(erased) and (changes is None or not changes.pending):
            return None
        shape = Shape(self._manifest.specs, self._manifest.gallery)
        segments = [
            opened.get(record.file) or self._segment(record, shape)
            for record in (changes.pending if changes else ())
        ]
        row_items = {side: own.row_items for side, own in sides.items()}
        return Delta(segments, catalogue, row_items, erased)

    def rotation(self) -> FloatArray | None:
        """What imported vectors were turned by, or None."""
        imported = self._manifest.imported
        if imported is None or not imported.rotated:
            return None
        shape = (imported.dim, imported.dim)
        return cast(FloatArray, self._array(layout.ROTATION, shape, np.float32))

    def _erased(self) -> RowArray:
        """Built items of which nothing is left but their place."""
        if layout.ERASED not in self._manifest.files:
            return np.empty(0, np.int64)
        try:
            found = np.load(self._path / layout.ERASED, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._corrupt(layout.ERASED, f"not a readable array: {error}") from error
        if found.ndim != 1 or found.dtype != np.int64:
            raise self._corrupt(layout.ERASED, f"holds {found.dtype}{found.shape}")
        return cast(RowArray, found)

    def _segment(self, record: SegmentRecord, shape: Shape | None) -> Segment:
        try:
            segment = open_segment(self._path, record.file, shape)
        except (OSError, ValueError, pa.ArrowInvalid) as error:
            raise self._corrupt(record.file, f"not a readable segment: {error}") from error
        if segment.size != record.upserts + record.deletes:
            raise self._corrupt(record.file, f"holds {segment.size} changes")
        return segment

    def side(self, side: Modality) -> Side:
        count = self._manifest.sides[side].rows
        rows = self._rows(side, count)
        levels = {level: self._level(side, level, own) for level, own in rows.items()}
        row_items = cast(RowArray, self._array(layout.row_items_file(side), (count,), np.int64))
        texts = self._table(layout.TEXTS, count).column("text") if side == "text" else None
        stored = self._manifest.sides[side].graph_levels if self._backend != "numpy" else ()
        graphs = {
            level: self._graph(layout.graph_file(side, own), rows[level], levels[level])
            for level, own in link_levels(stored, rows)
        }
        maskable = self._maskable(side, rows)
        needed = _rows_for_items(row_items)
        states = self._states(count) if side == "image" else None
        return Side(side, levels, rows, row_items, needed, texts, graphs, maskable, states)

    def _states(self, count: int) -> npt.NDArray[np.float16] | None:
        record = self._manifest.states
        if record is None:
            return None
        shape = (count, record.tokens * record.width)
        return cast("npt.NDArray[np.float16]", self._array(layout.STATES, shape, np.float16))

    def _rows(self, side: Modality, count: int) -> dict[int, LevelRows]:
        specs = self._manifest.specs
        nested = self._manifest.gallery == "nested"
        norms = self._norms(side, count) if nested and len(specs) > 1 else None
        rows: dict[int, LevelRows] = {}
        opened: dict[str, StoredArray] = {}
        for spec in specs:
            width = specs[-1].dim if nested else spec.dim
            name = layout.rows_file(side, self._manifest.gallery, spec.level)
            if name not in opened:
                opened[name] = cast(
                    StoredArray, self._array(name, (count, width), self._dtype(side))
                )
            matrix = opened[name]
            own = norms[spec.level - 1] if norms is not None and spec.dim < width else None
            rows[spec.level] = LevelRows(matrix, spec.dim, own)
        return rows

    def _dtype(self, side: Modality) -> npt.DTypeLike:
        return np.float16 if self._manifest.sides[side].rows_type == "fp16" else np.float32

    def _norms(self, side: Modality, count: int) -> FloatArray:
        shape = (len(self._manifest.levels) - 1, count)
        return cast(FloatArray, self._array(layout.norms_file(side), shape, np.float32))

    def _level(self, side: Modality, level: int, rows: LevelRows) -> LevelIndex:
        stored = level in self._manifest.sides[side].faiss_levels
        name = layout.faiss_file(side, level)
        return self._codes(name, stored, level, rows, self._backend)

    def _maskable(self, side: Modality, rows: Mapping[int, LevelRows]) -> LevelIndex | None:
        """Level 1's second codes; without FAISS the rows themselves take a mask."""
        if self._manifest.sides[side].maskable is None or self._backend == "numpy":
            return None
        return self._codes(layout.maskable_file(side), True, 1, rows[1], "faiss-cpu")

    def _codes(
        self, name: str, stored: bool, level: int, rows: LevelRows, backend: Chosen
    ) -> LevelIndex:
        try:
            opened = open_level(level, rows, self._path / name if stored else None, backend)
        except ValueError as error:
            raise self._corrupt(name, str(error)) from error
        if (opened.size, opened.dim) != (rows.size, rows.dim):
            raise self._corrupt(name, f"holds {opened.size} vectors of {opened.dim} numbers")
        return opened

    def _graph(self, name: str, rows: LevelRows, codes: LevelIndex) -> LevelIndex:
        try:
            return open_graph(self._path / name, rows, codes)
        except ValueError as error:
            raise self._corrupt(name, str(error)) from error

    def _array(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[np.generic]:
        try:
            mapped = np.load(self._path / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, tokenize.TokenError) as error:
            raise self._corrupt(name, f"not a readable array: {error}") from error
        if not mapped.flags.c_contiguous:
            raise self._corrupt(name, "is not in row order")
        if mapped.shape != shape or mapped.dtype != np.dtype(dtype):
            raise self._corrupt(name, f"holds {mapped.dtype}{mapped.shape}, expected {shape}")
        # A plain view: `take` on np.memmap itself goes through its slow __array_finalize__.
        return cast("npt.NDArray[np.generic]", mapped.view(np.ndarray))

    def _table(self, name: str, count: int) -> Any:
        try:
            table = open_table(self._path / name)
        except (OSError, pa.ArrowInvalid) as error:
            raise self._corrupt(name, f"not a readable Arrow file: {error}") from error
        if table.num_rows != count:
            raise self._corrupt(name, f"holds {table.num_rows} rows, expected {count}")
        return table

    def _corrupt(self, name: str, reason: str) -> SnapshotCorrupt:
        return SnapshotCorrupt(self._manifest.index, self._manifest.version, name, reason)


def _rows_for_items(row_items: RowArray) -> RowArray:
    """(items,) int64: n different items are sure among the best `out[n - 1]` rows.

    The worst case is that the n - 1 items with the most rows take all the first places.
    """
    counts = np.unique(row_items, return_counts=True)[1]
    largest = np.sort(counts)[::-1].astype(np.int64)
    return np.concatenate(([0], np.cumsum(largest[:-1]))).astype(np.int64) + 1

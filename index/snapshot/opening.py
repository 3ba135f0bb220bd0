"""The parts of a version, opened from its files: whatever is wrong with one, its file is named.

What `check_files` has found to be as it was written may still be nothing that can be opened, or
disagree with the counts of the manifest; nothing is searched that does.
"""

from __future__ import annotations

import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.backends.choose import Chosen, link_levels, open_graph, open_level
from hivlp.index.backends.rows import LevelRows, StoredArray
from hivlp.index.candidates import RowArray
from hivlp.index.errors import SnapshotCorrupt
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
from hivlp.index.snapshot.manifest import SegmentRecord, SnapshotManifest
from hivlp.index.snapshot.side import Side, rows_for_items
from hivlp.models.levels import FloatArray, Modality


class Opener:
    """Opens the parts of one snapshot; every failure is a SnapshotCorrupt that names the file."""

    def __init__(self, path: Path, manifest: SnapshotManifest, backend: Chosen) -> None:
        self._path = path
        self._manifest = manifest
        self._backend = backend

    def sides(self) -> dict[Modality, Side]:
        """The sides that hold rows. Raises DeviceFailed besides."""
        return {side: self._side(side) for side in layout.SIDES if side in self._manifest.sides}

    def catalogue(self) -> Catalogue:
        """Ids and metadata."""
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

    def _side(self, side: Modality) -> Side:
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
        needed = rows_for_items(row_items)
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

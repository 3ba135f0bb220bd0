"""A version written anew without some items: what `erase` publishes.

Rows and pictures' states become zeros, codes are made of those, texts, metadata and coded columns
are written without the items, whose places nobody has from then on; what says nothing of them is
shared.
"""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.backends.choose import write_level
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import RowArray
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.amend import Held, hold
from hivlp.index.snapshot.catalogue import ID, hash_index, id_hash, table_writer, write_table
from hivlp.index.snapshot.change_tables import without_ids
from hivlp.index.snapshot.changes import record_of, write_segment
from hivlp.index.snapshot.coded import FOLDER as CODED
from hivlp.index.snapshot.coding import write_coded_file
from hivlp.index.snapshot.delta import rows_of
from hivlp.index.snapshot.manifest import (
    FORMAT_VERSION,
    SegmentRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore, Staging
from hivlp.models.artifact import file_record
from hivlp.models.levels import Modality
from hivlp.models.runtime.progress import Progress

NOBODY = "\x01"
"""What an erased item's id begins with; no id of a corpus may hold it."""


def side_rows(folder: Path, side: Modality, ordinals: RowArray) -> RowArray:
    """The rows of a side that some items have, ascending."""
    row_items = np.load(folder / layout.row_items_file(side), mmap_mode="r", allow_pickle=False)
    return rows_of(ordinals, row_items)


def rewritten(store: SnapshotStore, name: str, ids: set[str], quiet: bool) -> str:
    """Publish the active version without the items; by whoever holds the turn."""
    held = hold(store, name, whole=True)
    with store.stage(name) as staging:
        work = _Rewrite(held, staging, ids)
        with Progress(f"erase {name}", len(work.steps), "file", quiet=quiet) as progress:
            for step in work.steps:
                step()
                progress.step()
        write_manifest(staging.path, work.manifest())
        shared = share_files(held.path, staging.path, work.shared())
        write_manifest(staging.path, work.manifest())
        store.publish(staging, expected=held.manifest.version, shared=shared)
    return staging.version


class _Rewrite:
    """Writes what must change of one version; the rest is shared."""

    def __init__(self, held: Held, staging: Staging, ids: set[str]) -> None:
        self._held = held
        self._to = staging.path
        self._version = staging.version
        self._ids = ids
        items = [item_id for item_id in ids if held.catalogue.holds(item_id)]
        self._ordinals = np.sort(np.array([held.catalogue.ordinal(i) for i in items], np.int64))
        self._segments: list[SegmentRecord] = []
        self._gone: set[str] = set()
        self.steps = [self._changes]
        if len(items):
            self.steps += [self._items, self._erased]
            self.steps += [
                lambda side=side: self._side(side)  # type: ignore[misc]
                for side in held.manifest.sides
                if len(side_rows(held.path, side, self._ordinals))
            ]

    def shared(self) -> set[str]:
        """Files that stay as they are."""
        return {n for n in self._held.manifest.files if n not in self._gone}

    def manifest(self) -> SnapshotManifest:
        """The manifest of what was written and of what is shared."""
        old = self._held.manifest
        files = {n: record for n, record in old.files.items() if n not in self._gone}
        written = (path for path in sorted(self._to.rglob("*")) if path.is_file())
        for path in written:
            own = path.relative_to(self._to).as_posix()
            if own not in files and own != "manifest.json":
                files[own] = file_record(path)
        before, segments = old.changes, tuple(self._segments)
        changes = None
        if before is not None and segments:
            changes = before.model_copy(update={"segments": segments})
        return old.model_copy(
            update={
                "format_version": FORMAT_VERSION,
                "version": self._version,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "amended_from": None,
                "changes": changes,
                "files": files,
            }
        )

    def _changes(self) -> None:
        """Segments without the items' changes."""
        for record, segment in zip(self._held.changes.segments, self._held.segments, strict=True):
            if not self._ids & segment.places.keys():
                self._segments.append(record)
                continue
            self._gone.add(record.file)
            table = without_ids(segment.table, self._ids)
            if table.num_rows:
                self._segments.append(record_of(table, write_segment(self._to, table)))

    def _items(self) -> None:
        """items.arrow and all that is made of it, with nobody in the items' places."""
        self._gone |= {layout.ITEMS, layout.ITEM_HASHES, layout.ITEM_ORDINALS}
        self._gone |= {n for n in self._held.manifest.files if n.startswith(f"{CODED}/")}
        source = self._held.path / layout.ITEMS
        first = 0
        with pa.memory_map(str(source)) as mapped:
            reader = pa.ipc.open_file(mapped)
            with table_writer(self._to / layout.ITEMS, reader.schema) as writer:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    writer.write_batch(self._blank(batch, first))
                    first += batch.num_rows
        names = list(self._held.catalogue.metadata_names)
        write_coded_file(self._to, self._to / layout.ITEMS, names)
        hashes = np.load(self._held.path / layout.ITEM_HASHES, allow_pickle=False)
        ordinals = np.load(self._held.path / layout.ITEM_ORDINALS, allow_pickle=False)
        by_item = np.empty_like(hashes)
        by_item[ordinals] = hashes
        for ordinal in self._ordinals.tolist():
            by_item[ordinal] = id_hash(f"{NOBODY}{ordinal}")
        ascending, places = hash_index(by_item)
        np.save(self._to / layout.ITEM_HASHES, ascending, allow_pickle=False)
        np.save(self._to / layout.ITEM_ORDINALS, places, allow_pickle=False)

    def _blank(self, batch: Any, first: int) -> Any:
        """A record batch whose items from here are nobody: an id of their place, and nulls."""
        own = self._ordinals[(self._ordinals >= first) & (self._ordinals < first + batch.num_rows)]
        if not len(own):
            return batch
        gone = np.zeros(batch.num_rows, np.bool_)
        gone[own - first] = True
        mask = pa.array(gone)
        # Taken anew: what only marks values as null leaves their bytes where they are.
        kept = pa.array(np.arange(batch.num_rows), mask=gone)
        columns = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name == ID:
                ids = pa.array([f"{NOBODY}{ordinal}" for ordinal in own.tolist()], column.type)
                columns.append(pc.replace_with_mask(column, mask, ids))
            else:
                columns.append(column.take(kept))
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)

    def _erased(self) -> None:
        before = np.empty(0, np.int64)
        if layout.ERASED in self._held.manifest.files:
            before = np.load(self._held.path / layout.ERASED, allow_pickle=False)
        self._gone.add(layout.ERASED)
        np.save(self._to / layout.ERASED, np.union1d(before, self._ordinals), allow_pickle=False)

    def _side(self, side: Modality) -> None:
        """Rows and what is made of them: the items' are zeros."""
        manifest, gone = self._held.manifest, side_rows(self._held.path, side, self._ordinals)
        (self._to / side).mkdir(exist_ok=True)
        matrices = {}
        for spec in manifest.specs:
            name = layout.rows_file(side, manifest.gallery, spec.level)
            if name not in matrices:
                matrices[name] = self._zeroed(name, gone)
            self._gone.add(name)
        rows = self._levels(side, matrices)
        record = manifest.sides[side]
        for level in record.faiss_levels:
            name = layout.faiss_file(side, level)
            self._gone.add(name)
            write_level(self._to / name, rows[level], record.level1 if level == 1 else "flat")
        if record.maskable is not None:
            name = layout.maskable_file(side)
            self._gone.add(name)
            write_level(self._to / name, rows[1], record.maskable)
        if side == "image" and manifest.states is not None:
            self._gone.add(layout.STATES)
            self._zeroed(layout.STATES, gone)
        if side == "text":
            self._gone.add(layout.TEXTS)
            texts = self._held.texts()
            mask = np.zeros(len(texts), np.bool_)
            mask[gone] = True
            blank = texts.take(pa.array(np.arange(len(texts)), mask=mask)).fill_null("")
            write_table(self._to / layout.TEXTS, pa.table({"text": blank}))

    def _zeroed(self, name: str, rows: RowArray) -> Any:
        """A copy of an array's file in which some rows are zeros, mapped."""
        shutil.copyfile(self._held.path / name, self._to / name)
        matrix = np.load(self._to / name, mmap_mode="r", allow_pickle=False)
        begin = os.path.getsize(self._to / name) - matrix.nbytes  # noqa: PTH202  one call
        stride = matrix.strides[0]
        with (self._to / name).open("r+b") as stream:
            for row in rows.tolist():
                stream.seek(begin + row * stride)
                stream.write(bytes(stride))
        found = np.load(self._to / name, mmap_mode="r", allow_pickle=False)
        return found.view(np.ndarray)

    def _levels(self, side: Modality, matrices: dict[str, Any]) -> dict[int, LevelRows]:
        manifest = self._held.manifest
        specs, nested = manifest.specs, manifest.gallery == "nested"
        if not nested:
            names = {s.level: layout.rows_file(side, manifest.gallery, s.level) for s in specs}
            return {s.level: LevelRows(matrices[names[s.level]], s.dim) for s in specs}
        matrix = next(iter(matrices.values()))
        if len(specs) == 1:
            return {specs[0].level: LevelRows(matrix, specs[0].dim)}
        norms = np.stack([inverse_norms(matrix, spec.dim) for spec in specs[:-1]])
        name = layout.norms_file(side)
        self._gone.add(name)
        np.save(self._to / name, norms, allow_pickle=False)
        rows = {s.level: LevelRows(matrix, s.dim, n) for s, n in zip(specs, norms, strict=False)}
        return {**rows, specs[-1].level: LevelRows(matrix, specs[-1].dim)}

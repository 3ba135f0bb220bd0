"""Erasing items: afterwards their vectors and texts are in no file of the state folder.

    report = erase(store, "default", ["sku-1"], wait_s=60)

Deleting hides; erasing writes every file anew that holds something of the items: rows become zeros,
codes, texts, metadata and coded columns are written without them, graphs keep their links, which
hold no numbers. All older versions that have the items are removed, once nobody has them open; so
are their vectors in the embedding cache and their uploaded pictures. The corpus is the user's own:
it is not touched, but builds leave the items out from then on, by a hash of their ids.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.backends.choose import write_level
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build.embeddings import EmbeddingCache, content_key
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError, CorpusError, SnapshotError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.amend import Held, hold, turn
from hivlp.index.snapshot.catalogue import ID, hash_index, id_hash, table_writer, write_table
from hivlp.index.snapshot.changes import without_ids, write_segment
from hivlp.index.snapshot.coded import FOLDER as CODED
from hivlp.index.snapshot.coding import write_coded_file
from hivlp.index.snapshot.delta import rows_of
from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.manifest import (
    FORMAT_VERSION,
    ChangesRecord,
    SegmentRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.store import SnapshotStore, Staging
from hivlp.index.snapshot.uploads import picture_roots, upload_path
from hivlp.models.artifact import file_record
from hivlp.models.levels import Modality
from hivlp.models.runtime.progress import Progress

NOBODY = "\x01"
"""What an erased item's id begins with; no id of a corpus may hold it."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ErasedReport:
    """What was done: `version` is active now; `left` versions still have the items, being in use.

    `unknown` ids were nowhere. `cached` vectors and `pictures` were removed besides.
    """

    version: str
    erased: tuple[str, ...]
    unknown: tuple[str, ...]
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    cached: int = 0
    pictures: int = 0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Traces:
    """What is known of the items that go, gathered before it goes."""

    texts: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)
    vectors: set[bytes] = field(default_factory=set)


def erase(
    store: SnapshotStore,
    name: str,
    ids: Sequence[str],
    *,
    wait_s: float = 60.0,
    quiet: bool = False,
) -> ErasedReport:
    """Erase items for good. Needs room for a copy of the rows of the index.

    Waits up to `wait_s` for readers of older versions to leave them. Raises SnapshotError, and
    BuildError where something can't be written: then nothing has changed.
    """
    wanted = frozenset(ids)
    try:
        with turn(store, name):
            having = [v for v in store.versions(name) if _has(store, name, v, wanted)]
            known = frozenset().union(*(_ids_of(store, name, v, wanted) for v in having))
            traces = _Traces()
            for version in having:
                _gather(hold(store, name, version, whole=True), known, traces)
            version = store.current(name)
            if version in having:
                version = _rewritten(store, name, known, quiet)
    except OSError as error:
        raise BuildError(f"index {name!r} can't be changed: {error}") from error
    removed, left = _removed(store, name, having, wait_s)
    cached, notes = _forget_vectors(store, name, version, traces)
    pictures = _forget_pictures(store, name, version, traces)
    _forget_lists(store, name, known)
    return ErasedReport(
        version,
        tuple(sorted(known)),
        tuple(sorted(wanted - known)),
        removed,
        left,
        cached,
        pictures,
        notes,
    )


def _has(store: SnapshotStore, name: str, version: str, ids: frozenset[str]) -> bool:
    try:
        return bool(_ids_of(store, name, version, ids))
    except SnapshotError:
        return True  # can't be read, so it can't be known: it goes


def _ids_of(store: SnapshotStore, name: str, version: str, ids: frozenset[str]) -> set[str]:
    """Which of the ids a version has anything of."""
    try:
        held = hold(store, name, version, whole=True)
    except SnapshotError:
        return set()
    found = {item_id for item_id in ids if held.catalogue.holds(item_id)}
    return found | {item_id for segment in held.segments for item_id in ids & segment.places.keys()}


def _gather(held: Held, ids: frozenset[str], traces: _Traces) -> None:
    """Texts, picture references and vectors of the items in one version."""
    for segment in held.segments:
        for item_id in ids & segment.places.keys():
            change = segment.change(segment.places[item_id])
            traces.texts.update(getattr(change, "texts", ()))
            traces.images.update(i for i in [getattr(change, "image", None)] if i)
    items = [i for i in ids if held.catalogue.holds(i)]
    traces.images.update(ref for i in items if (ref := held.catalogue.image_ref(i)))
    ordinals = np.sort(np.array([held.catalogue.ordinal(i) for i in items], np.int64))
    for side in held.manifest.sides:
        rows = _rows(held.path, side, ordinals)
        if side == "text" and len(rows):
            column = held.texts()
            traces.texts.update(column.take(pa.array(rows)).to_pylist())
        if held.manifest.gallery == "nested" and held.manifest.sides[side].rows_type == "fp32":
            name = layout.rows_file(side, "nested", len(held.manifest.levels))
            matrix = np.load(held.path / name, mmap_mode="r", allow_pickle=False)
            traces.vectors.update(matrix[row].astype("<f4").tobytes() for row in rows)


def _rows(folder: Path, side: Modality, ordinals: RowArray) -> RowArray:
    row_items = np.load(folder / layout.row_items_file(side), mmap_mode="r", allow_pickle=False)
    return rows_of(ordinals, row_items)


def _rewritten(store: SnapshotStore, name: str, ids: frozenset[str], quiet: bool) -> str:
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

    def __init__(self, held: Held, staging: Staging, ids: frozenset[str]) -> None:
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
                if len(_rows(held.path, side, self._ordinals))
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
        changes = self._held.changes
        erased = {*changes.erased, *(f"{id_hash(item_id):016x}" for item_id in self._ids)}
        since = changes.since if old.changes else old.version
        return old.model_copy(
            update={
                "format_version": FORMAT_VERSION,
                "version": self._version,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "amended_from": None,
                "changes": ChangesRecord(
                    since=since,
                    folded=changes.folded,
                    segments=tuple(self._segments),
                    columns=changes.columns,
                    erased=tuple(sorted(erased)),
                ),
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
                own = write_segment(self._to, table)
                deletes = sum(table.column("deleted").to_pylist())
                numbers = table.column("sequence")
                self._segments.append(
                    SegmentRecord(
                        file=own,
                        first=numbers[0].as_py(),
                        last=numbers[-1].as_py(),
                        upserts=table.num_rows - deletes,
                        deletes=deletes,
                    )
                )

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
        manifest, gone = self._held.manifest, _rows(self._held.path, side, self._ordinals)
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


def _removed(
    store: SnapshotStore, name: str, having: Iterable[str], wait_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the versions that have the items; those that stay in use are left, and named."""
    waiting, removed = list(having), []
    until = time.monotonic() + wait_s
    while True:
        for version in list(waiting):
            try:
                store.remove(name, version)
            except SnapshotError:
                if version in store.versions(name):
                    continue
            waiting.remove(version)
            removed.append(version)
        if not waiting or time.monotonic() > until:
            return tuple(removed), tuple(waiting)
        time.sleep(POLL_S)


def _forget_vectors(
    store: SnapshotStore, name: str, version: str, traces: _Traces
) -> tuple[int, tuple[str, ...]]:
    """Remove the items' vectors from every embedding cache, by content, else by the numbers."""
    keys = {content_key("text", text.encode()) for text in traces.texts}
    manifest = store.manifest(name, version)
    roots = picture_roots(store.root / name, manifest.corpus.root)
    notes = []
    for reference in sorted(traces.images):
        try:
            keys.add(content_key("image", roots.read(reference)))
        except CorpusError:
            notes.append(
                f"{reference}: not read any more; its vectors were looked for by themselves"
            )
    folder, removed = store.home / "cache" / "embeddings", 0
    for file in sorted(folder.glob("*.sqlite")) if folder.is_dir() else ():
        with EmbeddingCache(folder, file.stem, 0) as cache:
            keys_here = keys | set(cache.keys_of(traces.vectors)) if traces.vectors else keys
            removed += (
                cache.forget(keys_here)
                if cache.missing(list(keys_here)) != list(dict.fromkeys(keys_here))
                else 0
            )
    return removed, tuple(notes)


def _forget_pictures(store: SnapshotStore, name: str, version: str, traces: _Traces) -> int:
    """Remove uploaded pictures that no item has any more."""
    held = hold(store, name, version, whole=True)
    used = {ref for ref in held.catalogue.images() if ref}
    used |= {ref for s in held.segments for ref in s.table.column("image").to_pylist() if ref}
    removed = 0
    for reference in traces.images - used:
        path = upload_path(store.root / name, reference)
        if path is not None and path.is_file():
            path.unlink()
            removed += 1
    return removed


def _forget_lists(store: SnapshotStore, name: str, ids: frozenset[str]) -> None:
    """Take the items out of the lists of what builds left out."""
    folder = store.home / "cache" / "builds"
    for file in sorted(folder.glob(f"{name}.*failures.jsonl")) if folder.is_dir() else ():
        lines = file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line).get("id") not in ids]
        if len(kept) < len(lines):
            replace_text(file, "".join(f"{line}\n" for line in kept))

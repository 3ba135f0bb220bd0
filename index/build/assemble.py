"""The files of a snapshot, written from encoded items: rows, norms, FAISS levels, tables."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from hivlp.index.backends.choose import write_graph, write_level
from hivlp.index.backends.rows import LevelRows, StoredArray, inverse_norms
from hivlp.index.build.columns import ColumnType, MetadataTypes
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.spool import EncodedItem, Items
from hivlp.index.candidates import RowArray
from hivlp.index.level_index import FAST_SCAN, MASKABLE, Codec, Must, RowsType
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import (
    ID,
    IMAGE,
    HashArray,
    hash_index,
    id_hash,
    table_writer,
)
from hivlp.index.snapshot.coding import write_coded_file
from hivlp.index.snapshot.scratch import Scratch
from hivlp.models.levels import GalleryKind, LevelSpec, Modality

FETCH = 4_096
ITEMS_AT_ONCE = 4_096
CHARS_AT_ONCE = 8 * 2**20
"""Items that are Python objects at a time, and about how many characters of them; a record batch is
made of several such blocks."""
BATCH_ITEMS = 65_536
BATCH_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class BuiltSide:
    """Rows written for one side, by level, and the item of each row.

    `contents` (N,) uint64 are the first 64 bits of each row's cache key: equal where the content
    of two rows is.
    """

    modality: Modality
    rows: Mapping[int, LevelRows]
    row_items: RowArray
    contents: HashArray

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.row_items)


def write_catalogue(folder: Path, items: Items) -> None:
    """items.arrow, its coded columns and the id index; two passes over the items."""
    with Scratch(folder) as scratch:
        types = MetadataTypes(scratch)
        for item in items:
            types.see(item.metadata)
        columns = types.columns()
    hashes = array("Q")
    fields = {ID: pa.string(), IMAGE: pa.string()}
    schema = pa.schema({**fields, **{name: kind.arrow for name, (_, kind) in columns.items()}})
    with _batches(folder / layout.ITEMS, schema) as writer:
        for block in _blocks(items):
            hashes.extend(id_hash(item.id) for item in block)
            writer.add(_records(block, columns, schema))
    write_coded_file(folder, folder / layout.ITEMS, list(columns))
    ascending, ordinals = hash_index(hashes)
    np.save(folder / layout.ITEM_HASHES, ascending, allow_pickle=False)
    np.save(folder / layout.ITEM_ORDINALS, ordinals, allow_pickle=False)


def write_side(
    folder: Path,
    side: Modality,
    items: Items,
    cache: EmbeddingCache,
    levels: Sequence[LevelSpec],
    gallery: GalleryKind,
    rows_type: RowsType = "fp32",
) -> BuiltSide | None:
    """Rows, norms, row-to-item map and, for texts, the texts; None where the side has no row."""
    row_items, contents = _rows_of(side, items)
    if not len(row_items):
        return None
    (folder / side).mkdir()
    np.save(folder / layout.row_items_file(side), row_items, allow_pickle=False)
    if side == "text":
        _write_texts(folder / layout.TEXTS, items)
    dims = [spec.dim for spec in levels]
    keys = (key for item in items for key in _keys(side, item))
    matrices = _write_rows(folder, side, keys, len(row_items), cache, dims, gallery, rows_type)
    rows = (
        _nested_levels(folder, side, matrices[0], levels)
        if gallery == "nested"
        else {s.level: LevelRows(m, s.dim) for s, m in zip(levels, matrices, strict=True)}
    )
    return BuiltSide(side, rows, row_items, contents)


def write_faiss(
    folder: Path,
    side: BuiltSide,
    levels: Sequence[int],
    level1: Codec = "flat",
    maskable: Codec | None = None,
) -> None:
    """The given levels of a side as FAISS indexes: flat, but for level 1's own codec.

    `maskable` is the codec of level 1's second codes (None: it has none).
    """
    for level in levels:
        path = folder / layout.faiss_file(side.modality, level)
        write_level(path, side.rows[level], level1 if level == 1 else "flat")
    if maskable is not None:
        write_level(folder / layout.maskable_file(side.modality), side.rows[1], maskable)


def maskable_beside(level1: Codec, must: Sequence[Must]) -> Codec | None:
    """The codec of the second codes that a side with such a level 1 needs, or None."""
    return MASKABLE if "mask" in must and level1 in FAST_SCAN else None


def graph_levels(side: BuiltSide) -> tuple[int, ...]:
    """The levels that get a graph: the coarsest and the finest."""
    return tuple(sorted({min(side.rows), max(side.rows)}))


def write_graphs(
    folder: Path,
    side: BuiltSide,
    threads: int = 1,
    step: Callable[[int], None] | None = None,
) -> tuple[int, ...]:
    """The graphs of `graph_levels`, which are returned; `step` is told of every part of the rows.

    Only one thread gives the same graphs again.
    """
    levels = graph_levels(side)
    for level in levels:
        path = folder / layout.graph_file(side.modality, level)
        write_graph(path, side.rows[level], threads, step)
    return levels


class _Batches:
    """Joins small record batches into ones of at most BATCH_ITEMS rows, about BATCH_BYTES."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._waiting: list[Any] = []

    def add(self, batch: Any) -> None:
        rows = sum(b.num_rows for b in self._waiting) + batch.num_rows
        if rows > BATCH_ITEMS or sum(b.nbytes for b in self._waiting) > BATCH_BYTES:
            self.flush()
        self._waiting.append(batch)

    def flush(self) -> None:
        if self._waiting:
            self._writer.write_batch(pa.concat_batches(self._waiting))
            self._waiting.clear()


@contextmanager
def _batches(path: Path, schema: Any) -> Iterator[_Batches]:
    with table_writer(path, schema) as writer:
        batches = _Batches(writer)
        yield batches
        batches.flush()


def _blocks(items: Items) -> Iterator[list[EncodedItem]]:
    block: list[EncodedItem] = []
    chars = 0
    for item in items:
        block.append(item)
        chars += sum(map(len, item.texts)) + getattr(item.metadata, "chars", 0)
        if len(block) >= ITEMS_AT_ONCE or chars >= CHARS_AT_ONCE:
            yield block
            block, chars = [], 0
    if block:
        yield block


def _records(
    block: Sequence[EncodedItem], columns: Mapping[str, tuple[str, ColumnType]], schema: Any
) -> Any:
    """The records of some items as a RecordBatch."""
    arrays = [
        pa.array([item.id for item in block], type=pa.string()),
        pa.array([item.image for item in block], type=pa.string()),
    ]
    for name, kind in columns.values():
        arrays.append(kind.array([item.metadata.get(name) for item in block]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _write_texts(path: Path, items: Items) -> None:
    """texts.arrow, block by block."""
    schema = pa.schema({"text": pa.string()})
    with _batches(path, schema) as writer:
        for block in _blocks(items):
            texts = pa.array([text for item in block for text in item.texts], type=pa.string())
            writer.add(pa.RecordBatch.from_arrays([texts], schema=schema))


def _keys(side: Modality, item: EncodedItem) -> Sequence[bytes]:
    """Cache keys of an item's rows."""
    if side == "text":
        return item.text_keys
    return () if item.image_key is None else (item.image_key,)


def _rows_of(side: Modality, items: Items) -> tuple[RowArray, HashArray]:
    """Item ordinal and content of every row, in item order."""
    ordinals, contents = array("q"), array("Q")
    for ordinal, item in enumerate(items):
        for key in _keys(side, item):
            ordinals.append(ordinal)
            contents.append(int.from_bytes(key[:8], "little"))
    if not ordinals:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
    return np.frombuffer(ordinals, dtype=np.int64), np.frombuffer(contents, dtype=np.uint64)


def _write_rows(
    folder: Path,
    side: Modality,
    keys: Iterator[bytes],
    count: int,
    cache: EmbeddingCache,
    dims: Sequence[int],
    gallery: GalleryKind,
    rows_type: RowsType,
) -> list[StoredArray]:
    """One matrix when nested, one a level when per_exit; filled from the cache part by part.

    Written as files and mapped afterwards: a write into a mapping of a full disk kills the process.
    """
    widths = list(dims[-1:]) if gallery == "nested" else list(dims)
    first = len(dims) if gallery == "nested" else 1
    paths = [folder / layout.rows_file(side, gallery, first + i) for i in range(len(widths))]
    cuts = np.cumsum(widths)[:-1]
    kind = "<f2" if rows_type == "fp16" else "<f4"
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("wb")) for path in paths]
        for stream, width in zip(streams, widths, strict=True):
            header = {"descr": kind, "fortran_order": False, "shape": (count, width)}
            np.lib.format.write_array_header_1_0(stream, header)
        while part := list(islice(keys, FETCH)):
            vectors = cache.get(part)
            for stream, numbers in zip(streams, np.split(vectors, cuts, axis=1), strict=True):
                stream.write(np.ascontiguousarray(numbers, dtype=kind).data)
    mapped = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    return [cast(StoredArray, matrix.view(np.ndarray)) for matrix in mapped]


def _nested_levels(
    folder: Path, side: Modality, matrix: StoredArray, levels: Sequence[LevelSpec]
) -> dict[int, LevelRows]:
    """Every level as a prefix; norms of all but the finest are stored."""
    coarse, finest = levels[:-1], levels[-1]
    if not coarse:
        return {finest.level: LevelRows(matrix, finest.dim)}
    norms = np.stack([inverse_norms(matrix, spec.dim) for spec in coarse])
    np.save(folder / layout.norms_file(side), norms, allow_pickle=False)
    rows = {
        spec.level: LevelRows(matrix, spec.dim, own)
        for spec, own in zip(coarse, norms, strict=True)
    }
    return {**rows, finest.level: LevelRows(matrix, finest.dim)}

"""The files of a snapshot, written from encoded items: rows, norms, FAISS levels, tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from hivlp.index.backends.choose import write_graph, write_level
from hivlp.index.backends.rows import LevelRows, StoredArray, inverse_norms
from hivlp.index.build.columns import metadata_columns
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.encode import EncodedItem
from hivlp.index.candidates import RowArray
from hivlp.index.level_index import FAST_SCAN, MASKABLE, Codec, Must, RowsType
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import ID, IMAGE, OWN_COLUMNS, id_index, write_table
from hivlp.index.snapshot.coded import write_coded
from hivlp.models.levels import GalleryKind, LevelSpec, Modality

FETCH = 4_096


@dataclass(frozen=True, slots=True)
class BuiltSide:
    """Rows written for one side, by level, and the item of each row."""

    modality: Modality
    rows: Mapping[int, LevelRows]
    row_items: RowArray
    keys: Sequence[bytes]

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.row_items)


def write_catalogue(folder: Path, items: Sequence[EncodedItem]) -> None:
    """items.arrow and the id index."""
    ids = [item.id for item in items]
    columns = {
        ID: pa.array(ids, type=pa.string()),
        IMAGE: pa.array([item.image for item in items], type=pa.string()),
        **metadata_columns([item.metadata for item in items]),
    }
    table = pa.table(columns)
    write_table(folder / layout.ITEMS, table)
    write_coded(folder, table, [name for name in columns if name not in OWN_COLUMNS])
    hashes, ordinals = id_index(ids)
    np.save(folder / layout.ITEM_HASHES, hashes, allow_pickle=False)
    np.save(folder / layout.ITEM_ORDINALS, ordinals, allow_pickle=False)


def write_side(
    folder: Path,
    side: Modality,
    items: Sequence[EncodedItem],
    cache: EmbeddingCache,
    levels: Sequence[LevelSpec],
    gallery: GalleryKind,
    rows_type: RowsType = "fp32",
) -> BuiltSide | None:
    """Rows, norms, row-to-item map and, for texts, the texts; None where the side has no row."""
    keys, row_items = _rows_of(side, items)
    if not keys:
        return None
    (folder / side).mkdir()
    np.save(folder / layout.row_items_file(side), row_items, allow_pickle=False)
    if side == "text":
        texts = [text for item in items for text in item.texts]
        write_table(folder / layout.TEXTS, pa.table({"text": pa.array(texts, type=pa.string())}))
    dims = [spec.dim for spec in levels]
    matrices = _write_rows(folder, side, keys, cache, dims, gallery, rows_type)
    rows = (
        _nested_levels(folder, side, matrices[0], levels)
        if gallery == "nested"
        else {s.level: LevelRows(m, s.dim) for s, m in zip(levels, matrices, strict=True)}
    )
    return BuiltSide(side, rows, row_items, keys)


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


def _rows_of(side: Modality, items: Sequence[EncodedItem]) -> tuple[list[bytes], RowArray]:
    """Cache key and item ordinal of every row, in item order."""
    keys: list[bytes] = []
    ordinals: list[int] = []
    for ordinal, item in enumerate(items):
        own = item.text_keys if side == "text" else (item.image_key,)
        real = [key for key in own if key is not None]
        keys += real
        ordinals += [ordinal] * len(real)
    return keys, np.array(ordinals, dtype=np.int64)


def _write_rows(
    folder: Path,
    side: Modality,
    keys: Sequence[bytes],
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
            header = {"descr": kind, "fortran_order": False, "shape": (len(keys), width)}
            np.lib.format.write_array_header_1_0(stream, header)
        for start in range(0, len(keys), FETCH):
            vectors = cache.get(keys[start : start + FETCH])
            for stream, part in zip(streams, np.split(vectors, cuts, axis=1), strict=True):
                stream.write(np.ascontiguousarray(part, dtype=kind).data)
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

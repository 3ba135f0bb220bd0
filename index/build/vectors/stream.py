"""From a source to the files of a snapshot's one side: every row read once, in bounded memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.items import BadItem
from hivlp.index.build.vectors.fields import Fields, ids_of, one_chunk, references, texts_of
from hivlp.index.build.vectors.rotation import Rotation
from hivlp.index.build.vectors.source import RawBatch, VectorSource
from hivlp.index.build.vectors.units import Units, unit_rows
from hivlp.index.build.vectors.write import ItemWriter, RowWriter
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError
from hivlp.index.level_index import RowsType
from hivlp.index.pictures import ROW_MARK
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import OWN_COLUMNS, id_hash, open_table
from hivlp.index.snapshot.coded import write_coded
from hivlp.index.snapshot.manifest import Metric
from hivlp.models.levels import Modality

SAME_LENGTH = 1e-3
"""Lengths that differ by less, as a share, are one: fp16 vectors are so far from it."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What was written: the levels, how many items, and what was left out."""

    rows: dict[int, LevelRows]
    count: int
    failures: int
    lost_pictures: int
    lengths: tuple[float, float]
    lost_values: Mapping[str, int] = field(default_factory=dict)
    """By column: how many values can't be kept, and are null."""


@dataclass(slots=True)
class Lengths:
    """The range of the vectors' lengths, and whether they may differ.

    Vectors of one length rank the same by inner product, by distance and by cosine.
    """

    metric: Metric
    as_cosine: bool
    least: float = np.inf
    most: float = 0.0

    def add(self, units: Units) -> None:
        """Raises BuildError where vectors of other lengths would be ranked otherwise."""
        good = units.lengths[units.good]
        if not len(good):
            return
        self.least = min(self.least, float(good.min()))
        self.most = max(self.most, float(good.max()))
        if self.metric == "cosine" or self.as_cosine:
            return
        if self.metric == "manhattan":
            raise BuildError(
                "the vectors were ranked by sums of absolute differences, which cosine doesn't "
                "keep, whatever their lengths. Import them all the same with --as-cosine"
            )
        if self.most > self.least * (1 + SAME_LENGTH):
            what = "inner product" if self.metric == "dot" else "distance"
            raise BuildError(
                f"the vectors' lengths differ, from {self.least:.4g} to {self.most:.4g}: by {what} "
                "they count, and this index ranks by cosine, which has none. Import them all the "
                "same with --as-cosine"
            )


class Stream:
    """One pass over a source into a folder."""

    def __init__(
        self,
        source: VectorSource,
        rotation: Rotation,
        modality: Modality,
        lengths: Lengths,
        failures_file: Path,
        root: Path,
        erased: frozenset[str] = frozenset(),
    ) -> None:
        """`root` is the folder that pictures' references start at, `erased` hashes of ids (16 hex
        digits) that are passed over.
        """
        self._source = source
        self._rotation = rotation
        self._modality = modality
        self._lengths = lengths
        self._failures_file = failures_file
        self._root = root
        self._erased = erased
        pictures = source.rooted or root != source.root
        self._fields = Fields.of(source.schema, modality, pictures=pictures)
        self._read = 0
        self._failed = 0
        self._lost_pictures = 0
        self._lost_values: Counter[str] = Counter()

    def write(
        self,
        folder: Path,
        dims: tuple[int, ...],
        rows_type: RowsType,
        step: Callable[[int], None],
    ) -> Streamed:
        """Rows, norms, items, id index, coded columns, failures. Raises CorpusError, BuildError."""
        self._failures_file.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            failures = stack.enter_context(self._failures_file.open("w", encoding="utf-8"))
            rows = stack.enter_context(
                RowWriter(folder, self._modality, dims, rows_type, self._source.count)
            )
            items = stack.enter_context(ItemWriter(folder, self._fields.schema, self._modality))
            for batch, units in _ahead(self._source):
                self._take(batch, units, rows, items, failures)
                step(len(batch.vectors))
            if not items.count:
                raise BuildError(
                    f"{self._source.source} holds no vector that can be used"
                    + (f"; see {self._failures_file}" if self._failed else "")
                )
            levels = rows.finish()
        self._finish(folder, items)
        lengths = (self._lengths.least, self._lengths.most)
        lost = dict(self._lost_values)
        return Streamed(levels, items.count, self._failed, self._lost_pictures, lengths, lost)

    def _finish(self, folder: Path, items: ItemWriter) -> None:
        table = open_table(folder / layout.ITEMS)
        items.write_index(table)
        write_coded(folder, table, [n for n in table.column_names if n not in OWN_COLUMNS])
        row_items = np.arange(items.count, dtype=np.int64)
        np.save(folder / layout.row_items_file(self._modality), row_items, allow_pickle=False)

    def _take(
        self,
        batch: RawBatch,
        units: Units,
        rows: RowWriter,
        items: ItemWriter,
        failures: Any,
    ) -> None:
        """One part: what is wrong with it is listed, the rest written."""
        count = len(batch.vectors)
        fields, table = self._fields, batch.table
        ids, reasons = ids_of(_column(table, fields.id), self._read, count)
        self._read += count
        bad = np.flatnonzero(~units.good).tolist()
        reasons |= {row: batch.reasons.get(row) or units.reason(row) for row in bad}
        for row in sorted(reasons):
            place = f"{batch.file.name} row {batch.first + row}"
            line = BadItem(place, ids[row].as_py(), reasons[row])
            failures.write(json.dumps(asdict(line)) + "\n")
        self._failed += len(reasons)
        kept = np.setdiff1d(np.arange(count), np.fromiter(reasons, np.int64, len(reasons)))
        if self._erased:
            names = (ids[row].as_py() for row in kept.tolist())
            kept = kept[[f"{id_hash(name):016x}" not in self._erased for name in names]]
        if not len(kept):
            return
        good = units if len(kept) == count else Units(units.vectors[kept], units.lengths[kept])
        self._lengths.add(good)
        rows.add(self._rotation(good.vectors))
        metadata, lost = fields.metadata_of(table)
        self._lost_values.update(lost)
        columns = [ids, self._pictures(batch), *metadata]
        texts = None
        if self._modality == "text":
            texts, unread = texts_of(_column(table, fields.text), count)
            self._lost_values.update({fields.text or "": unread} if unread else {})
        if len(kept) < count:
            columns = [column.take(kept) for column in columns]
            texts = None if texts is None else texts.take(kept)
        items.add(columns, texts, batch.file.name, batch.first + kept)

    def _pictures(self, batch: RawBatch) -> Any:
        """Pictures' references: (n,) strings or null."""
        count = len(batch.vectors)
        if self._fields.image is not None:
            column = batch.table.column(self._fields.image)
            refs, lost, unread = references(column, self._root)
            self._lost_pictures += lost
            self._lost_values.update({self._fields.image: unread} if unread else {})
            return one_chunk(refs)
        if not (self._source.pictures_inside and self._root == self._source.root):
            return pa.nulls(count, pa.string())
        numbers: RowArray = np.arange(batch.first, batch.first + count)
        marks = [f"{batch.file.name}{ROW_MARK}{number}" for number in numbers.tolist()]
        return pa.array(marks, pa.string())


def _ahead(source: VectorSource) -> Iterator[tuple[RawBatch, Units]]:
    """Parts of a source, normalised: one is read and made while the one before is used."""
    batches = source.batches()

    def take() -> tuple[RawBatch, Units] | None:
        batch = next(batches, None)
        return None if batch is None else (batch, unit_rows(batch.vectors))

    with ThreadPoolExecutor(1, thread_name_prefix="hivlp-read") as pool:
        waiting = pool.submit(take)
        while (found := waiting.result()) is not None:
            waiting = pool.submit(take)
            yield found


def _column(table: Any, name: str | None) -> Any | None:
    return None if name is None else table.column(name)

"""Tables, of one file or of many alike: CSV, JSONL (both plain or gzip) and Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from hivlp.index.build.cells import rows_of
from hivlp.index.build.items import (
    BadItem,
    Item,
    RowError,
    check_columns,
    image_columns,
    item_of_row,
)
from hivlp.index.build.readers.base import PLAIN, Corpus, CorpusOptions
from hivlp.index.build.readers.files import Files
from hivlp.index.build.readers.lines import (
    NOT_UTF8,
    UNREADABLE,
    LongLine,
    bounded_lines,
    open_text,
)
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root, open_parquet, table_ref

BATCH_ROWS = 256
BATCH_PICTURES = 16
"""Rows of a Parquet file read at a time, where there are pictures in it."""
MAX_COUNTED = 256
"""Parquet files whose rows are counted beforehand."""
Row = Mapping[str, Any] | BadItem
Rows = Iterator[tuple[str, Row]]
"""Each row with its place in the file."""


class TableCorpus(Corpus):
    """Rows of one table or, one after the other, of several with the same kind of name."""

    def __init__(
        self,
        source: Root,
        files: Files,
        names: Sequence[str],
        options: CorpusOptions = PLAIN,
    ) -> None:
        super().__init__(source, files.root, options)
        self.kind = table_kind(names[0]) or ""
        self._files = files
        self._names = names

    def count(self) -> int | None:
        """Rows, where the files know. Raises CorpusError."""
        if self.kind != "parquet" or len(self._names) > MAX_COUNTED:
            return None
        return sum(_count(self._files, name, self._label(name)) for name in self._names)

    def parts(self) -> Sequence[Corpus]:
        """One table each."""
        return [TableCorpus(self.source, self._files, [n], self.options) for n in self._names]

    def is_untyped(self) -> bool:
        """In CSV all values are texts."""
        return self.kind == "csv"

    def _read(self) -> Iterator[Item | BadItem]:
        for name in self._names:
            where = f"{name}: " if len(self._names) > 1 else ""
            for number, (place, row) in enumerate(self._rows(name)):
                yield self._item(f"{where}{place}", row, table_ref(name, number))

    def _item(self, place: str, row: Row, own_ref: str) -> Item | BadItem:
        if isinstance(row, BadItem):
            return BadItem(place, row.id, row.reason)
        return item_or_bad(row, self.root, own_ref, place, self.options)

    def _rows(self, name: str) -> Rows:
        readers = {"csv": csv_rows, "jsonl": jsonl_rows, "parquet": parquet_rows}
        return readers[self.kind](self._files, name, self._label(name), self.options)

    def _label(self, name: str) -> str:
        """How errors name a file of the corpus."""
        return f"{self.root}/{name}"


def table_kind(name: str) -> str | None:
    """csv, jsonl or parquet, by a file's name; None for anything else."""
    lower = name.lower()
    for kind, endings in (
        ("csv", (".csv", ".csv.gz")),
        ("jsonl", (".jsonl", ".jsonl.gz")),
        ("parquet", (".parquet",)),
    ):
        if lower.endswith(endings):
            return kind
    return None


def item_or_bad(
    row: Mapping[str, Any], root: Root, own_ref: str, place: str, options: CorpusOptions
) -> Item | BadItem:
    """The item that a row makes, or why it makes none."""
    try:
        return item_of_row(row, root, own_ref, options.aliases, place)
    except RowError as error:
        return BadItem(place, error.item_id, error.reason)
    except RecursionError:
        return BadItem(place, None, "nested too deep")


def csv_rows(files: Files, name: str, label: str, options: CorpusOptions) -> Rows:
    """Rows of a CSV file with a header, UTF-8. Raises CorpusError."""
    try:
        with open_text(files, name, newline="") as stream:
            reader = csv.DictReader(_csv_lines(stream))
            names = list(reader.fieldnames or ())
            if any(NOT_UTF8.search(column) for column in names):
                raise CorpusError(label, "unreadable: its header is not UTF-8")
            check_columns(label, names, options.aliases)
            yield from _csv_rows(reader)
    except (*UNREADABLE, csv.Error, LongLine) as error:
        raise CorpusError(label, f"unreadable: {error}") from error


def _csv_lines(stream: Any) -> Iterator[str]:
    for line in bounded_lines(stream):
        if isinstance(line, LongLine):
            raise line
        yield line


def _csv_rows(reader: csv.DictReader[str]) -> Rows:
    """Every row with its line; one that can't be read, such as a huge field, is a BadItem."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            place = f"line {reader.reader.line_num}"
            yield place, BadItem(place, None, f"not readable as CSV: {error}")
        else:
            place = f"line {reader.line_num}"
            yield place, _whole(row, place)


def _whole(row: dict[str | Any, Any], place: str) -> Row:
    """The row, unless it has more or fewer fields than the header."""
    if None in row:
        return BadItem(place, None, "more fields than the header has columns")
    if None in row.values():
        return BadItem(place, None, "fewer fields than the header has columns")
    if any(NOT_UTF8.search(value) for value in row.values()):
        return BadItem(place, None, "not UTF-8")
    return row


def jsonl_rows(files: Files, name: str, label: str, options: CorpusOptions) -> Rows:
    """One JSON object a line, UTF-8; blank lines are passed over. Raises CorpusError."""
    try:
        with open_text(files, name) as stream:
            for number, line in enumerate(bounded_lines(stream), start=1):
                place = f"line {number}"
                if isinstance(line, LongLine):
                    yield place, BadItem(place, None, str(line))
                elif line.strip():
                    row = json_object(line, place)
                    if not isinstance(row, BadItem) and "embedding" in row:
                        check_columns(label, list(row), options.aliases)
                    yield place, row
    except UNREADABLE as error:
        raise CorpusError(label, f"unreadable: {error}") from error


def json_object(text: str, place: str) -> Row:
    """The object that a text is, or why it is none."""
    if NOT_UTF8.search(text):
        return BadItem(place, None, "not UTF-8")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadItem(place, None, f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadItem(place, None, f"a JSON object is expected, got {type(row).__name__}")
    return row


def parquet_rows(files: Files, name: str, label: str, options: CorpusOptions) -> Rows:
    """Rows of a Parquet file; pictures are paths, bytes, or Hugging Face's {bytes, path}.

    Read page by page: a row group may be larger than the memory. A row with a value that Python has
    none for, such as a year after 9999, is a BadItem. Raises CorpusError.
    """
    number = 0
    try:
        with files.open(name) as stream, open_parquet(stream) as file:
            schema = file.schema_arrow
            check_columns(label, schema.names, options.aliases)
            rows = BATCH_PICTURES if _holds_pictures(schema, options) else BATCH_ROWS
            for batch in file.iter_batches(batch_size=rows):
                for row in rows_of(batch):
                    place = f"row {number}"
                    yield place, BadItem(place, None, row) if isinstance(row, str) else row
                    number += 1
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names not UTF-8
        raise CorpusError(label, f"not readable as Parquet at row {number}: {error}") from error


def _holds_pictures(schema: Any, options: CorpusOptions) -> bool:
    names = set(image_columns(options.aliases))
    return any(f.name in names and not pa.types.is_string(f.type) for f in schema)


def _count(files: Files, name: str, label: str) -> int:
    try:
        with files.open(name) as stream, open_parquet(stream) as file:
            return int(file.metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(label, f"not readable as Parquet: {error}") from error

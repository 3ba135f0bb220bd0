"""Reading what is to be searched: folders of pictures, CSV, JSONL, Parquet. Streamed.

    for found in open_corpus(path): ...      # Item or BadItem, in the corpus's own order

One bad row is a BadItem and the reading goes on; a corpus that can't be read at all, or that names
one id twice, raises CorpusError.
"""

from __future__ import annotations

import csv
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.build.items import (
    BadItem,
    Item,
    RowError,
    check_columns,
    check_id,
    item_of_row,
    safe_ref,
)
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import PICTURE_SUFFIXES, table_ref

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
PARQUET_BATCH = 256
# What `surrogateescape` makes of bytes that are not UTF-8; JSON's own escapes are still escaped.
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


class Corpus(ABC):
    """A readable corpus: `source` is what was given, `root` is where picture paths begin."""

    kind: str

    def __init__(self, source: Path, root: Path) -> None:
        self.source = source
        self.root = root

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Items and bad items. Raises CorpusError, also for an id that was seen before."""
        seen: set[str] = set()
        for found in self._read():
            if isinstance(found, Item):
                if found.id in seen:
                    raise CorpusError(str(self.source), f"id {found.id!r} is there twice")
                seen.add(found.id)
            yield found

    def count(self) -> int | None:
        """How many items to expect, where that is cheap to know."""
        return None

    @abstractmethod
    def _read(self) -> Iterator[Item | BadItem]: ...


def open_corpus(path: Path) -> Corpus:
    """The reader for a path. Raises CorpusError for what is no corpus."""
    if _NOT_UTF8.search(str(path.resolve())):
        raise CorpusError(repr(str(path)), "its path is not UTF-8")
    if path.is_dir():
        return FolderCorpus(path)
    if not path.is_file():
        raise CorpusError(str(path), "no such file or folder")
    readers: dict[str, type[Corpus]] = {
        ".csv": CsvCorpus,
        ".jsonl": JsonlCorpus,
        ".parquet": ParquetCorpus,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        wanted = ", ".join(readers)
        raise CorpusError(str(path), f"not a folder of pictures, and not one of {wanted}")
    return reader(path, path.parent)


class _TableCorpus(Corpus):
    """Rows one by one, each with its place; a subclass says where rows come from."""

    def _read(self) -> Iterator[Item | BadItem]:
        for number, (place, row) in enumerate(self._rows()):
            if isinstance(row, BadItem):
                yield row
                continue
            try:
                yield item_of_row(row, self.root, table_ref(self.source.name, number))
            except RowError as error:
                yield BadItem(place, error.item_id, error.reason)
            except RecursionError:
                yield BadItem(place, None, "nested too deep")

    @abstractmethod
    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any] | BadItem]]: ...


class CsvCorpus(_TableCorpus):
    """A CSV file with a header, UTF-8; numbers and booleans are told by the whole column."""

    kind = "csv"

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any] | BadItem]]:
        try:
            with _open_text(self.source, newline="") as stream:
                reader = csv.DictReader(stream)
                names = list(reader.fieldnames or ())
                if any(_NOT_UTF8.search(name) for name in names):
                    raise CorpusError(str(self.source), "unreadable: its header is not UTF-8")
                check_columns(str(self.source), names)
                yield from _csv_rows(reader)
        except (OSError, csv.Error) as error:
            raise CorpusError(str(self.source), f"unreadable: {error}") from error


def _open_text(path: Path, newline: str | None = None) -> TextIO:
    """UTF-8, with or without a byte order mark; a row with other bytes is refused by itself."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _csv_rows(reader: csv.DictReader[str]) -> Iterator[tuple[str, Mapping[str, Any] | BadItem]]:
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


def _whole(row: dict[str | Any, Any], place: str) -> Mapping[str, Any] | BadItem:
    """The row, unless it has more or fewer fields than the header."""
    if None in row:
        return BadItem(place, None, "more fields than the header has columns")
    if None in row.values():
        return BadItem(place, None, "fewer fields than the header has columns")
    if any(_NOT_UTF8.search(value) for value in row.values()):
        return BadItem(place, None, "not UTF-8")
    return row


class JsonlCorpus(_TableCorpus):
    """One JSON object a line, UTF-8; blank lines are passed over."""

    kind = "jsonl"

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any] | BadItem]]:
        try:
            with _open_text(self.source) as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield f"line {number}", self._parse(line, f"line {number}")
        except OSError as error:
            raise CorpusError(str(self.source), f"unreadable: {error}") from error

    def _parse(self, line: str, place: str) -> Mapping[str, Any] | BadItem:
        if _NOT_UTF8.search(line):
            return BadItem(place, None, "not UTF-8")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            return BadItem(place, None, f"not JSON: {error}")
        if not isinstance(row, dict):
            return BadItem(place, None, f"a JSON object is expected, got {type(row).__name__}")
        if "embedding" in row:
            check_columns(str(self.source), list(row))
        return row


class ParquetCorpus(_TableCorpus):
    """A Parquet file; pictures are paths, bytes, or Hugging Face's {bytes, path}."""

    kind = "parquet"

    def count(self) -> int | None:
        """Rows of the file. Raises CorpusError."""
        return int(self._file().metadata.num_rows)

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any] | BadItem]]:
        file = self._file()
        check_columns(str(self.source), list(file.schema_arrow.names))
        number = 0
        try:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(str(self.source), f"unreadable at row {number}: {error}") from error

    def _file(self) -> Any:
        try:
            return pq.ParquetFile(self.source)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(str(self.source), f"not readable as Parquet: {error}") from error


class FolderCorpus(Corpus):
    """A folder of pictures, at any depth; hidden files and folders are passed over.

    `PICTURE.txt` beside a picture holds its captions, one a line. With a `metadata.csv`, `.jsonl`
    or `.parquet` (column `file_name`), its rows come first and unlisted pictures after.
    """

    kind = "folder"

    def __init__(self, source: Path) -> None:
        super().__init__(source, source)
        self._pictures: list[str] | None = None

    def count(self) -> int | None:
        """Pictures in the folder."""
        return len(self._listed())

    def _read(self) -> Iterator[Item | BadItem]:
        listed: set[str] = set()
        table = self._table()
        for found in table._read() if table else ():
            if isinstance(found, Item) and found.image:
                listed.add(found.image)
            yield found
        for name in self._listed():
            if name not in listed:
                yield self._item(name)

    def _table(self) -> Corpus | None:
        tables = [self.source / name for name in METADATA_NAMES if (self.source / name).is_file()]
        if len(tables) > 1:
            names = " and ".join(path.name for path in tables)
            raise CorpusError(str(self.source), f"both {names}: keep one")
        return open_corpus(tables[0]) if tables else None

    def _listed(self) -> list[str]:
        if self._pictures is None:
            self._pictures = sorted(_pictures_below(self.source))
        return self._pictures

    def _item(self, name: str) -> Item | BadItem:
        try:
            ref = safe_ref(self.root, name)
            captions = _sidecar(self.root, name)
            return Item(check_id(name), ref, captions)
        except RowError as error:
            return BadItem(name, None, error.reason)


def _pictures_below(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in PICTURE_SUFFIXES:
                yield (Path(parent) / name).relative_to(folder).as_posix()


def _unreadable(error: OSError) -> None:
    raise CorpusError(str(error.filename), f"unreadable: {error.strerror}") from error


def _sidecar(root: Path, picture: str) -> tuple[str, ...]:
    """Captions of `picture`'s .txt, in order and without repeats. Raises RowError."""
    beside = Path(picture).with_suffix(".txt")
    if not os.path.lexists(root / beside):
        return ()
    try:
        target = root / safe_ref(root, beside.as_posix())
        if not target.is_file():
            raise RowError("not a file")
        text = target.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, RowError) as error:
        raise RowError(f"its captions can't be read: {error}") from error
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))

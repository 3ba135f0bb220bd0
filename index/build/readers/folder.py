"""Folders of pictures, with captions beside them or a table that lists them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

from hivlp.index.build.items import BadItem, Item, RowError, check_id, safe_ref
from hivlp.index.build.readers.base import PLAIN, Corpus, CorpusOptions
from hivlp.index.build.readers.files import Files, files_at, files_below
from hivlp.index.build.readers.tables import TableCorpus
from hivlp.index.build.seen import SeenHashes
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import PICTURE_SUFFIXES, Root, root_text
from hivlp.index.snapshot.catalogue import id_hash

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
MAX_CAPTIONS_BYTES = 16 * 2**20


class FolderCorpus(Corpus):
    """A folder of pictures, at any depth; hidden files and folders are passed over.

    `PICTURE.txt` beside a picture holds its captions, one a line. With a `metadata.csv`, `.jsonl`
    or `.parquet` (column `file_name`), its rows come first and unlisted pictures after. Takes the
    listings of one folder and those above it, and 16 bytes for each picture that a table lists.
    """

    kind = "folder"

    def __init__(self, source: Root, options: CorpusOptions = PLAIN) -> None:
        super().__init__(source, source, options)
        self._files = files_at(source)

    def count(self) -> int | None:
        """Pictures in a local folder."""
        local = isinstance(self.root, Path)
        return sum(1 for _ in pictures_below(self._files)) if local else None

    def is_untyped(self) -> bool:
        """As its table is, where it has one."""
        table = self._table()
        return table is not None and table.is_untyped()

    def _read(self) -> Iterator[Item | BadItem]:
        table = self._table()
        listed = _Listed()
        for found in table._read() if table else ():
            if isinstance(found, Item) and found.image:
                listed.add(found.image)
            yield found
        for name, beside in pictures_below(self._files):
            if table is None or name not in listed:
                yield self._item(name, beside)

    def _table(self) -> Corpus | None:
        there = {name for name, is_folder in self._files.listing() if not is_folder}
        tables = [name for name in METADATA_NAMES if name in there]
        if len(tables) > 1:
            names = " and ".join(tables)
            raise CorpusError(root_text(self.source), f"both {names}: keep one")
        return TableCorpus(self.source, self._files, tables, self.options) if tables else None

    def _item(self, name: str, beside: Set[str]) -> Item | BadItem:
        captions_name = PurePosixPath(name).with_suffix(".txt")
        try:
            ref = safe_ref(self.root, name)
            captions = (
                _captions(self._files, captions_name.as_posix())
                if captions_name.name in beside
                else ()
            )
            return Item(check_id(name.strip()), ref, captions, place=name)
        except RowError as error:
            return BadItem(name, None, error.reason)


class _Listed:
    """Names that a table lists, by 128 bits of hash: 16 bytes each."""

    def __init__(self) -> None:
        self._halves = SeenHashes(), SeenHashes()

    def add(self, name: str) -> None:
        for half, number in zip(self._halves, _two_hashes(name), strict=True):
            half.add(number)

    def __contains__(self, name: str) -> bool:
        numbers = zip(self._halves, _two_hashes(name), strict=True)
        return all(number in half for half, number in numbers)


def _two_hashes(name: str) -> tuple[int, int]:
    return id_hash(name), id_hash(f"\0{name}")


def pictures_below(files: Files) -> Iterator[tuple[str, Set[str]]]:
    """Every picture by its name's ending, and what lies beside it; see `files_below`."""
    for name, beside in files_below(files):
        if PurePosixPath(name).suffix.lower() in PICTURE_SUFFIXES:
            yield name, beside


def _captions(files: Files, name: str) -> tuple[str, ...]:
    """The captions in a file, in order and without repeats. Raises RowError."""
    try:
        target = safe_ref(files.root, name)
        if isinstance(files.root, Path) and not files.is_file(target):
            raise RowError("not a file")
        with files.open(target) as stream:
            return caption_lines(stream.read(MAX_CAPTIONS_BYTES + 1))
    except (OSError, UnicodeDecodeError, RowError) as error:
        raise RowError(f"its captions can't be read: {error}") from error


def caption_lines(data: bytes) -> tuple[str, ...]:
    """The different lines of a text. Raises RowError, UnicodeDecodeError."""
    if len(data) > MAX_CAPTIONS_BYTES:
        raise RowError(f"more than {MAX_CAPTIONS_BYTES} bytes of captions")
    text = data.decode("utf-8-sig")
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))

"""Reading a picture by the reference that a snapshot keeps of it.

A reference is a path relative to the corpus's root; or, for a picture whose bytes lie in another
file there, `FILE#row=N` (a row of a Parquet file) or `FILE#offset=O,size=S` (a member of a tar).
Never anything outside the root. The root is a folder, or a URL that fsspec opens.
"""

from __future__ import annotations

import re
import stat
import tarfile
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache

from hivlp.index.errors import CorpusError
from hivlp.index.remote import RemoteFolder, below, is_url

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
IMAGE_COLUMNS = ("image", "image_path", "file_name")
"""Where a table's pictures are looked for; the first filled one counts."""
DOWNLOADED_COLUMNS = ("jpg", "png", "webp")
"""Where img2dataset puts them besides."""
ROW_MARK, OFFSET_MARK = "#row=", "#offset="
MAX_PICTURE_BYTES = 64 * 2**20
MAX_KEPT_BYTES = 64 * 2**20
"""Row groups whose pictures decode to more are read batch by batch each time, and not kept."""
BATCH_ROWS = 4
"""Rows that are decoded at a time: each may hold a picture of the largest size."""
TAR_BLOCK = 512
PAGE_BUFFER = 2**20
Root = Path | str
"""A local folder, or a URL."""
_TABLE_REF = re.compile(rf"(.+\.parquet){ROW_MARK}([0-9]{{1,18}})", re.IGNORECASE | re.DOTALL)
_TAR_REF = re.compile(
    rf"(.+\.tar){OFFSET_MARK}([0-9]{{1,18}}),size=([0-9]{{1,10}})", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Within:
    """Where in a file a picture lies: `row` of a table, or `size` bytes from `offset` of a tar."""

    row: int | None = None
    offset: int = 0
    size: int = 0


def picture_root(text: str) -> Root:
    """The root that a manifest names."""
    return text if is_url(text) else Path(text)


def root_text(root: Root) -> str:
    """A root as a manifest names it."""
    return root if isinstance(root, str) else str(root.resolve())


def table_ref(file: str, row: int) -> str:
    """Reference of the picture in row `row` of a table beside the corpus."""
    return f"{file}{ROW_MARK}{row}"


def tar_ref(file: str, offset: int, size: int) -> str:
    """Reference of the picture whose bytes begin at `offset` of a tar."""
    return f"{file}{OFFSET_MARK}{offset},size={size}"


def split_ref(ref: str) -> tuple[str, Within | None]:
    """The file that a reference names, and the place in it where the picture is not the file."""
    if found := _TABLE_REF.fullmatch(ref):
        return found[1], Within(row=int(found[2]))
    if found := _TAR_REF.fullmatch(ref):
        return found[1], Within(offset=int(found[2]), size=int(found[3]))
    return ref, None


def read_picture(root: Root, ref: str) -> bytes:
    """The bytes of a picture. Raises CorpusError where it is gone, unreadable or outside `root`.

    Only regular files are read, and no picture over MAX_PICTURE_BYTES: a pipe would never end.
    """
    file, within = split_ref(ref)
    try:
        found = _Remote(root, file) if isinstance(root, str) else _Local(root, file, ref)
        if within is None:
            _check_size(found.size)
            return found.read(0, found.size)
        if within.row is not None:
            return _cell(found, within.row)
        return _member(found, within)
    except (OSError, ValueError, RuntimeError, pa.ArrowException, tarfile.TarError) as error:
        raise CorpusError(ref, f"unreadable: {error}") from error


def remote_stamp(root: str, ref: str) -> tuple[int, str]:
    """Size of the file that a reference names below a URL, and a text that changes when it does.

    Raises CorpusError.
    """
    try:
        file = _Remote(root, split_ref(ref)[0])
    except (OSError, ValueError) as error:
        raise CorpusError(ref, f"unreadable: {error}") from error
    return file.size, file.stamp


class _Local:
    """A regular file below a folder, links resolved. Raises CorpusError, OSError, ValueError."""

    def __init__(self, root: Path, file: str, ref: str) -> None:
        home = root.resolve()
        self._path = (home / file).resolve()
        if not self._path.is_relative_to(home):
            raise CorpusError(ref, "leaves the corpus")
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a file")
        self.size = found.st_size
        self.key: tuple[object, ...] = (self._path, found.st_mtime_ns, found.st_size)

    def open(self) -> BinaryIO:
        return self._path.open("rb")

    def read(self, offset: int, size: int) -> bytes:
        with self.open() as stream:
            stream.seek(offset)
            return stream.read(size)


class _Remote:
    """A file below a URL. Raises CorpusError, OSError, ValueError."""

    def __init__(self, root: str, file: str) -> None:
        self._folder = RemoteFolder(root)
        self._name = below(root, file)
        self.size, self.stamp = self._folder.stamp(self._name)
        self.key: tuple[object, ...] = (root, self._name, self.size, self.stamp)

    def open(self) -> BinaryIO:
        return self._folder.open(self._name)

    def read(self, offset: int, size: int) -> bytes:
        return self._folder.read(self._name, offset, size)


def _check_size(size: int) -> None:
    if size > MAX_PICTURE_BYTES:
        raise ValueError(f"{size} bytes, the limit is {MAX_PICTURE_BYTES}")


def _member(file: _Local | _Remote, within: Within) -> bytes:
    """A tar's member, whose header must stand before it. Raises ValueError, TarError."""
    _check_size(within.size)
    start = within.offset - TAR_BLOCK
    if start < 0 or start % TAR_BLOCK or within.offset + within.size > file.size:
        raise ValueError("no member of the tar lies there")
    data = file.read(start, TAR_BLOCK + within.size)
    if not is_member(data[:TAR_BLOCK], within.size) or len(data) != TAR_BLOCK + within.size:
        raise ValueError("no member of the tar begins there")
    return data[TAR_BLOCK:]


def is_member(header: bytes, size: int) -> bool:
    """Whether a tar's block is the header of a regular file of `size` bytes."""
    try:
        found = tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:
        return False
    return found.isreg() and not found.issparse() and found.size == size


def _cell(file: _Local | _Remote, row: int) -> bytes:
    """The picture of one row. Raises ValueError where there is none."""
    with file.open() as stream, open_parquet(stream) as table:
        for group in range(table.metadata.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if row < count:
                cells = _row(table, (file.key, group), row)
                return _bytes(next((cell for cell in cells if cell not in (None, "")), None))
            row -= count
    raise ValueError("no such row")


def _row(table: Any, key: tuple[Hashable, int], row: int) -> list[Any]:
    """The picture columns of one row of a row group; neighbours are read and kept together.

    Raises ValueError.
    """
    with _KEPT_LOCK:
        kept = _KEPT.get(key)
    if kept is None:
        names, group = _image_names(table), key[1]
        keep = _bytes_of(table, group, names) <= MAX_KEPT_BYTES
        found, kept = _streamed(table, group, names, row, keep)
        if kept is not None:
            with _KEPT_LOCK:
                _KEPT[key] = kept
    else:
        found = kept.row(row)
    if found is None:
        raise ValueError("no such row")
    return found


def _streamed(
    table: Any, group: int, names: list[str], row: int, keep: bool
) -> tuple[list[Any] | None, _Rows | None]:
    """The cells of one row, and all batches of its row group, where `keep` and they are small.

    Their size is known as they are decoded: a file says how large a column is with each value of
    its dictionary once, however many rows have it.
    """
    kept = _Rows() if keep else None
    found, first = None, 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=names):
        if first <= row < first + batch.num_rows:
            found = [batch.column(name)[row - first].as_py() for name in names]
        first += batch.num_rows
        if kept is not None:
            kept.add(batch)
            kept = kept if kept.size <= MAX_KEPT_BYTES else None
        if kept is None and found is not None:
            break
    return found, kept


class _Rows:
    """Decoded batches of one row group, and their bytes."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self.size = 1

    def add(self, batch: Any) -> None:
        self._batches.append(batch)
        self.size += batch.get_total_buffer_size()

    def row(self, row: int) -> list[Any] | None:
        """The cells of a row, None where there is no such row."""
        for batch in self._batches:
            if row < batch.num_rows:
                return [column[row].as_py() for column in batch.columns]
            row -= batch.num_rows
        return None


_KEPT: LRUCache[tuple[Hashable, int], _Rows] = LRUCache(
    2 * MAX_KEPT_BYTES, getsizeof=lambda rows: rows.size
)
"""Row groups by their file, as it was, and number."""
_KEPT_LOCK = threading.Lock()


def open_parquet(source: Any) -> Any:
    """A Parquet file whose columns are read page by page, not whole row groups at a time.

    Raises OSError, pyarrow.ArrowException.
    """
    return pq.ParquetFile(source, buffer_size=PAGE_BUFFER, pre_buffer=False)


def _image_names(table: Any) -> list[str]:
    names = table.schema_arrow.names
    return [name for name in (*IMAGE_COLUMNS, *DOWNLOADED_COLUMNS) if name in names]


def _bytes_of(table: Any, group: int, names: list[str]) -> int:
    """Bytes of some columns of a row group as the file says, the least that they decode to."""
    record = table.metadata.row_group(group)
    chunks = (record.column(i) for i in range(record.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names)


def _bytes(value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise ValueError("the row holds no picture")
    _check_size(len(value))
    return value

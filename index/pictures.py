"""Reading a picture by the reference that a snapshot keeps of it.

A reference is a path relative to the corpus's root, or `FILE#row=N` for a picture whose bytes lie
in a Parquet file. Never anything outside the root.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.errors import CorpusError

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
IMAGE_COLUMNS = ("image", "image_path", "file_name")
"""Where a table's pictures are looked for; the first filled one counts."""
ROW_MARK = "#row="
MAX_PICTURE_BYTES = 64 * 2**20
_TABLE_REF = re.compile(rf"(.+\.parquet){ROW_MARK}([0-9]{{1,18}})", re.IGNORECASE | re.DOTALL)


def table_ref(file: str, row: int) -> str:
    """Reference of the picture in row `row` of a table beside the corpus."""
    return f"{file}{ROW_MARK}{row}"


def split_ref(ref: str) -> tuple[str, int | None]:
    """The file that a reference names, and the row in it where that is a table."""
    found = _TABLE_REF.fullmatch(ref)
    return (found[1], int(found[2])) if found else (ref, None)


def read_picture(root: Path, ref: str) -> bytes:
    """The bytes of a picture. Raises CorpusError where it is gone, unreadable or outside `root`.

    Only regular files are read, and none over MAX_PICTURE_BYTES: a pipe would never end.
    """
    file, row = split_ref(ref)
    try:
        home = root.resolve()
        target = (home / file).resolve()
        if not target.is_relative_to(home):
            raise CorpusError(ref, "leaves the corpus")
        if row is not None:
            return _cell(target, row)
        _check_file(target)
        return target.read_bytes()
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        raise CorpusError(ref, f"unreadable: {error}") from error


def _check_file(path: Path) -> None:
    """Raises OSError where there is nothing, ValueError where it is no file of a fair size."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file")
    if found.st_size > MAX_PICTURE_BYTES:
        raise ValueError(f"{found.st_size} bytes, the limit is {MAX_PICTURE_BYTES}")


def _cell(path: Path, row: int) -> bytes:
    """The picture of one row. Raises ValueError where there is none."""
    with pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row < count:
                columns = _images(path, group, path.stat().st_mtime_ns)
                cells = (column[row].as_py() for column in columns)
                return _bytes(next((cell for cell in cells if cell not in (None, "")), None))
            row -= count
    raise ValueError("no such row")


@lru_cache(maxsize=2)
def _images(path: Path, group: int, changed: int) -> list[Any]:  # noqa: ARG001  part of the key
    """The picture columns of one row group; neighbours are read together."""
    with pq.ParquetFile(path) as file:
        names = [name for name in IMAGE_COLUMNS if name in file.schema_arrow.names]
        table = file.read_row_group(group, columns=names)
    return [table.column(name) for name in names]


def _bytes(value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise ValueError("the row holds no picture")
    return value

"""Reading a picture by the reference that a snapshot keeps of it.

A reference is a path relative to the corpus's root, or `FILE#row=N` for a picture whose bytes lie
in a Parquet file. Never anything outside the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.errors import CorpusError

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
ROW_MARK = "#row="


def table_ref(file: str, row: int) -> str:
    """Reference of the picture in row `row` of a table beside the corpus."""
    return f"{file}{ROW_MARK}{row}"


def read_picture(root: Path, ref: str) -> bytes:
    """The bytes of a picture. Raises CorpusError where it is gone, unreadable or outside `root`."""
    file, mark, row = ref.rpartition(ROW_MARK)
    home = root.resolve()
    target = (home / (file if mark else ref)).resolve()
    if not target.is_relative_to(home):
        raise CorpusError(ref, "leaves the corpus")
    try:
        return _cell(target, int(row)) if mark else target.read_bytes()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorpusError(ref, f"unreadable: {error}") from error


def _cell(path: Path, row: int) -> bytes:
    """The picture of one row. Raises ValueError where there is none."""
    file = pq.ParquetFile(path)
    for group in range(file.metadata.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if row < count:
            return _bytes(_images(path, group, path.stat().st_mtime_ns)[row].as_py())
        row -= count
    raise ValueError("no such row")


@lru_cache(maxsize=2)
def _images(path: Path, group: int, changed: int) -> Any:  # noqa: ARG001  part of the cache key
    """The picture column of one row group; neighbours are read together."""
    return pq.ParquetFile(path).read_row_group(group, columns=["image"]).column("image")


def _bytes(value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise ValueError("the row holds no picture")
    return value

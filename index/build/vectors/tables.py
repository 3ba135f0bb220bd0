"""Parquet files read a part at a time, as tables of one schema.

Columns of bytes are never read, but for ids and captions, which some programs write so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.build.items import CAPTION_COLUMNS, ID_COLUMNS
from hivlp.index.errors import CorpusError

PART_BYTES = 32 * 2**20
"""Of the columns beside the vectors, decoded: what a part has, and up to READ_ROWS rows more."""
READ_ROWS = 256
"""Rows that are decoded at a time."""


def open_parquet(path: Path) -> Any:
    """An open file; use it with `with`. Raises CorpusError."""
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorpusError(str(path), f"not a readable Parquet file: {error}") from error


def schema_of(path: Path) -> Any:
    """The Arrow schema of a file. Raises CorpusError, also for two columns of one name."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    try:
        schema.names  # noqa: B018
    except UnicodeDecodeError as error:
        raise CorpusError(str(path), "a column's name is not UTF-8") from error
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise CorpusError(str(path), f"two columns are named {twice!r}")
    return schema


def row_count(path: Path) -> int:
    """Rows of a file. Raises CorpusError."""
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)


def unified(files: Sequence[Path], vectors: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """One schema for several files, without the column of vectors and those of bytes, and the names
    of the latter. Ids and captions that are said to be bytes are texts.

    Raises CorpusError where a column is of kinds that have nothing in common.
    """
    schemas = []
    left_out: set[str] = set()
    for path in files:
        fields = [pa.field(f.name, _kind_of(f)) for f in schema_of(path) if f.name != vectors]
        left_out |= {field.name for field in fields if _holds_bytes(field.type)}
        schemas.append(pa.schema([field for field in fields if not _holds_bytes(field.type)]))
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise CorpusError(str(files[0].parent), f"columns of its files differ: {error}") from error
    # Bytes in one file and texts in another: a column is one or the other.
    left_out -= set(schema.names)
    return schema, tuple(sorted(left_out))


def read_parts(
    path: Path, columns: Sequence[str], step: int, vectors: str | None = None
) -> Iterator[Any]:
    """Tables of at most `step` rows with the named columns that there are, of about PART_BYTES
    beside those of `vectors`. Raises CorpusError.
    """
    with open_parquet(path) as file:
        there = [name for name in columns if name in file.schema_arrow.names]
        rows = min(step, READ_ROWS)
        try:
            if there:
                yield from _joined(file.iter_batches(rows, columns=there), step, vectors)
            else:  # of no columns Arrow doesn't say how many rows there are
                yield from _nothing(int(file.metadata.num_rows), step)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(str(path), f"unreadable: {error}") from error


def _joined(batches: Iterable[Any], step: int, vectors: str | None) -> Iterator[Any]:
    """Small batches joined: how large rows are is known when they are decoded, not before."""
    waiting: list[Any] = []
    rows = size = 0
    for batch in batches:
        if waiting and rows + batch.num_rows > step:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += sum(batch.column(f.name).nbytes for f in batch.schema if f.name != vectors)
        if rows >= step or size >= PART_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _nothing(count: int, step: int) -> Iterator[Any]:
    for first in range(0, count, step):
        yield pa.table({"": pa.nulls(min(step, count - first))})


def as_table(part: Any, schema: Any, path: Path) -> Any:
    """The columns of a part of a file as a schema has them; nulls where it lacks one.

    Raises CorpusError naming a column that doesn't fit.
    """
    columns = [
        _as_type(part.column(field.name), field, path)
        if field.name in part.schema.names
        else pa.nulls(part.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _as_type(column: Any, field: Any, path: Path) -> Any:
    try:
        if pa.types.is_fixed_size_binary(column.type):
            column = column.cast(pa.binary())
        return column.cast(field.type)
    except pa.ArrowException as error:
        wanted = f"{column.type} can't be read as {field.type}"
        raise CorpusError(str(path), f"column {field.name!r}: {wanted}: {error}") from error


def _kind_of(field: Any) -> Any:
    """A column's type without a dictionary, which files need not share, and text for names."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if field.name not in (*ID_COLUMNS, *CAPTION_COLUMNS):
        return kind
    if _is_bytes(kind):
        return pa.string()
    lists = (pa.types.is_list(kind), pa.types.is_large_list(kind))
    return pa.list_(pa.string()) if any(lists) and _is_bytes(kind.value_type) else kind


def _holds_bytes(kind: Any) -> bool:
    return _is_bytes(kind) or any(
        _holds_bytes(kind.field(place).type) for place in range(kind.num_fields)
    )


def _is_bytes(kind: Any) -> bool:
    is_bytes = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_binary_view,
    )
    return any(test(kind) for test in is_bytes)

"""Parquet files read a part at a time, as tables of one schema. Columns of bytes are never read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.errors import CorpusError


def open_parquet(path: Path) -> Any:
    """An open file; use it with `with`. Raises CorpusError."""
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(str(path), f"not a readable Parquet file: {error}") from error


def schema_of(path: Path) -> Any:
    """The Arrow schema of a file. Raises CorpusError, also for two columns of one name."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise CorpusError(str(path), f"two columns are named {twice!r}")
    return schema


def row_count(path: Path) -> int:
    """Rows of a file. Raises CorpusError."""
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)


def unified(files: Sequence[Path], vectors: str | None = None) -> Any:
    """One schema for several files, without the column of vectors and those of bytes.

    Raises CorpusError where a column is of kinds that have nothing in common.
    """
    schemas = []
    for path in files:
        schema = schema_of(path)
        wanted = [f for f in schema if f.name != vectors and not _holds_bytes(f.type)]
        schemas.append(pa.schema([f.remove_metadata() for f in wanted]))
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise CorpusError(str(files[0].parent), f"columns of its files differ: {error}") from error


def read_parts(path: Path, columns: Sequence[str], step: int) -> Iterator[Any]:
    """Record batches of at most `step` rows with the named columns. Raises CorpusError."""
    with open_parquet(path) as file:
        there = [name for name in columns if name in file.schema_arrow.names]
        try:
            yield from file.iter_batches(step, columns=there)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(str(path), f"unreadable: {error}") from error


def as_table(batch: Any, schema: Any) -> Any:
    """A record batch's columns as a schema has them; nulls where it lacks one."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _holds_bytes(kind: Any) -> bool:
    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    if any(test(kind) for test in is_bytes):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))

"""Ranks, query by query, on disk: one row for each query, direction and system.

    query      the item's id; of a caption, with its place: `391895#2`
    item       the item's id
    from, to   what was asked with and what was searched: `image` or `text`
    system     `level 1`, `cascade`, `funnel`, `early exit`, `cascade, re-ranked`
    fold       from 0 on
    rank       1-based, ties against; null where the system found nothing right
    ann10      ANN recall@10; null of what is re-ranked
    found      of a plan, its first 10 answers by name, as queries are called; else null

Written block by block as they are measured, so that any number of queries takes little memory;
under another name until all is there. Notable: `--against` reads such a file, of whatever program:
what it needs are `query`, `item`, `from`, `to`, `system` and `rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hivlp.index.errors import BuildError
from hivlp.index.evaluation.measure import Scored
from hivlp.models.levels import Modality

ENDINGS = (".parquet", ".jsonl")
SCHEMA = pa.schema(
    [
        ("query", pa.string()),
        ("item", pa.string()),
        ("from", pa.string()),
        ("to", pa.string()),
        ("system", pa.string()),
        ("fold", pa.int32()),
        ("rank", pa.int64()),
        ("ann10", pa.float32()),
        ("found", pa.list_(pa.string())),
    ]
)
NEEDED = ("query", "item", "from", "to", "system", "rank")


def check_ranks_name(path: Path) -> Path:
    """The path, unless its ending says no form. Raises BuildError."""
    if path.suffix not in ENDINGS:
        raise BuildError(f"ranks: {path} ends in neither {' nor '.join(ENDINGS)}")
    return path


class _Sink(Protocol):
    def write(self, table: Any) -> None: ...
    def close(self) -> None: ...


class RanksWriter:
    """Writes a ranks file: `with RanksWriter(path) as ranks: ranks.add(...)`. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = check_ranks_name(path)
        self._partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet = path.suffix == ".parquet"
        self._sink: _Sink = _Parquet(self._partial) if parquet else _Lines(self._partial)

    def __enter__(self) -> RanksWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sink.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)

    def add(
        self,
        direction: tuple[Modality, Modality],
        system: str,
        fold: int,
        names: tuple[Sequence[str], Sequence[str]],
        scored: Scored,
        found: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """One system of a block of queries; `names` are those of the queries and of their items,
        `found` those of what each was answered with (None: not known).
        """
        count = len(scored.ranks)
        lost, unknown = np.isinf(scored.ranks), np.isnan(scored.ann)
        columns = [
            pa.array(names[0], pa.string()),
            pa.array(names[1], pa.string()),
            *(pa.repeat(pa.scalar(text, pa.string()), count) for text in (*direction, system)),
            pa.repeat(pa.scalar(fold, pa.int32()), count),
            pa.array(np.where(lost, 0, scored.ranks).astype(np.int64), mask=lost),
            pa.array(scored.ann.astype(np.float32), mask=unknown),
            pa.array([None] * count if found is None else found, pa.list_(pa.string())),
        ]
        self._sink.write(pa.Table.from_arrays(columns, schema=SCHEMA))


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")

    def write(self, table: Any) -> None:
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


class _Lines:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")

    def write(self, table: Any) -> None:
        for row in table.to_pylist():
            self._stream.write(orjson.dumps(row) + b"\n")

    def close(self) -> None:
        self._stream.close()


def read_ranks(path: Path) -> Any:
    """A ranks file as an Arrow table: five texts, `rank` and `ann10` as float64, lists of texts.

    Raises BuildError naming what is wrong.
    """
    check_ranks_name(path)
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else _read_lines(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BuildError(f"ranks: {path}: not readable: {error}") from error
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise BuildError(f"ranks: {path}: no column {missing[0]!r}; {', '.join(NEEDED)} are needed")
    if "ann10" not in table.column_names:
        table = table.append_column("ann10", pa.nulls(table.num_rows, pa.float32()))
    if "found" not in table.column_names:
        table = table.append_column("found", pa.nulls(table.num_rows, pa.list_(pa.string())))
    try:
        texts = [table.column(name).cast(pa.string()) for name in NEEDED[:5]]
        ranks = table.column("rank").cast(pa.float64())
        ann = table.column("ann10").cast(pa.float64())
        found = table.column("found").cast(pa.list_(pa.string()))
    except pa.ArrowException as error:
        raise BuildError(f"ranks: {path}: a column of another type: {error}") from error
    least = pc.min(ranks).as_py() if len(ranks) else None
    if least is not None and least < 1:
        raise BuildError(f"ranks: {path}: rank {least:g}; the first is 1")
    return pa.table([*texts, ranks, ann, found], names=[*NEEDED, "ann10", "found"])


def _read_lines(path: Path) -> Any:
    import pyarrow.json as lines

    return lines.read_json(path)

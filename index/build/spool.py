"""Encoded items in their order, on disk: a corpus of any size is passed over, never held.

Items are kept in blocks of Arrow records in a nameless file. Their metadata is JSON, in which what
JSON has no word for (dates, times, and values that become text anyway) is an object of one letter;
it is parsed only where it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from hivlp.index.build.columns import Printed, kind_of_value, printed
from hivlp.index.snapshot.scratch import Scratch, Span

BLOCK_ITEMS = 1_024
BLOCK_CHARS = 4 * 2**20
_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "image": pa.string(),
        "image_key": pa.binary(),
        "texts": pa.list_(pa.string()),
        "text_keys": pa.list_(pa.binary()),
        "metadata": pa.string(),
    }
)
_KEPT_TIMES = (("id", 1), ("image", 1), ("texts", 1), ("metadata", 2))
"""How often a version has a column's content: metadata in the table and coded for filters."""
_AS_IS = frozenset({str, int, float, bool, type(None)})
_PLAIN = frozenset({"bool", "int", "float"})


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item whose vectors are in the cache under these keys."""

    id: str
    image: str | None
    image_key: bytes | None
    texts: tuple[str, ...]
    text_keys: tuple[bytes, ...]
    metadata: Mapping[str, Any]


class Items(Protocol):
    """Encoded items that can be passed over as often as is needed, always in the same order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[EncodedItem]: ...


class ItemSpool:
    """Items on disk: 16 bytes of memory for every BLOCK_ITEMS, and a block. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(folder)
        self._blocks: list[Span] = []
        self._waiting: list[tuple[Any, ...]] = []
        self._chars = 0
        self._count = 0
        self._table_bytes = 0
        self.texts = 0
        self.pictures = 0

    def __enter__(self) -> ItemSpool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scratch.close()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EncodedItem]:
        self._flush()
        for span in self._blocks:
            batch = pa.ipc.read_record_batch(pa.py_buffer(self._scratch.read(span)), _SCHEMA)
            columns = [_as_list(column) for column in batch.columns]
            for item_id, image, image_key, texts, text_keys, metadata in zip(*columns, strict=True):
                yield EncodedItem(
                    item_id, image, image_key, tuple(texts), tuple(text_keys), _Metadata(metadata)
                )

    @property
    def table_bytes(self) -> int:
        """About what tables and filters' columns take that hold what was added."""
        self._flush()
        return self._table_bytes

    def append(self, item: EncodedItem) -> None:
        """Add one item."""
        metadata = to_json(item.metadata)
        self._waiting.append(
            (item.id, item.image, item.image_key, item.texts, item.text_keys, metadata)
        )
        self._count += 1
        self.texts += len(item.texts)
        self.pictures += item.image_key is not None
        self._chars += len(metadata) + sum(map(len, item.texts))
        if len(self._waiting) >= BLOCK_ITEMS or self._chars >= BLOCK_CHARS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            columns = zip(*self._waiting, strict=True)
            arrays = [pa.array(list(c), f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
            batch = pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
            self._blocks.append(self._scratch.append(batch.serialize()))
            self._table_bytes += sum(n * batch.column(name).nbytes for name, n in _KEPT_TIMES)
            self._waiting.clear()
            self._chars = 0


def _as_list(column: Any) -> list[Any]:
    """`to_pylist`, several times faster for lists."""
    if not pa.types.is_list(column.type):
        found: list[Any] = column.to_pylist()
        return found
    flat, ends = column.flatten().to_pylist(), column.offsets.to_pylist()
    return [flat[start:end] for start, end in pairwise(ends)]


class _Metadata(Mapping[str, Any]):
    """Metadata as it was kept, parsed when it is first looked at."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.chars = len(text)
        self._values: dict[str, Any] | None = None

    def _parsed(self) -> dict[str, Any]:
        if self._values is None:
            self._values = from_json(self._text)
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._parsed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def items(self) -> Any:
        """As of a dict: many times faster than what Mapping makes of it."""
        return self._parsed().items()

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self._parsed().get(name, default)


def to_json(metadata: Mapping[str, Any]) -> str:
    """Metadata as text from which `from_json` makes values that become the same column."""
    return json.dumps(
        {n: value if type(value) in _AS_IS else _kept(value) for n, value in metadata.items()}
    )


def from_json(text: str) -> dict[str, Any]:
    """What `to_json` was given, but for values that print the same."""
    values: dict[str, Any] = json.loads(text)
    for name, value in values.items():
        if type(value) is dict:
            values[name] = _unkept(value)
    return values


def _kept(value: Any) -> Any:
    if isinstance(value, str):
        return value
    kind = kind_of_value(value)
    if kind == "list":
        return list(value)
    if kind in _PLAIN:
        return value
    if kind == "date":
        return {"d": value.isoformat()}
    if kind == "time":
        return {"t": value.isoformat()}
    return {"x": printed(value)}


def _unkept(kept: dict[str, str]) -> Any:
    ((kind, text),) = kept.items()
    if kind == "d":
        return date.fromisoformat(text)
    return datetime.fromisoformat(text) if kind == "t" else Printed(text)

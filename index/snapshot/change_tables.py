"""Tables of changes: made of changes, joined to later ones, and with less in them.

    table = joined(segment.table, change_table(numbered, shape))
    name = write_segment(folder, table)

A table is what one segment's file holds, oldest change first, each id once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.snapshot.catalogue import id_hash
from hivlp.index.snapshot.changes import EVER, SCHEMA, Change, Delete, Segment, Shape


def change_table(numbered: Iterable[tuple[int, Change]], shape: Shape) -> Any:
    """Changes with their sequence numbers, ascending, as an Arrow table of `SCHEMA`."""
    values = [
        (
            number,
            change.id,
            id_hash(change.id),
            isinstance(change, Delete),
            *_values(change, shape.width),
        )
        for number, change in numbered
    ]
    columns = zip(*values, strict=True) if values else ([] for _ in SCHEMA)
    arrays = [pa.array(list(c), type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def joined(older: Any, newer: Any) -> Any:
    """A table of changes and one of later ones as one table: the last change of each id.

    What a replaced change had left elsewhere is added to the one that replaces it.
    """
    again = pc.is_in(older.column("id"), value_set=newer.column("id"))
    replaced = older.filter(again).select(["id", *EVER])
    if replaced.num_rows:
        newer = _inheriting(newer, replaced.to_pylist())
    return pa.concat_tables([older.filter(pc.invert(again)), newer])


def _inheriting(newer: Any, replaced: Sequence[Mapping[str, Any]]) -> Any:
    before = {row["id"]: row for row in replaced}
    ids = newer.column("id").to_pylist()
    for name in EVER:
        values = [
            list(dict.fromkeys([*(before.get(item_id, {}).get(name) or []), *(own or [])]))
            for item_id, own in zip(ids, newer.column(name).to_pylist(), strict=True)
        ]
        place = newer.schema.get_field_index(name)
        newer = newer.set_column(
            place, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type)
        )
    return newer


def all_joined(segments: Iterable[Segment], after: int = 0) -> Any:
    """What holds of several segments, oldest first, as one table: numbers above `after` only."""
    found = SCHEMA.empty_table()
    for segment in segments:
        later = pc.greater(segment.table.column("sequence"), after)
        found = joined(found, segment.table.filter(later))
    return found


def without_vectors(table: Any) -> Any:
    """A table of changes without the vectors that an encoder can make again.

    For changes that are in the levels: they are kept for the next build, which encodes.
    """
    given = table.column("own").is_valid().to_numpy()
    kept = pa.array(np.arange(table.num_rows), mask=~given)
    for name in ("image_vector", "text_vectors"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), table.column(name).take(kept))
    return table


def without_ids(table: Any, ids: Iterable[str]) -> Any:
    """A table of changes without those of some items."""
    gone = pc.is_in(table.column("id"), value_set=pa.array(sorted(ids), pa.string()))
    return table.filter(pc.invert(gone))


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as they are kept."""
    return json.dumps(dict(metadata), ensure_ascii=False, sort_keys=True)


def _values(change: Change, width: int) -> tuple[Any, ...]:
    if isinstance(change, Delete):
        return (None,) * 8
    texts = np.empty((0, width), np.float32) if change.text_vectors is None else change.text_vectors
    texts = texts.reshape(-1, width)
    assert len(texts) == len(change.texts), (len(texts), len(change.texts))
    image = change.image_vector
    assert image is None or image.shape == (width,), image.shape
    metadata = metadata_text(change.metadata)
    vectors = (image, texts.reshape(-1))
    left = (list(change.keys), list(change.uploads))
    return (change.own, change.image, metadata, list(change.texts), *vectors, *left)


def last_changes(segments: Iterable[Segment], after: int = 0) -> Iterator[tuple[int, Change]]:
    """What holds of several segments, oldest first: the last change of each id, by its number.

    Only changes with a sequence number above `after`.
    """
    latest: dict[str, tuple[int, Segment, int]] = {}
    for segment in segments:
        numbers = segment.table.column("sequence").to_pylist()
        for place, (item_id, number) in enumerate(zip(segment.ids, numbers, strict=True)):
            if number > after:
                latest.pop(item_id, None)
                latest[item_id] = (number, segment, place)
    for number, segment, place in latest.values():
        yield number, segment.change(place)

"""What a build or an import is going to write, and whether the disk has room for it.

A build asks twice: before it encodes, with the least that is known of its corpus by then, and
before it writes, with every row and every item's columns counted. Codes and graphs count as the
largest that may be chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from hivlp.index.build.embeddings import NumberCache
from hivlp.index.build.footprint import ITEM_BYTES, SideShape
from hivlp.index.build.model import Model
from hivlp.index.build.record import BuildSettings
from hivlp.index.build.spool import ItemSpool
from hivlp.index.build.states import KeptStates
from hivlp.index.build.wishes import Wishes
from hivlp.index.snapshot.room import check_room

TEXT_BYTES = 32
"""Of a text in a column of which nothing else is known."""
CODED_BYTES = 16
"""A value's place in its column's codes and lists, and an offset."""


class BuildNeeds:
    """Of a build of index `name` into `folder`."""

    def __init__(self, name: str, folder: Path, model: Model, settings: BuildSettings) -> None:
        self._name, self._folder = name, folder
        self._dims = tuple(spec.dim for spec in model.levels)
        self._gallery = model.gallery
        self._settings = settings

    def check_before_encoding(
        self, items: int | None, cache: NumberCache, kept: KeptStates | None
    ) -> None:
        """An item has one row at least, and what no cache holds yet goes there, too.

        Raises NoRoom. `items` is how many the corpus says that it has (None: it doesn't say).
        """
        sure = round((items or 0) * (1 - self._settings.max_failures))
        if not sure:
            return
        least, _ = self._side(sure)
        states = 0 if kept is None else kept.row_bytes * sure
        needs = {self._folder: least + ITEM_BYTES * sure + states}
        for one in [cache] if kept is None else [cache, kept.cache]:
            needs[one.path.parent] = max(0, one.row_bytes * sure - one.size_bytes)
        check_room(needs, f"index {self._name!r}, {items} items")

    def check_before_writing(self, items: ItemSpool, kept: KeptStates | None) -> None:
        """Everything but what filters' lists take is counted. Raises NoRoom."""
        rows = {"image": items.pictures, "text": items.texts}
        need = ITEM_BYTES * len(items) + items.table_bytes
        need += sum(self._side(count)[1] for count in rows.values() if count)
        need += 0 if kept is None else kept.row_bytes * items.pictures
        said = " and ".join(f"{count} {side} rows" for side, count in rows.items() if count)
        check_room({self._folder: need}, f"index {self._name!r}, {said}")

    def _side(self, rows: int) -> tuple[int, int]:
        settings = self._settings
        shape = SideShape.planned(rows, self._dims, self._gallery, settings.rows_type)
        return shape.file_bytes(settings.wishes, materialise=settings.materialise)


def check_before_importing(
    name: str, folder: Path, shape: SideShape, wishes: Wishes, schema: Any
) -> None:
    """Of vectors that are imported as items of a table's `schema`. Raises NoRoom."""
    _, most = shape.file_bytes(wishes, materialise=False)
    each = ITEM_BYTES + sum(map(_value_bytes, schema.types))
    what = f"index {name!r}, {shape.rows} vectors of {shape.dims[-1]} numbers"
    check_room({folder: most + shape.rows * each}, what)


def _value_bytes(kind: Any) -> int:
    """About what a value takes, as it is and coded for filters."""
    known = pa.types.is_primitive(kind)
    return (kind.bit_width // 8 if known else TEXT_BYTES) + CODED_BYTES

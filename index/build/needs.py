"""What a build or an import is going to write, and whether the disk has room for it.

A build asks before it encodes, and an import before it reads, for what is sure to be written and
nothing else: one row for each item that can't be missing, with the smallest codes. A build asks
again before it writes, with every row and every item's columns counted, and codes and graphs as the
largest that may be chosen; an import once it has chosen them. What caches get is asked for batch by
batch as it is written (`encode.py`): equal contents are there once, so nobody knows how much it is.
"""

from __future__ import annotations

import math
from pathlib import Path

from hivlp.index.build.footprint import ITEM_BYTES, SideShape
from hivlp.index.build.model import Model
from hivlp.index.build.record import BuildSettings
from hivlp.index.build.spool import ItemSpool
from hivlp.index.build.states import KeptStates
from hivlp.index.build.wishes import Wishes
from hivlp.index.snapshot.manifest import OptionRecord
from hivlp.index.snapshot.room import check_room


class BuildNeeds:
    """Of a build of index `name` into `folder`."""

    def __init__(self, name: str, folder: Path, model: Model, settings: BuildSettings) -> None:
        self._name, self._folder = name, folder
        self._dims = tuple(spec.dim for spec in model.levels)
        self._gallery = model.gallery
        self._settings = settings

    def check_before_encoding(self, items: int | None) -> None:
        """An item has one row at least, of a picture or of a text. Raises NoRoom.

        `items` is how many there are at least (None: nobody knows).
        """
        sure = sure_rows(items or 0, self._settings.max_failures)
        need = ITEM_BYTES * sure
        need += self._shape(sure).sure_bytes(
            self._settings.wishes, materialise=self._settings.materialise
        )
        check_room({self._folder: need}, f"index {self._name!r}, at least {items} items")

    def check_before_writing(self, items: ItemSpool, kept: KeptStates | None) -> None:
        """Everything but what filters' lists take is counted. Raises NoRoom."""
        rows = {"image": items.pictures, "text": items.texts}
        need = ITEM_BYTES * len(items) + items.table_bytes
        need += sum(self._most_bytes(count) for count in rows.values() if count)
        need += 0 if kept is None else kept.row_bytes * items.pictures
        said = " and ".join(f"{count} {side} rows" for side, count in rows.items() if count)
        check_room({self._folder: need}, f"index {self._name!r}, {said}")

    def _most_bytes(self, rows: int) -> int:
        settings = self._settings
        sizes = self._shape(rows).file_bytes(settings.wishes, materialise=settings.materialise)
        return sizes[1]

    def _shape(self, rows: int) -> SideShape:
        return SideShape.planned(rows, self._dims, self._gallery, self._settings.rows_type)


def check_before_importing(name: str, folder: Path, shape: SideShape, wishes: Wishes) -> None:
    """Of vectors of which `shape.rows` are sure to become items. Raises NoRoom."""
    need = ITEM_BYTES * shape.rows + shape.sure_bytes(wishes, materialise=False)
    what = f"index {name!r}, at least {shape.rows} vectors of {shape.dims[-1]} numbers"
    check_room({folder: need}, what)


def check_before_indexing(name: str, folder: Path, shape: SideShape, taken: OptionRecord) -> None:
    """Of an import whose rows and items are written: its codes and graphs. Raises NoRoom."""
    need = shape.index_bytes(taken.family, taken.level1, taken.maskable, materialise=False)
    what = f"index {name!r}, {taken.level1} codes of {shape.rows} vectors"
    what += " and their graphs" if taken.family == "graph" else ""
    check_room({folder: need}, what)


def sure_rows(count: int, max_failures: float) -> int:
    """How many of `count` must be good, or so many failed that nothing is written."""
    return max(0, math.floor(count * (1 - max_failures)))

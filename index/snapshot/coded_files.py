"""What the writing and the reading of coded columns share: their files, kinds, and numbering."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.candidates import RowArray

Kind = Literal["text", "number", "boolean", "date", "list"]
FOLDER = "filters"


def kind_of(kind: Any) -> Kind:
    """The kind of an Arrow type."""
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "date"
    return "list" if pa.types.is_list(kind) or pa.types.is_large_list(kind) else "text"


def number_values(column: Any) -> tuple[Any, RowArray, RowArray]:
    """Sorted values of an Array, and for each value that an item has, the item and its number.

    Null and NaN are no values. Dates are timestamps in UTC.
    """
    kind = kind_of(column.type)
    if kind == "list":
        owners = pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = pc.list_flatten(column)
    else:
        owners, flat = np.arange(len(column), dtype=np.int64), column
    if kind in ("text", "list"):
        flat = flat.cast(pa.large_string())
    if kind == "date":
        days = not pa.types.is_timestamp(flat.type)
        flat = (flat.cast(pa.timestamp("us")) if days else flat).cast(
            pa.timestamp("us", "UTC"), safe=False
        )
    known = pc.is_valid(flat)
    if pa.types.is_floating(flat.type):
        known = pc.and_(known, pc.invert(pc.is_nan(flat).fill_null(False)))
    there = known.to_numpy(zero_copy_only=False)
    coded = flat.filter(known).dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy(zero_copy_only=False)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    numbers = rank[coded.indices.to_numpy(zero_copy_only=False)]
    owners = owners[there]
    if kind == "list" and len(owners):  # an element that stands twice in a list counts once
        pairs = np.unique(np.stack([owners, numbers], axis=1), axis=0)
        owners, numbers = pairs[:, 0], pairs[:, 1]
    return coded.dictionary.take(pa.array(order)), owners, numbers


def coded_file(folder: Path, place: int, part: str) -> Path:
    """The file of one part of the column at a place."""
    return folder / FOLDER / f"{place}.{part}"


def save_part(folder: Path, place: int, part: str, array: npt.NDArray[Any]) -> None:
    """Write one array of a column."""
    np.save(coded_file(folder, place, f"{part}.npy"), array, allow_pickle=False)

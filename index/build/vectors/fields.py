"""Which column of a table is an item's id, picture and text, and the others as the catalogue has
them.

Types are the table's own, widened to those that the catalogue keeps: booleans, int64, float64,
date32, timestamp[us, UTC], strings, lists of strings; what is none of these becomes text (JSON for
nested values). Nothing is told by the values: a text column stays text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.build.items import CAPTION_COLUMNS, ID_COLUMNS, MAX_ID_CHARS, RowError, safe_ref
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import IMAGE_COLUMNS
from hivlp.index.snapshot.catalogue import ID, IMAGE, OWN_COLUMNS
from hivlp.models.levels import Modality

MOMENT = pa.timestamp("us", "UTC")
SUSPECT = r"^/|://|\x00|(^|/)\.\.(/|$)"
"""Of a picture's path: what may lead out of the corpus, and so is looked at more closely."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Columns by what they are for; `metadata` is the name in the catalogue by that in the table.

    Without an id column, rows are numbered from 0 over all files.
    """

    id: str | None
    image: str | None
    text: str | None
    metadata: Mapping[str, str]
    types: Mapping[str, Any]

    @staticmethod
    def of(schema: Any, modality: Modality) -> Fields:
        """By name: `id` or `key`; the first of the pictures' names that holds texts; for texts the
        first of the captions' names. Captions of pictures are metadata.
        """
        strings = [f.name for f in schema if pa.types.is_string(kept_type(f.type))]
        texts = [f.name for f in schema if is_text(f.type)]
        own = next((name for name in ID_COLUMNS if name in schema.names), None)
        image = next((name for name in IMAGE_COLUMNS if name in strings), None)
        captions = CAPTION_COLUMNS if modality == "text" else ()
        text = next((name for name in captions if name in texts), None)
        rest = sorted(set(schema.names) - {own, image, text})
        types = {name: kept_type(schema.field(name).type) for name in rest}
        return Fields(own, image, text, _free_names(rest), types)

    @property
    def schema(self) -> Any:
        """The schema of items.arrow."""
        kept = [(name, self.types[source]) for source, name in self.metadata.items()]
        return pa.schema([(ID, pa.string()), (IMAGE, pa.string()), *kept])

    def metadata_of(self, table: Any) -> list[Any]:
        """The metadata columns of a table, as the catalogue keeps them. Raises CorpusError."""
        return [as_kept(name, table.column(name), self.types[name]) for name in self.metadata]


def kept_type(kind: Any) -> Any:
    """The type by which the catalogue keeps a column of an Arrow type."""
    if pa.types.is_dictionary(kind):
        return kept_type(kind.value_type)
    tests: tuple[tuple[Callable[[Any], bool], Any], ...] = (
        (pa.types.is_boolean, pa.bool_()),
        (pa.types.is_integer, pa.int64()),
        (pa.types.is_floating, pa.float64()),
        (pa.types.is_date, pa.date32()),
        (pa.types.is_timestamp, MOMENT),
        (_is_texts, pa.list_(pa.string())),
    )
    return next((kept for test, kept in tests if test(kind)), pa.string())


def is_text(kind: Any) -> bool:
    """Whether a column holds texts or lists of them."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return _is_string(kind) or _is_texts(kind)


def as_kept(name: str, column: Any, kept: Any) -> Any:
    """One chunk of a column in the type that is kept; NaN, Inf and empty text say nothing: null.

    Raises CorpusError for a number that doesn't fit.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        if pa.types.is_string(kept) and not _is_string(column.type):
            column = pa.array([_as_text(value) for value in column.to_pylist()], pa.string())
        elif pa.types.is_timestamp(kept):
            column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
        # What doesn't fit is an error for whole numbers alone: the others only lose what is finer.
        column = column.cast(kept, safe=pa.types.is_integer(kept))
    except pa.ArrowException as error:
        raise CorpusError(f"column {name!r}", f"{error}; keep it as text") from error
    if pa.types.is_floating(kept):
        finite = pc.fill_null(pc.is_finite(column), False)
        column = pc.if_else(finite, column, pa.scalar(None, kept))
    elif pa.types.is_string(kept):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, kept), column)
    return one_chunk(column)


def one_chunk(column: Any) -> Any:
    """An Arrow array, whatever it was cut into."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def ids_of(column: Any | None, first: int, count: int) -> tuple[Any, dict[int, str]]:
    """Ids as strings, and what is wrong with those that can't be used, by place.

    Without a column, numbers from `first` on.
    """
    if column is None:
        return pa.array(np.arange(first, first + count)).cast(pa.string()), {}
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):  # pandas makes floats of numbers of which one is missing
        column = column.cast(pa.int64(), safe=False)
    if not (pa.types.is_integer(column.type) or _is_string(column.type)):
        raise CorpusError("column of ids", f"is {column.type}; text or numbers are needed")
    ids = one_chunk(pc.utf8_trim_whitespace(column.cast(pa.string())))
    ids = pc.if_else(pc.equal(ids, ""), pa.scalar(None, pa.string()), ids)
    reasons = dict.fromkeys(_places(pc.is_null(ids)), "no id")
    long = pc.fill_null(pc.greater(pc.utf8_length(ids), MAX_ID_CHARS), False)
    reasons |= dict.fromkeys(_places(long), f"an id of more than {MAX_ID_CHARS} characters")
    control = pc.fill_null(pc.match_substring_regex(ids, r"\p{Cc}"), False)
    reasons |= dict.fromkeys(_places(control), "its id holds control characters")
    return ids, reasons


def references(column: Any, root: Path) -> tuple[Any, int]:
    """Pictures' paths relative to `root`, null for those that leave it, and how many do.

    Not one picture is looked for.
    """
    paths = as_kept("image", column, pa.string())
    suspect = _places(pc.fill_null(pc.match_substring_regex(paths, SUSPECT), False))
    if not suspect:
        return paths, 0
    listed = paths.to_pylist()
    lost = 0
    for place in suspect:
        try:
            listed[place] = safe_ref(root, listed[place])
        except RowError:
            listed[place] = None
            lost += 1
    return pa.array(listed, pa.string()), lost


def texts_of(column: Any | None, count: int) -> Any:
    """One text a row, empty where there is none; of several the first."""
    if column is None:
        return pa.array([""] * count, pa.string())
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_texts(column.type):
        firsts = [value[0] if value else None for value in column.to_pylist()]
        column = pa.array(firsts, pa.string())
    return one_chunk(column.cast(pa.string()).fill_null(""))


def _free_names(names: list[str]) -> dict[str, str]:
    """Names that the catalogue doesn't use itself, by the tables' own."""
    found: dict[str, str] = {}
    for name in names:
        free = name
        while free in OWN_COLUMNS or free in found.values() or (free != name and free in names):
            free = f"_{free}"
        found[name] = free
    return found


def _places(mask: Any) -> list[int]:
    found: list[int] = np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist()
    return found


def _is_string(kind: Any) -> bool:
    views = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in views)


def _is_texts(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in lists) and _is_string(kind.value_type)


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)

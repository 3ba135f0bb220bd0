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

from hivlp.index.build.cells import far_times, values_of
from hivlp.index.build.items import (
    CAPTION_COLUMNS,
    ID_COLUMNS,
    MAX_ID_CHARS,
    RowError,
    id_text,
    safe_ref,
)
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import IMAGE_COLUMNS
from hivlp.index.snapshot.catalogue import ID, IMAGE, OWN_COLUMNS
from hivlp.models.levels import Modality

MOMENT = pa.timestamp("us", "UTC")
EXACT = 2.0**53
"""Whole numbers below it are as exact as floats."""
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
    def of(schema: Any, modality: Modality, *, pictures: bool = True) -> Fields:
        """By name: `id` or `key`; the first of the pictures' names that holds texts; for texts the
        first of the captions' names. Captions of pictures are metadata, and so are pictures' paths
        where no folder is known that they start at.
        """
        strings = [f.name for f in schema if pa.types.is_string(kept_type(f.type))]
        texts = [f.name for f in schema if is_text(f.type)]
        own = next((name for name in ID_COLUMNS if name in schema.names), None)
        names = IMAGE_COLUMNS if pictures else ()
        image = next((name for name in names if name in strings), None)
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

    def metadata_of(self, table: Any) -> tuple[list[Any], dict[str, int]]:
        """The metadata columns of a table, as the catalogue keeps them, and by its names how many
        values it can't keep, null in them. Raises CorpusError.
        """
        columns, lost = [], {}
        for source, name in self.metadata.items():
            column, unkept = as_kept(source, table.column(source), self.types[source])
            columns.append(column)
            if unkept:
                lost[name] = unkept
        return columns, lost


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


def as_kept(name: str, column: Any, kept: Any) -> tuple[Any, int]:
    """A column in the type that is kept, and how many of its values can't be: they are null.

    Those are times outside of the years 1 to 9999, which nothing could read again, and text that is
    not UTF-8. NaN, Inf and empty text say nothing and are null too, uncounted. Raises CorpusError
    for a whole number that doesn't fit.
    """
    column, lost = _converted(name, _flat(column), kept)
    if pa.types.is_floating(kept):
        finite = pc.fill_null(pc.is_finite(column), False)
        column = pc.if_else(finite, column, pa.scalar(None, kept))
    elif pa.types.is_string(kept):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, kept), column)
    return one_chunk(column), lost


def _converted(name: str, column: Any, kept: Any) -> tuple[Any, int]:
    if pa.types.is_string(kept) or pa.types.is_list(kept):
        return _as_texts(column, kept)
    try:
        if pa.types.is_temporal(kept):
            return _as_times(column, kept)
        # What doesn't fit is an error for whole numbers alone: the others only lose what is finer.
        return column.cast(kept, safe=pa.types.is_integer(kept)), 0
    except pa.ArrowException as error:
        raise CorpusError(f"column {name!r}", f"{error}; keep it as text") from error


def _as_times(column: Any, kept: Any) -> tuple[Any, int]:
    """Dates or timestamps; the range is looked at before a cast to a finer unit could wrap."""
    far = far_times(column)
    if far.any():
        column = pc.if_else(pa.array(~far), column, pa.scalar(None, column.type))
    if pa.types.is_timestamp(kept):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column.cast(kept, safe=False), int(far.sum())


def _as_texts(column: Any, kept: Any) -> tuple[Any, int]:
    """Texts or lists of texts, all of them UTF-8: a file only says that they are."""
    if is_text(column.type):
        try:
            found = column.cast(kept)
            found.validate(full=True)
        except pa.ArrowException:  # looked at one by one, below
            pass
        else:
            return found, 0
    values, bad = values_of(column)
    if pa.types.is_string(kept):
        values = [_as_text(value) for value in values]
    return pa.array(values, kept), len(bad)


def one_chunk(column: Any) -> Any:
    """An Arrow array, whatever it was cut into."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _flat(column: Any) -> Any:
    """One chunk, without a dictionary."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return one_chunk(column)


def ids_of(column: Any | None, first: int, count: int) -> tuple[Any, dict[int, str]]:
    """Ids as strings, and what is wrong with those that can't be used, by place.

    Without a column, numbers from `first` on.
    """
    if column is None:
        return pa.array(np.arange(first, first + count)).cast(pa.string()), {}
    column = _flat(column)
    if pa.types.is_floating(column.type):  # pandas makes floats of numbers of which one is missing
        column = _whole_texts(column.cast(pa.float64()))
    if not (pa.types.is_integer(column.type) or _is_string(column.type)):
        raise CorpusError("column of ids", f"is {column.type}; text or numbers are needed")
    given, (ids, unread) = column, _as_texts(column.cast(pa.string()), pa.string())
    ids = one_chunk(pc.utf8_trim_whitespace(ids))
    ids = pc.if_else(pc.equal(ids, ""), pa.scalar(None, pa.string()), ids)
    reasons = dict.fromkeys(_places(pc.is_null(ids)), "no id")
    if unread:
        reasons |= dict.fromkeys(values_of(given)[1], "its id is not UTF-8")
    long = pc.fill_null(pc.greater(pc.utf8_length(ids), MAX_ID_CHARS), False)
    reasons |= dict.fromkeys(_places(long), f"an id of more than {MAX_ID_CHARS} characters")
    control = pc.fill_null(pc.match_substring_regex(ids, r"\p{Cc}"), False)
    reasons |= dict.fromkeys(_places(control), "its id holds control characters")
    return ids, reasons


def references(column: Any, root: Path) -> tuple[Any, int, int]:
    """Pictures' paths relative to `root`, null for those that leave it or are not UTF-8, and how
    many of each there are. Not one picture is looked for.
    """
    paths, unread = as_kept("image", column, pa.string())
    suspect = _places(pc.fill_null(pc.match_substring_regex(paths, SUSPECT), False))
    if not suspect:
        return paths, 0, unread
    listed = paths.to_pylist()
    lost = 0
    for place in suspect:
        try:
            listed[place] = safe_ref(root, listed[place])
        except RowError:
            listed[place] = None
            lost += 1
    return pa.array(listed, pa.string()), lost, unread


def texts_of(column: Any | None, count: int) -> tuple[Any, int]:
    """One text a row, empty where there is none, of several the first; how many are not UTF-8."""
    if column is None:
        return pa.array([""] * count, pa.string()), 0
    column = _flat(column)
    kept = pa.list_(pa.string()) if _is_texts(column.type) else pa.string()
    column, lost = _as_texts(column, kept)
    if pa.types.is_list(kept):
        firsts = [value[0] if value else None for value in column.to_pylist()]
        column = pa.array(firsts, pa.string())
    return one_chunk(column.fill_null("")), lost


def _whole_texts(column: Any) -> Any:
    """Ids that were made floats, as texts; null where one is none."""
    whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), EXACT))
    if pc.all(pc.fill_null(whole, True)).as_py():
        return column.cast(pa.int64()).cast(pa.string())
    return pa.array([id_text(value) for value in column.to_pylist()], pa.string())


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

"""One thing of a corpus, and how a row of a table becomes one.

Columns: `id` (alias `key`), `image` (aliases `image_path`, `file_name`), `caption`, `captions` and
`text`; everything else is metadata. An id is a string whatever it was; without one, the picture's
path is the id. In tables that img2dataset wrote (`aliases`), `jpg`, `png` and `webp` hold pictures
too, a row whose `status` is not success is bad, and its `url` is metadata, never fetched.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import DOWNLOADED_COLUMNS, IMAGE_COLUMNS, Root
from hivlp.index.remote import below, is_url
from hivlp.models.levels import FloatArray, Modality

ID_COLUMNS = ("id", "key")
CAPTION_COLUMNS = ("captions", "caption", "text")
VECTOR_COLUMN = "embedding"
MAX_ID_CHARS = 512
DOWNLOADED = "success"
"""img2dataset's `status` of a row that has its picture."""
Aliases = Literal["img2dataset"]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to be found.

    `image` is the picture's reference: a path relative to the corpus's root, or, for a picture kept
    inside a table or a tar, `FILE#row=N` or `FILE#offset=O,size=S`; `image_data` are its bytes
    where the reader holds them already. `vectors` are rows of the gallery for items that bring
    their own: (width,) float32 of a picture, (n, width) of its texts. `place` says where in the
    corpus the item stands.
    """

    id: str
    image: str | None = None
    captions: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image_data: bytes | None = field(default=None, repr=False)
    vectors: Mapping[Modality, FloatArray] = field(default_factory=dict, repr=False)
    place: str = ""


@dataclass(frozen=True, slots=True)
class BadItem:
    """Something of the corpus that can't be used: where it stands, its id if known, and why."""

    place: str
    id: str | None
    reason: str


class RowError(Exception):
    """A row that can't become an item; the reader turns it into a BadItem."""

    def __init__(self, reason: str, item_id: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.item_id = item_id


def check_columns(place: str, names: Sequence[str], aliases: Aliases | None = None) -> None:
    """Refuse what would be silently ignored. Raises CorpusError."""
    if VECTOR_COLUMN in names:
        raise CorpusError(
            place,
            f"column {VECTOR_COLUMN!r}: `build` encodes pictures and texts; vectors of your own "
            "come in by `hivlp import-vectors`",
        )
    wanted = (*image_columns(aliases), *CAPTION_COLUMNS)
    if not any(name in names for name in wanted):
        raise CorpusError(
            place, f"no column to index: one of {', '.join(wanted)} is needed, of {list(names)}"
        )


def image_columns(aliases: Aliases | None) -> tuple[str, ...]:
    """Where a row's picture is looked for, the first filled one counts."""
    return IMAGE_COLUMNS if aliases is None else (*IMAGE_COLUMNS, *DOWNLOADED_COLUMNS)


def item_of_row(
    row: Mapping[str, Any],
    root: Root,
    own_ref: str,
    aliases: Aliases | None = None,
    place: str = "",
) -> Item:
    """An item from a table's row, which stands at `place`.

    `own_ref` names a picture whose bytes lie in the row itself. Raises RowError.
    """
    rest = {str(name): value for name, value in row.items()}
    given_id = _first(rest, ID_COLUMNS)
    if aliases == "img2dataset" and rest.get("status") not in (None, DOWNLOADED):
        reason = f"not downloaded: {rest['status']} {rest.get('error_message') or ''}"
        raise RowError(reason.strip(), id_text(given_id))
    image = _first(rest, image_columns(aliases))
    captions = _captions(rest)
    ref, data = _picture(image, root, own_ref, id_text(given_id))
    item_id = id_text(given_id) or id_text(ref)
    if item_id is None:
        raise RowError("no id, and no picture to take it from")
    metadata = {name: cleaned for name, v in rest.items() if (cleaned := _value(v)) is not None}
    return Item(check_id(item_id), ref, captions, metadata, data, place=place)


def check_id(item_id: str) -> str:
    """The id itself. Raises RowError for one that is empty, too long or can't be printed.

    Nor may blanks be at its edges, which tables lose.
    """
    if not item_id or item_id != item_id.strip():
        raise RowError(f"id {item_id!r} is empty or has blanks at its edges")
    if len(item_id) > MAX_ID_CHARS:
        raise RowError(f"an id of {len(item_id)} characters; at most {MAX_ID_CHARS}")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in item_id):
        raise RowError(f"id {item_id!r} holds control characters or half a character")
    return item_id


def safe_ref(root: Root, given: str) -> str:
    """A picture's path relative to `root`, in POSIX form. Raises RowError if it lies outside."""
    if isinstance(root, str):
        try:
            return _printable(below(root, given))
        except ValueError as error:
            raise RowError(f"image {given!r} {error}") from error
    if is_url(given) or "\0" in given:
        raise RowError(f"image {given!r} is not a path of this corpus; nothing is fetched")
    try:
        home = root.resolve()
        target = (home / given).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # half a character, a loop of links
        raise RowError(f"image {given!r} is not a path: {error}") from error
    if not target.is_relative_to(home):
        raise RowError(f"image {given!r} leaves the corpus")
    return _printable(target.relative_to(home).as_posix())


def _printable(ref: str) -> str:
    try:
        ref.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"image {ref!r} is not UTF-8") from error
    return ref


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Take the first filled column of `names` out of the row; the others stay, as metadata."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row.pop(name)
        row.pop(name, None)
    return None


def id_text(value: Any) -> str | None:
    """An id as the text it is kept as, None for none. Raises RowError for what can't be one."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"an id must be a string or a number, got {type(value).__name__}")
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else str(value)
    return str(value).strip() or None


def _picture(
    image: Any, root: Root, own_ref: str, item_id: str | None
) -> tuple[str | None, bytes | None]:
    """Reference and bytes: from a path, from bytes, or from Hugging Face's {bytes, path}."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if image is None:
        return None, None
    if isinstance(image, bytes):
        return own_ref, image
    if not isinstance(image, str):
        raise RowError(f"an image must be a path or bytes, got {type(image).__name__}", item_id)
    try:
        return safe_ref(root, image), None
    except RowError as error:
        raise RowError(error.reason, item_id) from error


def _captions(row: dict[str, Any]) -> tuple[str, ...]:
    """Every distinct caption of the row, in order; takes the caption columns out of it."""
    found: dict[str, None] = {}
    for name in CAPTION_COLUMNS:
        for caption in _as_texts(row.pop(name, None)):
            found[caption] = None
    return tuple(found)


def _as_texts(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        listed = _json_list(value)
        return [value] if listed is None and value.strip() else (listed or [])
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in _as_texts(part)]
    raise RowError(f"a caption must be text, got {type(value).__name__}")


def _json_list(text: str) -> list[str] | None:
    """The strings of a JSON list, as a CSV cell may hold one; None for ordinary text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    strings = isinstance(parsed, list) and all(isinstance(part, str) for part in parsed)
    return [part for part in parsed if part.strip()] if strings else None


def _value(value: Any) -> Any:
    """A metadata value, or None for what says nothing: empty text, NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if value == "" else value

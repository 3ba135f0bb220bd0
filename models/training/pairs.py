"""What a fit learns from: pictures with their captions, and texts without pictures.

A folder of pictures is read as Hugging Face's ImageFolder: `metadata.jsonl` with `file_name`, or a
`.txt` beside each picture, one caption a line. Pictures that show the same thing carry the same
value in a *group* field: they are no negatives of each other, and a fold never parts them.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivlp.models.errors import TextError, TrainingError
from hivlp.models.runtime.texts import MAX_TEXT_CHARS, clean_text

METADATA = "metadata.jsonl"
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
CAPTION_FIELDS = ("captions", "caption", "text")
_NOT_IN_PATHS = re.compile("[\x00\ud800-\udfff]")


class PairsError(TrainingError):
    """A corpus of pairs that can't be used; names the place and the field."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and what is said of it; `group` is the same for pictures of the same thing."""

    id: str
    picture: Path
    captions: tuple[str, ...]
    group: str


def read_pairs(folder: Path, *, group: str | None = None) -> list[Pair]:
    """Every captioned picture of `folder`, in the order of its metadata, or of file names.

    `group` names the metadata field whose equals belong together; without it, pictures with the
    same captions do. Raises PairsError.
    """
    if not folder.is_dir():
        raise PairsError(str(folder), "no such folder")
    listed = (folder / METADATA).is_file()
    pairs = list(_from_metadata(folder, group) if listed else _from_sidecars(folder, group))
    if not pairs:
        wanted = f"no {METADATA}, and no picture with a .txt of captions beside it"
        raise PairsError(str(folder), f"{METADATA} has no captioned picture" if listed else wanted)
    _refuse_twins(folder, pairs)
    return pairs


def _refuse_twins(folder: Path, pairs: Sequence[Pair]) -> None:
    seen: set[str] = set()
    for pair in pairs:
        if pair.id in seen:
            raise PairsError(str(folder), f"id {pair.id!r} is there twice")
        seen.add(pair.id)


def _from_metadata(folder: Path, group: str | None) -> Iterator[Pair]:
    with (folder / METADATA).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{folder / METADATA}:{number}"
                yield _pair(_row(line, place), folder, group, place)


def _row(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise PairsError(place, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PairsError(place, "not a JSON object")
    return row


def _pair(row: Mapping[str, Any], folder: Path, group: str | None, place: str) -> Pair:
    name = row.get("file_name")
    if not isinstance(name, str) or not name or _NOT_IN_PATHS.search(name):
        raise PairsError(place, "field 'file_name' must be the path of a picture")
    picture = folder / name
    if not picture.resolve().is_relative_to(folder.resolve()):
        raise PairsError(place, f"field 'file_name': {name!r} leaves the folder")
    if not picture.is_file():
        raise PairsError(place, f"field 'file_name': no file {name!r}")
    captions = _captions(row, place)
    if group is not None and row.get(group) is None:
        raise PairsError(place, f"field {group!r}, asked for as the group, is missing")
    same = "\n".join(captions) if group is None else str(row[group])
    return Pair(str(row.get("id", name)), picture, captions, same)


def _captions(row: Mapping[str, Any], place: str) -> tuple[str, ...]:
    field = next((name for name in CAPTION_FIELDS if name in row), None)
    if field is None:
        raise PairsError(place, f"no captions: one of the fields {', '.join(CAPTION_FIELDS)}")
    found = [row[field]] if isinstance(row[field], str) else row[field]
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise PairsError(place, f"field {field!r} must be a text or a list of texts")
    return _clean_captions(found, f"{place}: field {field!r}")


def _clean_captions(found: Iterable[str], place: str) -> tuple[str, ...]:
    try:
        texts = [clean_text(text, max_chars=MAX_TEXT_CHARS) for text in found]
    except TextError as error:
        raise PairsError(place, error.message) from error
    if not texts:
        raise PairsError(place, "at least one caption is needed")
    return tuple(dict.fromkeys(texts))


def _from_sidecars(folder: Path, group: str | None) -> Iterator[Pair]:
    if group is not None:
        raise PairsError(str(folder), f"a group ({group!r}) needs a {METADATA}")
    for picture in sorted(folder.rglob("*")):
        sidecar = picture.with_suffix(".txt")
        if picture.suffix.lower() in PICTURE_SUFFIXES and sidecar.is_file():
            lines = [line for line in _lines(sidecar) if line.strip()]
            captions = _clean_captions(lines, str(sidecar))
            name = picture.relative_to(folder).as_posix()
            yield Pair(name, picture, captions, "\n".join(captions))


def read_pictures(folders: Sequence[Path]) -> list[Pair]:
    """Every picture below `folders`, by path, each without captions and a thing of its own.

    Raises PairsError for a folder that isn't there, or that holds no picture.
    """
    found: list[Pair] = []
    for folder in folders:
        if not folder.is_dir():
            raise PairsError(str(folder), "no such folder")
        below = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        pictures = [path for path in below if path.suffix.lower() in PICTURE_SUFFIXES]
        if not pictures:
            raise PairsError(str(folder), f"no picture ({', '.join(PICTURE_SUFFIXES)})")
        # no caption holds a null character, so no pair's group is called that
        found += [Pair(str(path), path, (), f"\0{path}") for path in pictures]
    return found


def read_texts(files: Sequence[Path], *, most: int, seed: int) -> list[str]:
    """Distinct texts of plain or gzipped files, one a line, at most `most` of them.

    Texts that can't be encoded are left out; of more than `most`, a seeded sample is kept, in the
    files' order. Raises PairsError for a file that can't be read.
    """
    kept: dict[str, None] = {}
    for file in files:
        for line in _lines(file):
            try:
                kept[clean_text(line, max_chars=MAX_TEXT_CHARS)] = None
            except TextError:
                continue
    texts = list(kept)
    if len(texts) <= most:
        return texts
    chosen = np.random.default_rng(seed).choice(len(texts), most, replace=False)
    return [texts[i] for i in np.sort(chosen)]


def _lines(file: Path) -> list[str]:
    try:
        if file.suffix == ".gz":
            with gzip.open(file, "rt", encoding="utf-8") as packed:
                return packed.read().splitlines()
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PairsError(str(file), f"can't be read as UTF-8 text: {error}") from error

"""webdataset: tars whose members are grouped into samples by name; read in one pass, not unpacked.

Members that follow one another and have the same name up to the first dot of its last part are one
sample: a picture (`.jpg`, `.png`, ...), captions (`.txt`), metadata (`.json`; what it says of id
and captions counts, as in a table) and values (`.cls`, `.index`, ...). Other members are passed
over. A picture is referred to by where it lies in the tar, so that it can be read again at once.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from hivlp.index.build.items import BadItem, Item, RowError, check_columns
from hivlp.index.build.readers.base import PLAIN, Corpus, CorpusOptions
from hivlp.index.build.readers.files import Files
from hivlp.index.build.readers.folder import caption_lines
from hivlp.index.build.readers.lines import NOT_UTF8
from hivlp.index.build.readers.tables import item_or_bad, json_object
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import (
    MAX_PICTURE_BYTES,
    PICTURE_SUFFIXES,
    TAR_BLOCK,
    Root,
    is_member,
    tar_ref,
)

CAPTION_ENDINGS = frozenset({"txt", "text", "caption", "captions"})
VALUE_ENDINGS = frozenset({"cls", "cls2", "class", "count", "index", "inx"})
MAX_TEXT_BYTES = 16 * 2**20
MAX_READ_BYTES = MAX_PICTURE_BYTES + 2 * TAR_BLOCK
"""The most that is read at a time: a header may say that it goes on for gigabytes."""


class WebdatasetCorpus(Corpus):
    """Samples of one tar or several, one after the other."""

    kind = "webdataset"

    def __init__(
        self,
        source: Root,
        files: Files,
        names: Sequence[str],
        options: CorpusOptions = PLAIN,
    ) -> None:
        super().__init__(source, files.root, options)
        self._files = files
        self._names = names

    def parts(self) -> Sequence[Corpus]:
        """One tar each."""
        return [WebdatasetCorpus(self.source, self._files, [n], self.options) for n in self._names]

    def _read(self) -> Iterator[Item | BadItem]:
        for name in self._names:
            yield from self._shard(name)

    def _shard(self, name: str) -> Iterator[Item | BadItem]:
        sample: _Sample | None = None
        for found in _members(self._files, name, f"{self.root}/{name}"):
            if isinstance(found, BadItem):
                yield found
                continue
            if sample is not None and sample.key != found.key:
                yield self._item(name, sample)
                sample = None
            if sample is None:
                sample = _Sample(found.key)
            sample.take(name, found)
        if sample is not None:
            yield self._item(name, sample)

    def _item(self, name: str, sample: _Sample) -> Item | BadItem:
        place = f"{name}: {sample.key}"
        if sample.trouble is not None:
            return BadItem(place, sample.key, sample.trouble)
        row: dict[str, Any] = {**sample.values, **sample.row}
        if "embedding" in row:
            check_columns(f"{self.root}/{name}: {sample.key}", list(row), self.options.aliases)
        if row.get("id") in (None, "") and row.get("key") in (None, ""):
            row["id"] = sample.key
        row["captions"] = [*sample.captions, row.get("captions")]
        row["image"] = sample.picture
        return item_or_bad(row, self.root, sample.ref, place, self.options)


@dataclass(frozen=True, slots=True)
class _Member:
    """A member worth reading, read: name up to the first dot, what follows, where it lies."""

    key: str
    ending: str
    data: bytes
    offset: int
    trouble: str | None = None


@dataclass(slots=True)
class _Sample:
    """What was found of one sample; `trouble` is the first thing wrong with it."""

    key: str
    picture: bytes | None = None
    ref: str = ""
    captions: tuple[str, ...] = ()
    row: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None

    def take(self, tar: str, member: _Member) -> None:
        """Add a member to the sample."""
        try:
            self._take(tar, member)
        except (RowError, UnicodeDecodeError) as error:
            self.trouble = self.trouble or f".{member.ending}: {error}"

    def _take(self, tar: str, member: _Member) -> None:
        if member.trouble is not None:
            raise RowError(member.trouble)
        if member.ending in CAPTION_ENDINGS:
            self.captions += caption_lines(member.data)
        elif member.ending in VALUE_ENDINGS:
            self.values[member.ending] = member.data.decode("utf-8").strip()
        elif member.ending == "json":
            row = json_object(member.data.decode("utf-8-sig"), self.key)
            if isinstance(row, BadItem):
                raise RowError(row.reason)
            self.row.update(row)
        elif self.picture is not None:
            raise RowError("a second picture of the sample")
        else:
            self.picture = member.data
            self.ref = tar_ref(tar, member.offset, len(member.data))


def _members(files: Files, name: str, label: str) -> Iterator[_Member | BadItem]:
    """Members that belong to samples, in their order, each read once. Raises CorpusError.

    Names of members are never paths on a disk, but one that would lead out, or anything that is no
    file, is refused all the same: a tar that holds it is not what it should be.
    """
    number, last = 0, -1
    try:
        with files.open(name) as stream, _opened(stream) as tar:
            while (member := tar.next()) is not None:
                if member.offset_data <= last or member.size < 0:
                    raise tarfile.ReadError("it claims to lie before the one before it")
                last = member.offset_data
                number += 1
                tar.members = []  # type: ignore[attr-defined]  # else they are all kept
                if not member.isdir():
                    yield from _worth_reading(tar, member, name)
            # tarfile takes anything that is no header for the end.
            stream.seek(tar.offset)
            if stream.read(TAR_BLOCK) != bytes(TAR_BLOCK):
                raise tarfile.ReadError("cut short: neither a member nor the mark of the end")
    except (OSError, EOFError, tarfile.TarError, ValueError, RecursionError) as error:
        raise CorpusError(label, f"not readable as a tar at member {number}: {error}") from error


def _opened(stream: BinaryIO) -> tarfile.TarFile:
    return tarfile.open(fileobj=_Bounded(stream), mode="r:", errors="surrogateescape")  # type: ignore[call-overload,no-any-return]


def _worth_reading(
    tar: tarfile.TarFile, member: tarfile.TarInfo, name: str
) -> Iterator[_Member | BadItem]:
    place = f"{name}: {member.name!r}"
    path = PurePosixPath(member.name)
    key, _, ending = path.name.partition(".")
    if NOT_UTF8.search(member.name):
        yield BadItem(place, None, "its name is not UTF-8")
    elif path.is_absolute() or ".." in path.parts:
        yield BadItem(place, None, "its name leads out of the tar")
    elif not member.isreg() or member.issparse():
        yield BadItem(place, None, "not a regular file")
    elif key and _is_wanted(ending := ending.lower()):
        yield _read(tar, member, (path.parent / key).as_posix(), ending)


def _is_wanted(ending: str) -> bool:
    is_text = ending in CAPTION_ENDINGS or ending in VALUE_ENDINGS or ending == "json"
    return is_text or f".{ending}" in PICTURE_SUFFIXES


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo, key: str, ending: str) -> _Member:
    """One member. Raises OSError, TarError."""
    limit = MAX_PICTURE_BYTES if f".{ending}" in PICTURE_SUFFIXES else MAX_TEXT_BYTES
    if member.size > limit:
        return _Member(key, ending, b"", 0, f"{member.size} bytes, the limit is {limit}")
    stream = tar.fileobj
    assert stream is not None
    stream.seek(member.offset_data - TAR_BLOCK)
    data = stream.read(TAR_BLOCK + member.size)
    if len(data) != TAR_BLOCK + member.size:
        raise tarfile.ReadError("unexpected end of data")
    if not is_member(data[:TAR_BLOCK], member.size):
        return _Member(key, ending, b"", 0, "its header doesn't stand before it")
    return _Member(key, ending, data[TAR_BLOCK:], member.offset_data)


class _Bounded:
    """A file of which no more than MAX_READ_BYTES are read at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes, the limit is {MAX_READ_BYTES}")
        return self._stream.read(size)

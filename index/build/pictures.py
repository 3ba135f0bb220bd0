"""Captioned pictures for training, from every form of corpus that a build reads.

The entry point `files` of the group `hivlp.corpora`: `hivlp.models.training` asks for it by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.items import Aliases, BadItem, Item
from hivlp.index.build.readers.base import SPLITS, Corpus, CorpusOptions, Split
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import read_picture
from hivlp.models.corpus import CaptionedPicture, PictureOptions, Unusable


def open_pictures(source: str, options: PictureOptions) -> FilePictures:
    """A path, a pattern or a URL as training reads it. Raises CorpusError."""
    splits = [_split(source, split) for split in options.splits] or ["all"]
    aliases = _aliases(source, options.aliases)
    readers = [
        open_corpus(source, CorpusOptions(split, options.images, aliases, shared_pictures=True))
        for split in dict.fromkeys(splits)
    ]
    return FilePictures(source, readers, options.group)


def _split(source: str, given: str) -> Split:
    found = next((split for split in SPLITS if split == given), None)
    if found is None:
        raise CorpusError(source, f"no split {given!r}: known are {', '.join(SPLITS)}")
    return found


def _aliases(source: str, given: str | None) -> Aliases | None:
    found: Aliases | None = next((name for name in get_args(Aliases) if name == given), None)
    if found != given:
        raise CorpusError(source, f"no aliases {given!r}: known are {', '.join(get_args(Aliases))}")
    return found


class FilePictures:
    """Pictures of one or several readers of one source, which differ in their split."""

    def __init__(self, source: str, readers: list[Corpus], group: str | None) -> None:
        self._source = source
        self._readers = readers
        self._group = group
        self._parts = [part for reader in readers for part in reader.parts()]

    def parts(self) -> int:
        """Files that can be read one without another."""
        return len(self._parts)

    def read(self, part: int | None = None) -> Iterator[CaptionedPicture | Unusable]:
        """Everything, or one part. An id that is twice in one reader is an error, unless it is the
        path of a picture that several rows describe. Raises CorpusError.
        """
        for reader in self._readers if part is None else [self._parts[part]]:
            for found in reader:
                yield self._captioned(found)

    def picture(self, reference: str) -> bytes:
        """The bytes of one picture. Raises CorpusError."""
        return read_picture(self._readers[0].root, reference)

    def _captioned(self, found: Item | BadItem) -> CaptionedPicture | Unusable:
        if isinstance(found, BadItem):
            return Unusable(found.place, found.id, found.reason)
        group = None
        if self._group is not None:
            value = found.metadata.get(self._group)
            if value is None:
                reason = f"field {self._group!r}, asked for as the group, is missing"
                return Unusable(found.place, found.id, reason)
            group = str(value)
        return CaptionedPicture(found.id, found.image, found.captions, group, found.image_data)

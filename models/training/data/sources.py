"""Which corpora a run learns from: opened by name, so that no module here imports their readers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from hivlp.models.corpus import (
    CORPORA_GROUP,
    CaptionedPicture,
    OpenPictures,
    PictureCorpus,
    PictureOptions,
    Unusable,
)
from hivlp.models.errors import TextError, TrainingError
from hivlp.models.runtime.texts import MAX_TEXT_CHARS, clean_text
from hivlp.models.training.data.choice import Choice, ChosenIds, IdFile

KARPATHY_ENDING = ".json"


@dataclass(frozen=True, slots=True)
class DataSource:
    """What was asked for: paths, patterns or URLs, how to read them, the reader's name, and which
    items of them.
    """

    paths: tuple[str, ...]
    options: PictureOptions = field(default_factory=PictureOptions)
    reader: str = "files"
    choice: Choice = field(default_factory=Choice)

    def as_dict(self) -> dict[str, Any]:
        """For the record of a run."""
        return asdict(self)

    @staticmethod
    def from_dict(given: dict[str, Any]) -> DataSource:
        """The reverse of `as_dict`."""
        options = given["options"] | {"splits": tuple(given["options"]["splits"])}
        files = {name: None if f is None else IdFile(**f) for name, f in given["choice"].items()}
        return DataSource(
            tuple(given["paths"]), PictureOptions(**options), given["reader"], Choice(**files)
        )

    def open(self) -> Pictures:
        """Open every path. Raises TrainingError for an unknown reader, HivlpError for a path."""
        if not self.paths:
            raise TrainingError("--corpus: at least one corpus is needed")
        self._check_splits()
        opener = _opener(self.reader)
        corpora = [opener(path, self._options_of(path)) for path in self.paths]
        return Pictures(corpora, self.choice.open())

    def _options_of(self, path: str) -> PictureOptions:
        """Splits belong to Karpathy JSON files, aliases to everything else."""
        own = self.options
        if _may_have_splits(path):
            return PictureOptions(own.splits, own.images, None, own.group)
        return PictureOptions((), None, own.aliases, own.group)

    def _check_splits(self) -> None:
        """Raises TrainingError where splits or images are given, and no corpus would take them."""
        given = {"--split": self.options.splits, "--images": self.options.images}
        named = " and ".join(name for name, value in given.items() if value)
        if named and not any(map(_may_have_splits, self.paths)):
            raise TrainingError(
                f"{named}: {', '.join(self.paths)} would be read whole; splits and a folder of "
                f"images apart belong to a Karpathy split JSON, a path that ends in "
                f"{KARPATHY_ENDING}"
            )


def _may_have_splits(path: str) -> bool:
    """Whether a path, or a URL before its query, has the ending of a Karpathy split JSON."""
    parts = urlsplit(path)
    named = parts.path if parts.netloc else path
    return named.lower().endswith(KARPATHY_ENDING)


def _opener(name: str) -> OpenPictures:
    found = {point.name: point for point in entry_points(group=CORPORA_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise TrainingError(f"data.reader: no reader {name!r} is installed; there are: {known}")
    opener: OpenPictures = found[name].load()
    return opener


@dataclass(frozen=True, slots=True)
class UsablePicture:
    """A picture with at least one clean caption: corpus number, reference there, item number.

    `item` is the same for pictures that show the same thing, and for rows of one picture: none of
    them is another's negative.
    """

    id: str
    corpus: int
    picture: str
    captions: tuple[str, ...]
    item: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Uncaptioned:
    """Something without a picture or without a caption, which is no failure but no use either."""

    id: str


Found = UsablePicture | Uncaptioned | Unusable


class Pictures:
    """Several corpora as one."""

    def __init__(self, corpora: list[PictureCorpus], chosen: ChosenIds) -> None:
        self._corpora, self._chosen = corpora, chosen
        self._parts = [(c, p) for c, corpus in enumerate(corpora) for p in range(corpus.parts())]

    @property
    def parts(self) -> int:
        """Files that can be read one without another, of all corpora together."""
        return len(self._parts)

    def read(self) -> Iterator[Found]:
        """Everything that is chosen, corpus by corpus. Raises TrainingError for ids never met."""
        for number, corpus in enumerate(self._corpora):
            yield from self._chosen_of(corpus.read(), number)
        self._chosen.check_met()

    def read_part(self, part: int) -> Iterator[Found]:
        """What is chosen of one part (from 0)."""
        number, own = self._parts[part]
        yield from self._chosen_of(self._corpora[number].read(own), number)

    def _chosen_of(
        self, read: Iterator[CaptionedPicture | Unusable], number: int
    ) -> Iterator[Found]:
        for found in read:
            if found.id is None or found.id in self._chosen:
                yield usable(found, number)

    def picture(self, corpus: int, reference: str) -> bytes:
        """The bytes of a picture. Raises HivlpError."""
        return self._corpora[corpus].picture(reference)


def usable(found: CaptionedPicture | Unusable, corpus: int) -> Found:
    """What a run can make of a corpus's entry; captions are brought into canonical form."""
    if isinstance(found, Unusable):
        return found
    if found.picture is None or not found.captions:
        return Uncaptioned(found.id)
    captions: dict[str, None] = {}
    reason = ""
    for caption in found.captions:
        try:
            captions[clean_text(caption, max_chars=MAX_TEXT_CHARS, param="caption")] = None
        except TextError as error:
            reason = error.message
    if not captions:
        return Unusable(found.picture, found.id, reason)
    item = item_number(corpus, found.picture, found.group)
    return UsablePicture(found.id, corpus, found.picture, tuple(captions), item, found.data)


def item_number(corpus: int, picture: str, group: str | None) -> int:
    """63 bits that equal items share: those of one group, else one picture of one corpus.

    Two different things have one number once in about 2**62 pairs; they are then only no negatives
    of each other.
    """
    named = json.dumps([corpus, picture] if group is None else [group])
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

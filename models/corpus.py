"""What training asks of a corpus: captioned pictures, read in order, and each picture again.

A contract without torch and without files: `hivlp.index` reads every form that a corpus has and
serves this protocol under the entry-point group `hivlp.corpora`; `hivlp.models.training` finds it
there by name. Neither imports the other (docs/decisions/0013).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

CORPORA_GROUP = "hivlp.corpora"
"""Entry points of this group are `OpenPictures`."""


@dataclass(frozen=True, slots=True)
class CaptionedPicture:
    """One picture and what is said of it; either may be missing in a corpus of many kinds.

    `picture` is its reference, which the corpus that gave it can read again; `data` are its bytes
    where they were read along with it. Items with one `group` show the same thing.
    """

    id: str
    picture: str | None
    captions: tuple[str, ...]
    group: str | None = None
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Something of a corpus that can't be used: where it stands, its id if known, and why."""

    place: str
    id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """How to read: `splits` and `images` (folder) of a Karpathy JSON, `aliases` of columns that
    another program wrote, and the metadata field `group` whose equals show the same thing.
    """

    splits: tuple[str, ...] = ()
    images: str | None = None
    aliases: str | None = None
    group: str | None = None


class PictureCorpus(Protocol):
    """Captioned pictures of one source. Every method raises HivlpError for what can't be read."""

    def parts(self) -> int:
        """How many files it is made of that can be read one without another, at least 1."""

    def read(self, part: int | None = None) -> Iterator[CaptionedPicture | Unusable]:
        """Everything in its own order, or one part of it (from 0)."""

    def picture(self, reference: str) -> bytes:
        """The bytes of one picture."""


OpenPictures = Callable[[str, PictureOptions], PictureCorpus]
"""Opens a path, a pattern or a URL. Raises HivlpError for what is no corpus."""

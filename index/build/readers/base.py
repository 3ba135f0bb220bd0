"""What every reader of a corpus is: a stream of items and bad items, and where it came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hivlp.index.build.items import Aliases, BadItem, Item
from hivlp.index.build.seen import SeenHashes
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root, root_text
from hivlp.index.snapshot.catalogue import id_hash

Split = Literal["all", "train", "val", "test", "restval"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How to read: `split` and `images` (the folder of the pictures) of a Karpathy split JSON,
    `aliases` of tables that another program wrote. With `shared_pictures`, several rows without an
    id of their own may have one picture, and then its path as their id.
    """

    split: Split = "all"
    images: str | None = None
    aliases: Aliases | None = None
    shared_pictures: bool = False


PLAIN = CorpusOptions()


class Corpus(ABC):
    """A readable corpus: `source` is what was given, `root` is where picture references begin."""

    kind: str

    def __init__(self, source: Root, root: Root, options: CorpusOptions = PLAIN) -> None:
        self.source = source
        self.root = root
        self.options = options

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Items and bad items. Raises CorpusError, also for an id that was seen before.

        Takes 8 bytes of memory an item.
        """
        seen, shared = SeenHashes(), SeenHashes()
        for number, found in enumerate(self._read()):
            if isinstance(found, Item):
                key = id_hash(found.id)
                if self.options.shared_pictures and found.id == found.image:
                    shared.add(key)
                    again = key in seen
                else:
                    again = seen.add(key) or key in shared
                if again:
                    self._refuse_twice(found, number)
            yield found

    def count(self) -> int | None:
        """How many items to expect, where that is cheap to know."""
        return None

    def parts(self) -> Sequence[Corpus]:
        """The same items as corpora of one file each, in order, where its files stand alone."""
        return (self,)

    def is_untyped(self) -> bool:
        """Whether all metadata are read as texts, as in CSV. Raises CorpusError."""
        return False

    def _refuse_twice(self, again: Item, number: int) -> None:
        """Raises CorpusError where the id was really there: two ids may have one hash."""
        for earlier, first in enumerate(self._read()):
            if earlier >= number:
                return
            if isinstance(first, Item) and first.id == again.id:
                reason = f"id {again.id!r} is there twice: {first.place} and {again.place}"
                raise CorpusError(root_text(self.source), reason)

    @abstractmethod
    def _read(self) -> Iterator[Item | BadItem]: ...

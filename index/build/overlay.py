"""What a build takes beside its corpus: items that replace, or come on top of, those it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hivlp.index.build.items import BadItem, Item


@dataclass(frozen=True, slots=True)
class Overlay:
    """`hides` says of an id of the corpus whether to leave it out; `items` come after the corpus.

    An item that replaces one must be hidden in the corpus: an id that is there twice stops the
    build. The picture of an item may come with it (`image_data`), with a reference or without one.
    `items` is passed over once. `hidden` is how many of the corpus's ids are hidden at most (None:
    any number), `added` how many `items` there are at least.
    """

    hides: Callable[[str], bool]
    items: Iterable[Item | BadItem] = ()
    hidden: int | None = None
    added: int = 0

    def over(self, corpus: Iterable[Item | BadItem]) -> Iterator[Item | BadItem]:
        """The corpus without what is hidden, then the items."""
        for found in corpus:
            if found.id is None or not self.hides(found.id):
                yield found
        yield from self.items

    def at_least(self, count: int) -> int:
        """How many there are, at least, over a corpus of `count`."""
        return self.added + (0 if self.hidden is None else max(0, count - self.hidden))

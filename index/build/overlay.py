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
    `items` is passed over once.
    """

    hides: Callable[[str], bool]
    items: Iterable[Item | BadItem] = ()

    def over(self, corpus: Iterable[Item | BadItem]) -> Iterator[Item | BadItem]:
        """The corpus without what is hidden, then the items."""
        for found in corpus:
            if found.id is None or not self.hides(found.id):
                yield found
        yield from self.items

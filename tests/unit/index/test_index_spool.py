"""Items on disk, ids in eight bytes, and what a build takes beside its corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build import seen, spool
from hivlp.index.build.columns import Printed
from hivlp.index.build.gate import ItemIds, check_items
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.readers import base
from hivlp.index.build.readers.base import Corpus
from hivlp.index.build.seen import SeenHashes
from hivlp.index.build.spool import EncodedItem, ItemSpool
from hivlp.index.errors import BuildError, CorpusError
from hivlp.index.snapshot.scratch import Scratch, Span


def encoded(number: int) -> EncodedItem:
    texts = tuple(f"text {number} {i}" for i in range(number % 3))
    return EncodedItem(
        id=f"i{number}",
        image=f"{number}.png" if number % 2 else None,
        image_key=b"k%d" % number if number % 2 else None,
        texts=texts,
        text_keys=tuple(text.encode() for text in texts),
        metadata={"n": number, "tags": ["a", "\ud800"], "deep": {"x": [1]}},
    )


@pytest.mark.parametrize("block", [1, 3, 1_024])
def test_items_come_back_in_order_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(spool, "BLOCK_ITEMS", block)
    items = [encoded(i) for i in range(10)]
    with ItemSpool(tmp_path) as kept:
        for item in items[:7]:
            kept.append(item)
        assert [item.id for item in kept] == [item.id for item in items[:7]]
        for item in items[7:]:
            kept.append(item)
        assert len(kept) == 10
        assert kept.texts == sum(len(item.texts) for item in items)
        pairs = [(a.id, b.id) for a, b in zip(kept, kept, strict=True)]  # two passes at once
        assert pairs == [(item.id, item.id) for item in items]
        for found, item in zip(kept, items, strict=True):
            assert (found.image, found.image_key) == (item.image, item.image_key)
            assert (found.texts, found.text_keys) == (item.texts, item.text_keys)
            assert dict(found.metadata) == {**item.metadata, "deep": Printed('{"x": [1]}')}
        assert list(tmp_path.iterdir()) == []  # a file without a name


def test_long_items_fill_a_block_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "BLOCK_CHARS", 100)
    with ItemSpool(tmp_path) as kept:
        for number in range(5):
            kept.append(EncodedItem(f"i{number}", None, None, (), (), {"t": "x" * 200}))
        assert len(kept._waiting) == 0
        assert len(list(kept)) == 5


def test_what_does_not_come_back_whole_from_a_scratch_file_is_an_error(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        span = scratch.append(b"abc")
        assert scratch.read(span) == b"abc"
        with pytest.raises(OSError, match="2 bytes of 5"):
            scratch.read(Span(1, 5))


def test_numbers_seen_before_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "FRESH", 8)
    rng = np.random.default_rng(0)
    numbers = [int(n) for n in rng.integers(0, 2**64, 3_000, dtype=np.uint64)] + [0, 2**64 - 1]
    found = SeenHashes()
    assert not any(found.add(number) for number in numbers)
    assert all(found.add(number) for number in numbers)
    assert not any(number in found for number in (1, 2, 3))
    assert len(found._runs) < 8
    assert sum(map(len, found._runs)) + len(found._fresh) == len(numbers)


def test_one_id_twice_is_named_with_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [encoded(i) for i in range(5)]
    check_items(items)
    with pytest.raises(BuildError, match="'i3' is there twice: items 3 and 5"):
        check_items([*items, encoded(3)])
    monkeypatch.setattr("hivlp.index.build.gate.id_hash", lambda item_id: 7)
    check_items(items)  # of one hash, and yet different
    with pytest.raises(BuildError, match="'i3' is there twice: items 3 and 5"):
        check_items([*items, encoded(3)])
    assert ItemIds(items)[4] == "i4"


class Listed(Corpus):
    kind = "listed"

    def __init__(self, *found: Item | BadItem) -> None:
        super().__init__(Path("listed"), Path("listed"))
        self.found = found

    def _read(self) -> Iterator[Item | BadItem]:
        yield from self.found


def test_a_corpus_names_both_places_of_an_id_and_only_of_an_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [Item(f"i{i}", place=f"line {i}") for i in range(4)]
    twice = Listed(*items, BadItem("line 4", None, "bad"), Item("i2", place="line 5"))
    with pytest.raises(CorpusError, match="'i2' is there twice: line 2 and line 5"):
        list(twice)
    monkeypatch.setattr(base, "id_hash", lambda item_id: 7)
    assert list(Listed(*items)) == items
    with pytest.raises(CorpusError, match="'i2' is there twice: line 2 and line 5"):
        list(twice)


def test_an_overlay_hides_items_and_adds_others_at_the_end() -> None:
    bad, nameless = BadItem("line 1", "b", "broken"), BadItem("line 2", None, "broken")
    corpus = Listed(Item("a"), bad, nameless, Item("c"))
    new = Item("b", image_data=b"picture")
    found = list(Overlay(lambda item_id: item_id in ("a", "b"), [new]).over(corpus))
    assert found == [nameless, Item("c"), new]
    assert list(Overlay(lambda item_id: False).over(corpus)) == list(corpus)


@pytest.mark.parametrize(
    ("hidden", "added", "count", "least"),
    [(0, 0, 100, 100), (3, 2, 100, 99), (3, 2, 2, 2), (None, 2, 100, 2)],
)
def test_an_overlay_says_how_many_items_there_are_at_least(
    hidden: int | None, added: int, count: int, least: int
) -> None:
    overlay = Overlay(lambda item_id: False, hidden=hidden, added=added)
    assert overlay.at_least(count) == least

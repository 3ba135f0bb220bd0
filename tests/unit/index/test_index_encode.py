"""Encoding holds a window of pictures at a time, says what it lost as it loses it, and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.build import encode
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.encode import Encoded, EncodeMeans, FailureLog, encode_corpus
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.model import Model
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.readers.base import Corpus
from hivlp.index.build.spool import ItemSpool
from hivlp.index.errors import CorpusError
from hivlp.models.runtime.progress import Progress
from tests.fakes import DIMS, SPACE, fake_model
from tests.tiny_artifact import png, solid

SHADES = [png(solid((shade, 255 - shade, 0))) for shade in range(200)]


class Counted(bytes):
    """A picture's bytes that are counted while they live."""

    alive = 0
    most = 0

    def __new__(cls, data: bytes) -> Counted:
        made = super().__new__(cls, data)
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return made

    def __del__(self) -> None:
        type(self).alive -= 1


class Pictures(Corpus):
    """So many pictures, each made when it is read."""

    kind = "made"

    def __init__(self, root: Path, count: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__(root, root)
        self._numbers = range(count)
        self._bad = bad

    def _read(self) -> Iterator[Item | BadItem]:
        for n in self._numbers:
            if n in self._bad:
                yield BadItem(f"row {n}", None, "made bad")
            else:
                data = Counted(SHADES[n % len(SHADES)] if n % 50 != 13 else b"broken")
                yield Item(f"i{n}", f"x#row={n}", (), {"n": n}, data)


class Run:
    """One encoding, with its own cache unless it is given one."""

    def __init__(self, folder: Path, model: Model, **options: Any) -> None:
        self.folder, self.model, self.options = folder, model, options

    def __call__(self, corpus: Corpus, overlay: Overlay | None = None) -> tuple[Encoded, list[Any]]:
        log = self.folder / "failures.jsonl"
        with (
            EmbeddingCache(self.folder, SPACE, DIMS[-1]) as cache,
            ItemSpool(self.folder) as spool,
            FailureLog(log) as failures,
            Progress("encode", None, quiet=True) as progress,
        ):
            means = EncodeMeans(cache, spool, failures, **self.options)
            encoded = encode_corpus(corpus, self.model, means, progress, overlay)
            items = list(spool)
        self.lost = [json.loads(line) for line in log.read_text().splitlines()]
        return encoded, items


@pytest.mark.parametrize("workers", [1, 4])
def test_a_window_of_pictures_is_alive_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(encode, "WINDOW", 8)
    monkeypatch.setattr(Counted, "most", 0)
    run = Run(tmp_path, fake_model(tmp_path), workers=workers, batch_size=4)
    encoded, items = run(Pictures(tmp_path, 400, bad=(5, 399)))
    assert Counted.alive == 0
    assert 8 <= Counted.most <= 8 + 1  # the window, and the one being read
    assert [item.id for item in items] == [
        f"i{n}" for n in range(400) if n % 50 != 13 and n not in (5, 399)
    ]
    assert (encoded.lost, encoded.failures) == (10, 10)
    places = [entry["place"] for entry in run.lost]
    assert places == ["row 5", *(f"x#row={n}" for n in range(13, 400, 50)), "row 399"]


def test_a_window_ends_early_when_its_pictures_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "WINDOW_BYTES", 3 * len(SHADES[0]))
    monkeypatch.setattr(Counted, "most", 0)
    Run(tmp_path, fake_model(tmp_path))(Pictures(tmp_path, 100))
    assert 2 <= Counted.most <= 6


def test_what_was_lost_before_a_build_broke_off_is_listed(tmp_path: Path) -> None:
    class Broken(Pictures):
        def _read(self) -> Iterator[Item | BadItem]:
            yield from super()._read()
            raise CorpusError("row 100", "unreadable")

    with pytest.raises(CorpusError, match="row 100"):
        Run(tmp_path, fake_model(tmp_path))(Broken(tmp_path, 128, bad=(3,)))
    listed = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [entry["place"] for entry in listed][:2] == ["row 3", "x#row=13"]


def test_one_new_picture_in_a_hundred_is_one_picture_encoded(tmp_path: Path) -> None:
    run = Run(tmp_path, fake_model(tmp_path))
    folder = tmp_path / "p"
    folder.mkdir()
    for n in range(100):
        (folder / f"{n:03d}.png").write_bytes(png(solid((n, 0, 0))))
    from hivlp.index.build.corpus import open_corpus

    assert run(open_corpus(folder))[0].fresh == 100
    assert run(open_corpus(folder))[0].fresh == 0
    (folder / "042.png").write_bytes(png(solid((0, 0, 77))))
    (folder / "zzz.txt").write_text("beside no picture")
    encoded, items = run(open_corpus(folder))
    assert (encoded.fresh, len(items)) == (1, 100)


def test_what_an_overlay_brings_is_encoded_after_the_corpus(tmp_path: Path) -> None:
    run = Run(tmp_path, fake_model(tmp_path))
    new = [
        Item("i1", image_data=SHADES[0], captions=("red",), metadata={"n": 101}),
        Item("new", "kept.png", image_data=SHADES[100]),
        Item("broken", image_data=b"no picture"),
    ]
    overlay = Overlay(lambda item_id: item_id in ("i0", "i1"), new)
    encoded, items = run(Pictures(tmp_path, 4), overlay)
    assert [(item.id, item.image) for item in items] == [
        ("i2", "x#row=2"), ("i3", "x#row=3"), ("i1", None), ("new", "kept.png"),
    ]  # fmt: skip
    assert items[2].image_key is not None
    assert items[2].texts == ("red",)
    assert (encoded.lost, [entry["place"] for entry in run.lost]) == (1, ["broken"])


def test_pictures_are_read_by_one_thread_or_many_alike(tmp_path: Path) -> None:
    found = []
    for workers in (1, 3, 8):
        folder = tmp_path / str(workers)
        folder.mkdir()
        run = Run(folder, replace(fake_model(folder), text=None), workers=workers)
        _, items = run(Pictures(folder, 150))
        found.append([(item.id, item.image_key) for item in items])
    assert found[0] == found[1] == found[2]

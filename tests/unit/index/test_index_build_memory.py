"""What a version's making holds in memory, counted: bytes an item, not items."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from hivlp.index.build import assemble, columns, seen, spool
from hivlp.index.build.assemble import write_catalogue, write_side
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.gate import check_items
from hivlp.index.build.spool import EncodedItem, ItemSpool
from hivlp.index.snapshot import coding
from tests.fakes import SPACE, specs, unit_vectors

SMALL = 6_000
LARGE = 18_000
KEYS = [b"%032d" % i for i in range(100)]


class Made:
    """Items that are made as they are passed over."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EncodedItem]:
        for i in range(self._count):
            title = (
                f"the title of item {i * 7919 % self._count:09d}, longer than a hundred bytes " * 2
            )
            metadata = {"title": title, "price": f"{i}.5", "tags": [f"t{i % 9}"], "n": i}
            key = KEYS[i % len(KEYS)]
            yield EncodedItem(f"item-{i:012d}", f"{i}.png", None, (title,), (key,), metadata)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is held at a time, so small that it does not hide what grows."""
    for module, name, value in (
        (assemble, "ITEMS_AT_ONCE", 128),
        (assemble, "BATCH_ITEMS", 512),
        (assemble, "FETCH", 128),
        (coding, "PART", 512),
        (coding, "BLOCK", 32),
        (coding, "RANGE", 16),
        (columns, "FEW", 64),
        (columns, "SPILL", 256),
        (seen, "FRESH", 256),
        (spool, "BLOCK_ITEMS", 64),
    ):
        monkeypatch.setattr(module, name, value)


def peak_bytes(folder: Path, count: int) -> int:
    """Most bytes that Python, numpy and Arrow held while a catalogue and a side were written."""
    folder.mkdir()
    with EmbeddingCache(folder, SPACE, 16) as cache, ItemSpool(folder) as kept:
        cache.put(KEYS, unit_vectors(len(KEYS), 16))
        usual = pa.default_memory_pool()
        arrow = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(arrow)
        tracemalloc.start()
        for item in Made(count):
            kept.append(item)
        check_items(kept)
        write_catalogue(folder, kept)
        built = write_side(folder, "text", kept, cache, specs(), "nested")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pa.set_memory_pool(usual)
        assert built is not None
        assert built.size == count
    return most + int(arrow.max_memory())


@pytest.mark.usefixtures("small_parts")
def test_a_version_is_made_in_a_hundred_bytes_an_item(tmp_path: Path) -> None:
    """An item itself is ten times as large: its two texts alone have 270 bytes."""
    peak_bytes(tmp_path / "first", 200)  # what is made once: modules, caches
    small = peak_bytes(tmp_path / "small", SMALL)
    large = peak_bytes(tmp_path / "large", LARGE)
    each = (large - small) / (LARGE - SMALL)
    assert each < 100, f"{each:.0f} bytes an item, from {small} to {large}"

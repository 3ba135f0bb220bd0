"""Before a version serves, its files are in memory, the most needed ones first."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.snapshot import prefault as module
from hivlp.index.snapshot.prefault import SHARE, by_need, mappings, prefault, read_through
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors, write_snapshot

LINUX = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = SnapshotStore(tmp_path_factory.mktemp("home"))
    gallery = unit_vectors(3_000, 16)
    write_snapshot(store, images=gallery, family="graph", level1="sq8")
    return store.open("default")


def cold(file: Path) -> None:
    """Push a file out of the system's cache, as far as it lets us."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def resident(file: Path) -> float:
    """The share of a file's pages that the system's cache holds."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        held = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        span = ctypes.c_size_t(len(mapped))
        assert libc.mincore(ctypes.c_void_p(address), span, held) == 0
        return sum(page & 1 for page in held) / pages


def mapped_kib(file: Path) -> int:
    """KiB of a file that this process's own mappings of it hold."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@LINUX
@pytest.mark.parametrize("populates", [True, False])
def test_a_file_is_in_memory_afterwards(
    tmp_path: Path, populates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "with a space.npy"
    np.save(file, np.zeros(3 << 20, np.uint8))
    cold(file)
    array = np.load(file, mmap_mode="r")
    before = mapped_kib(file)
    if not populates:
        monkeypatch.setattr(module, "advise", lambda begin, end, advice: False)
    read_through(file)
    if populates and mapped_kib(file) > before:  # the kernel can fill mappings
        assert mapped_kib(file) >= 3 << 10
    del array
    assert resident(file) == 1.0


@LINUX
def test_every_mapping_of_a_snapshot_s_file_is_found(snapshot: Snapshot) -> None:
    rows = snapshot.path / "image" / "rows.npy"
    assert len(list(mappings(rows))) == 1  # numpy's, which the graphs walk over too
    assert list(mappings(snapshot.path / "image" / "level1.faiss"))
    assert not list(mappings(snapshot.path / "manifest.json"))


def test_a_whole_snapshot_is_read_through_where_there_is_room(snapshot: Snapshot) -> None:
    done = prefault(snapshot, None)
    assert set(done.read) == set(snapshot.manifest.files)
    assert done.left == ()
    assert done.bytes_read == sum(f.size_bytes for f in snapshot.manifest.files.values())
    assert "read through" in done.to_text()
    assert "left" not in done.to_text()


def test_codes_graphs_norms_and_rows_that_are_walked_come_first(snapshot: Snapshot) -> None:
    order = by_need(snapshot)
    assert order[0] == "image/level1.faiss"
    assert order[1:4] == ["image/level1.hnsw", "image/level3.hnsw", "image/inverse_norms.npy"]
    assert order[4] == "image/rows.npy"


def test_what_does_not_fit_is_left_to_the_disk_and_named(snapshot: Snapshot) -> None:
    files = snapshot.manifest.files
    rows = files["image/rows.npy"].size_bytes
    total = sum(f.size_bytes for f in files.values())
    done = prefault(snapshot, int((total - rows + 1) / SHARE))
    assert "image/rows.npy" in done.left
    assert done.bytes_read <= total - rows
    assert "left to the disk: " in done.to_text()
    small = prefault(snapshot, 2 * files["image/level1.faiss"].size_bytes)
    assert "image/level1.faiss" in small.read
    assert small.bytes_read <= 0.9 * 2 * files["image/level1.faiss"].size_bytes
    assert prefault(snapshot, 0).read == ()


def test_a_platform_without_these_calls_reads_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(module, "MAPS", Path("/nowhere"))
    assert prefault(snapshot, None).left == ()

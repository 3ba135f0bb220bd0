"""A byte changed anywhere is found, by opening and by verifying, and the file is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends.choose import Backend
from hivlp.index.errors import SnapshotCorrupt
from hivlp.index.snapshot.manifest import MANIFEST_NAME, read_manifest, write_manifest
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import file_record
from tests.fakes import unit_vectors, write_snapshot

FILES = [
    "image/inverse_norms.npy",
    "image/level1.faiss",
    "image/level1.maskable.faiss",
    "image/level2.faiss",
    "image/level3.faiss",
    "image/row_items.npy",
    "image/rows.npy",
    "item_hashes.npy",
    "item_ordinals.npy",
    "items.arrow",
    "manifest.json",
    "text/inverse_norms.npy",
    "text/level1.faiss",
    "text/level1.maskable.faiss",
    "text/level2.faiss",
    "text/level3.faiss",
    "text/row_items.npy",
    "text/rows.npy",
    "text/texts.arrow",
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = SnapshotStore(tmp_path_factory.mktemp("published"))
    write_snapshot(
        made,
        images=unit_vectors(6, 16),
        texts=unit_vectors(8, 16, 1),
        text_items=[0, 0, 1, 2, 3, 4, 5, 5],
        materialise=True,
        level1="rabitqfs",
    )
    return made.home


@pytest.fixture
def store(published: Path, tmp_path: Path) -> SnapshotStore:
    """A copy of the published snapshot, to be spoilt."""
    shutil.copytree(published / "indexes", tmp_path / "indexes")
    return SnapshotStore(tmp_path)


def folder(store: SnapshotStore) -> Path:
    return store.path("default", store.current("default"))


def both_find(store: SnapshotStore, name: str) -> str:
    with pytest.raises(SnapshotCorrupt) as opening:
        store.open("default")
    with pytest.raises(SnapshotCorrupt) as verifying:
        store.verify("default")
    assert opening.value.file == verifying.value.file == name
    assert name in str(opening.value)
    return opening.value.reason


def test_these_are_all_the_files(store: SnapshotStore) -> None:
    found = [str(p.relative_to(folder(store))) for p in folder(store).rglob("*") if p.is_file()]
    assert sorted(found) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_changed_byte_is_found_and_named(store: SnapshotStore, name: str, where: str) -> None:
    file = folder(store) / name
    data = bytearray(file.read_bytes())
    place = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[where]
    data[place] ^= 0x01
    file.write_bytes(bytes(data))
    both_find(store, name)


def test_every_byte_of_the_manifest_counts(store: SnapshotStore) -> None:
    file = folder(store) / MANIFEST_NAME
    version = store.current("default")
    data = file.read_bytes()
    for place in range(0, len(data), 37):
        changed = bytearray(data)
        changed[place] ^= 0x02
        file.write_bytes(bytes(changed))
        with pytest.raises(SnapshotCorrupt, match=MANIFEST_NAME):
            read_manifest(folder(store), "default", version)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(store: SnapshotStore, name: str) -> None:
    (folder(store) / name).unlink()
    assert "missing" in both_find(store, name)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(store: SnapshotStore, name: str) -> None:
    file = folder(store) / name
    file.write_bytes(file.read_bytes()[:-10])
    both_find(store, name)


@pytest.mark.parametrize("name", ["stray.txt", "image/level9.faiss", "deep/down/file"])
def test_an_unexpected_file_is_named(store: SnapshotStore, name: str) -> None:
    stray = folder(store) / name
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("x")
    assert "unexpected" in both_find(store, name)


def test_an_unexpected_link_to_a_folder_is_named(store: SnapshotStore, tmp_path: Path) -> None:
    (folder(store) / "elsewhere").symlink_to(tmp_path)
    assert "unexpected" in both_find(store, "elsewhere")


@pytest.mark.parametrize(
    ("name", "word"), [("items.arrow", b"3.png"), ("text/texts.arrow", b"ext 3")]
)
def test_tables_are_hashed_whatever_their_size(
    store: SnapshotStore, name: str, word: bytes
) -> None:
    file = folder(store) / name
    file.write_bytes(file.read_bytes().replace(word, word.upper(), 1))
    with pytest.raises(SnapshotCorrupt, match=name):
        store.open("default", hash_up_to_bytes=0)


def test_an_unhashed_array_with_a_spoilt_header_is_named(store: SnapshotStore) -> None:
    file = folder(store) / "image" / "rows.npy"
    data = file.read_bytes()
    named = 0
    for place in range(data.index(b"}") + 1):
        changed = bytearray(data)
        changed[place] ^= 0x40
        file.write_bytes(bytes(changed))
        try:
            store.open("default", hash_up_to_bytes=0)
        except SnapshotCorrupt as error:
            named += error.file == "image/rows.npy"
    assert named > 50


def test_large_files_may_be_checked_by_size_alone(store: SnapshotStore) -> None:
    file = folder(store) / "image" / "rows.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x01
    file.write_bytes(bytes(data))
    store.open("default", hash_up_to_bytes=100).close()
    with pytest.raises(SnapshotCorrupt, match=r"rows\.npy"):
        store.open("default", hash_up_to_bytes=len(data))
    file.write_bytes(bytes(data) + b"x")
    with pytest.raises(SnapshotCorrupt, match=r"rows\.npy.*bytes"):
        store.open("default", hash_up_to_bytes=0)


def _sealed_again(store: SnapshotStore, name: str) -> None:
    """Make the manifest agree with a changed file, so that only its content is wrong."""
    path = folder(store)
    manifest = read_manifest(path, "default", path.name)
    files = {**manifest.files, name: file_record(path / name)}
    write_manifest(path, manifest.model_copy(update={"files": files}))


@pytest.mark.parametrize("name", [name for name in FILES if name != MANIFEST_NAME])
def test_a_well_hashed_file_that_is_nonsense_is_named(store: SnapshotStore, name: str) -> None:
    (folder(store) / name).write_bytes(b"nonsense" * 20)
    _sealed_again(store, name)
    both_find(store, name)


def test_a_pickled_array_is_refused(store: SnapshotStore) -> None:
    name = "image/row_items.npy"
    np.save(folder(store) / name, np.array([{"a": 1}] * 6, dtype=object), allow_pickle=True)
    _sealed_again(store, name)
    both_find(store, name)


def test_counts_that_disagree_are_named(store: SnapshotStore) -> None:
    name = "image/row_items.npy"
    np.save(folder(store) / name, np.arange(5))
    _sealed_again(store, name)
    both_find(store, name)


def test_a_snapshot_of_another_index_is_refused(store: SnapshotStore) -> None:
    path = folder(store)
    with pytest.raises(SnapshotCorrupt, match="belongs to index 'default'"):
        Snapshot.open(path, "other", path.name)


def test_a_closed_snapshot_is_closed_and_closing_twice_is_fine(store: SnapshotStore) -> None:
    snapshot = store.open("default")
    assert not snapshot.closed
    snapshot.close()
    snapshot.close()
    assert snapshot.closed


def test_it_opens_without_faiss_on_its_rows_alone(store: SnapshotStore) -> None:
    snapshot = store.open("default", backend="numpy")
    assert {type(level).__name__ for level in snapshot.sides["image"].levels.values()} == {
        "ExactLevel"
    }


@pytest.mark.parametrize("backend", ["faiss-cpu", "numpy"])
def test_rows_are_mapped_aligned_and_read_only(store: SnapshotStore, backend: Backend) -> None:
    for side in store.open("default", backend=backend).sides.values():
        for rows in side.rows.values():
            # `take` would first copy the whole of an array that is not.
            assert rows.matrix.flags.aligned
            assert rows.matrix.flags.c_contiguous
            assert not rows.matrix.flags.writeable

"""A disk without room for a version: told before anything is written; and how much that is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.build import needs as needs_module
from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.embeddings import FOLDER, EmbeddingCache
from hivlp.index.build.vectors.importing import import_vectors
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.record import ImportSettings
from hivlp.index.build.wishes import Wishes
from hivlp.index.errors import NoRoom
from hivlp.index.snapshot import room
from hivlp.index.snapshot.pull import pull, push
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.main import main
from tests.fakes import fake_model, unit_vectors, write_snapshot
from tests.tiny_artifact import make_tiny_artifact

QUIET = BuildSettings(quiet=True, sample=50)
DIMS = (32, 64, 128)
ITEMS = 1_000


class Disk:
    """How much is free, as the checks see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int | None = None
        self.needed: list[int] = []
        self._check = room.check_room
        monkeypatch.setattr(room, "free_bytes", lambda folder: self.free)
        for module in (needs_module, "hivlp.index.snapshot.pull"):
            name = module if isinstance(module, str) else module.__name__
            monkeypatch.setattr(f"{name}.check_room", self._watched)

    def _watched(self, needs: dict[Path, int], what: str) -> None:
        self.needed.append(sum(needs.values()))
        self._check(needs, what)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home")


def write_corpus(file: Path, count: int = ITEMS) -> Path:
    """Texts with metadata of each kind."""
    lines = [
        {
            "id": f"item-{i}",
            "text": f"number {i} of many, told in some words",
            "price": i * 0.25,
            "shop": f"shop {i % 7}",
            "name": f"the name of thing {i}, which no other has",
            "tags": [f"tag {i % 5}", f"tag {i % 11}"],
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "settings",
    [
        QUIET,
        replace(QUIET, rows_type="fp16", materialise=True),
        replace(QUIET, wishes=Wishes(family="graph")),
        replace(QUIET, wishes=Wishes(level1="rabitqfs")),
    ],
    ids=["flat", "fp16-materialised", "graph", "rabitqfs"],
)
def test_what_a_build_is_said_to_need_is_what_it_writes(
    tmp_path: Path, store: SnapshotStore, disk: Disk, settings: BuildSettings
) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "many.jsonl"))
    report = build_index(corpus, fake_model(tmp_path, dims=DIMS), store, "default", settings)
    (needed,) = disk.needed  # a .jsonl doesn't say beforehand how much it holds
    assert needed == pytest.approx(bytes_below(report.path), rel=0.2)  # observed .96 to 1.03


@pytest.mark.parametrize("rows_type", ["fp32", "fp16"])
def test_what_an_import_is_said_to_need_is_what_it_writes(
    tmp_path: Path, store: SnapshotStore, disk: Disk, rows_type: Any
) -> None:
    np.save(tmp_path / "v.npy", unit_vectors(ITEMS, 96))
    settings = ImportSettings(quiet=True, rows_type=rows_type, sample=50)
    report = import_vectors(NpySource(tmp_path / "v.npy", None), store, "default", settings)
    assert disk.needed == [pytest.approx(bytes_below(report.path), rel=0.2)]


def refused(run: Any, store: SnapshotStore) -> NoRoom:
    """What is said; no version is there, nor a part of one."""
    with pytest.raises(NoRoom) as caught:
        run()
    folder = store.folder("default")
    left = [path for path in folder.iterdir() if path.name[0] != "."] if folder.is_dir() else []
    assert left == []
    assert not list(folder.glob(".building-*"))
    return caught.value


def test_a_corpus_that_says_how_much_it_holds_is_refused_before_it_is_encoded(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(200):
        (pictures / f"{number}.png").write_bytes(b"never looked at")
    disk.free = room.KEPT_BYTES
    model = fake_model(tmp_path, dims=DIMS)
    error = refused(
        lambda: build_index(open_corpus(pictures), model, store, "default", QUIET), store
    )
    assert "200 items" in str(error)
    assert error.need_bytes >= 2 * 190 * 4 * DIMS[-1]  # rows, and the cache as much
    assert not (tmp_path / "home" / "cache" / "builds" / "default.failures.jsonl").exists()


def build(corpus: Path, store: SnapshotStore) -> BuildReport:
    model = fake_model(corpus.parent, dims=DIMS)
    return build_index(open_corpus(corpus), model, store, "default", QUIET)


def test_any_other_is_refused_before_a_row_is_written_and_keeps_what_was_encoded(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_corpus(tmp_path / "few.jsonl", 100)
    disk.free = room.KEPT_BYTES
    error = refused(lambda: build(corpus, store), store)
    assert "100 text rows" in str(error)
    assert error.folder == store.folder("default")
    disk.free = None
    assert build(corpus, store).fresh == 0


def test_what_the_cache_holds_already_is_not_needed_again(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    model = fake_model(tmp_path, dims=DIMS)
    planned = needs_module.BuildNeeds("default", store.folder("default"), model, QUIET)
    with EmbeddingCache(store.home / "cache" / FOLDER, model.gallery_space, DIMS[-1]) as cache:
        planned.check_before_encoding(1_000, cache, None)
        keys = [bytes([i % 256, i // 256]) * 16 for i in range(1_000)]
        cache.put(keys, unit_vectors(1_000, DIMS[-1]))
        planned.check_before_encoding(1_000, cache, None)
    empty, full = disk.needed
    assert empty - full == pytest.approx(950 * 4 * DIMS[-1], rel=0.05)


def test_a_version_that_serves_is_left_alone_and_the_command_says_why_in_a_line(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, home = write_corpus(tmp_path / "few.jsonl", 50), tmp_path / "home"
    artifact = make_tiny_artifact(home / "artifacts" / "tiny")
    command = ["build", str(corpus), "--home", str(home)]
    assert main([*command, "--artifact", str(artifact)]) == 0
    store = SnapshotStore(home)
    version = store.current("default")
    disk.free = 3 << 20
    capsys.readouterr()
    assert main(command) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("hivlp build: index 'default', 50 text rows: needs ")
    assert "which has 3.0 MiB free, of which 16.0 MiB are to stay free" in said
    assert (store.versions("default"), store.current("default")) == ([version], version)
    store.verify("default")


def test_an_import_is_refused_before_a_vector_is_read(
    tmp_path: Path, store: SnapshotStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "v.npy", unit_vectors(ITEMS, 96))
    source = NpySource(tmp_path / "v.npy", None)
    monkeypatch.setattr(NpySource, "sample", None)
    monkeypatch.setattr(NpySource, "batches", None)
    disk.free = 1 << 20
    settings = ImportSettings(quiet=True)
    error = refused(lambda: import_vectors(source, store, "default", settings), store)
    assert f"{ITEMS} vectors of 96 numbers" in str(error)


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A version in a folder to pull from, and a second one of the same rows."""
    origin = SnapshotStore(tmp_path / "origin")
    for _ in range(2):
        write_snapshot(origin, images=unit_vectors(500, 16))
        push(origin, str(tmp_path / "bucket"), "default", quiet=True)
    return str(tmp_path / "bucket")


def test_a_pull_is_refused_before_a_file_is_fetched(
    store: SnapshotStore, disk: Disk, bucket: str
) -> None:
    disk.free = room.KEPT_BYTES
    error = refused(lambda: pull(store, bucket, "default", quiet=True), store)
    disk.free = room.kept_bytes(error.need_bytes) + error.need_bytes
    report = pull(store, bucket, "default", quiet=True)
    assert report.fetched_bytes == error.need_bytes


def test_a_pull_needs_room_for_what_is_not_here_yet_alone(
    store: SnapshotStore, disk: Disk, bucket: str
) -> None:
    first, second = SnapshotStore(Path(bucket).parent / "origin").versions("default")
    pull(store, bucket, "default", first, quiet=True)
    report = pull(store, bucket, "default", second, quiet=True)
    assert report.linked_bytes > 0
    assert disk.needed[1] == report.fetched_bytes < disk.needed[0]

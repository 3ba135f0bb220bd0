"""A disk without room for a version: told before anything is written; and how much that is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.build import needs as needs_module
from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.embeddings import FOLDER
from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model
from hivlp.index.build.upsert_corpus import upsert_corpus
from hivlp.index.build.vectors.importing import import_vectors
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.record import ImportSettings
from hivlp.index.build.wishes import Wishes
from hivlp.index.errors import NoRoom
from hivlp.index.snapshot import layout, room
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete
from hivlp.index.snapshot.pull import pull, push
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.main import main
from tests.fakes import fake_model, unit_vectors, write_snapshot
from tests.tiny_artifact import CELLS, COLOURS, make_tiny_artifact, png, solid

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
    first, needed = disk.needed
    assert first == 0  # a .jsonl doesn't say beforehand how much it holds
    assert needed == pytest.approx(bytes_below(report.path), rel=0.2)  # observed .96 to 1.03


@pytest.mark.parametrize("rows_type", ["fp32", "fp16"])
def test_what_an_import_is_said_to_need_is_what_it_writes(
    tmp_path: Path, store: SnapshotStore, disk: Disk, rows_type: Any
) -> None:
    np.save(tmp_path / "v.npy", unit_vectors(ITEMS, 96))
    settings = ImportSettings(quiet=True, rows_type=rows_type, sample=50)
    report = import_vectors(NpySource(tmp_path / "v.npy", None), store, "default", settings)
    first, codes = disk.needed
    level1 = report.path / layout.faiss_file("image", 1)
    assert codes == pytest.approx(level1.stat().st_size, rel=0.05)
    assert first < bytes_below(report.path) < 2 * first  # few rows have flat codes


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
    assert error.need_bytes >= 190 * 4 * DIMS[-1]
    assert not (tmp_path / "home" / "cache" / "builds" / "default.failures.jsonl").exists()


def build(corpus: Path, store: SnapshotStore) -> BuildReport:
    model = fake_model(corpus.parent, dims=DIMS)
    return build_index(open_corpus(corpus), model, store, "default", QUIET)


def test_any_other_is_refused_before_a_row_is_written_and_keeps_what_was_encoded(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_corpus(tmp_path / "few.jsonl", 100)
    disk.free = room.KEPT_BYTES + 32 * 4 * DIMS[-1]  # of a batch
    error = refused(lambda: build(corpus, store), store)
    assert "100 text rows" in str(error)
    assert error.folder == store.folder("default")
    disk.free = None
    assert build(corpus, store).fresh == 0


def test_a_batch_that_the_cache_has_no_room_for_is_refused_before_it_is_kept(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_corpus(tmp_path / "few.jsonl", 100)
    disk.free = room.KEPT_BYTES
    error = refused(lambda: build(corpus, store), store)
    assert "32 more in the cache of embeddings: needs" in str(error)
    assert error.folder == store.home / "cache" / FOLDER
    disk.free = None
    assert build(corpus, store).fresh == 100


def write_parquet(file: Path, texts: list[str]) -> Path:
    table = {"id": [f"item-{i}" for i in range(len(texts))], "text": texts}
    pq.write_table(pa.table(table), file)
    return file


def test_equal_texts_are_counted_as_rows_and_not_in_the_cache(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_parquet(tmp_path / "same.parquet", [f"text {i % 10}" for i in range(ITEMS)])
    report = build(corpus, store)
    first, second = disk.needed
    assert report.fresh == 10
    assert 0.7 * bytes_below(report.path) < first < bytes_below(report.path)
    assert second > first


def test_items_that_were_deleted_or_erased_since_are_not_counted(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_parquet(tmp_path / "many.parquet", [f"text {i}" for i in range(ITEMS)])
    build(corpus, store)
    amend(store, "default", [Delete(f"item-{i}") for i in range(500)], None)
    erase(store, "default", [f"item-{i}" for i in range(500, 800)], quiet=True)
    disk.needed.clear()
    report = build(corpus, store)
    assert report.manifest.items == 200
    first, second = disk.needed
    assert 0.15 * ITEMS * 4 * DIMS[-1] < first < bytes_below(report.path)
    assert second > first


def test_an_item_that_was_put_since_is_counted_and_one_that_it_replaced_is_not(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    corpus = write_parquet(tmp_path / "many.parquet", [f"text {i}" for i in range(200)])
    build(corpus, store)
    plain = disk.needed[0]
    changes = write_parquet(tmp_path / "put.parquet", [f"new text {i}" for i in range(250)])
    model = fake_model(tmp_path, dims=DIMS)
    upsert_corpus(open_corpus(changes), model, store, "default", quiet=True)
    disk.needed.clear()
    assert build(corpus, store).manifest.items == 250
    # Of the 250 it can't be told beforehand which the corpus has, too: at most 200.
    assert plain <= disk.needed[0] < plain * 1.3


def test_states_are_counted_for_pictures_once_it_is_known_how_many_there_are(
    tmp_path: Path, store: SnapshotStore, disk: Disk
) -> None:
    (tmp_path / "red.png").write_bytes(png(solid(COLOURS["red"], (20, 30))))
    corpus, pictures = tmp_path / "some.parquet", 5
    images = ["red.png"] * pictures + [None] * (50 - pictures)
    ids = [str(i) for i in range(50)]
    pq.write_table(pa.table({"id": ids, "text": ["red"] * 50, "image": images}), corpus)
    artifact = make_tiny_artifact(store.home / "artifacts" / "tiny", reranker="same")
    model = Model.load(artifact, rerank=True)
    for states in (False, True):
        settings = replace(QUIET, store_states=states)
        build_index(open_corpus(corpus), model, store, "default", settings)
    without, plain, first, counted = disk.needed
    assert first == without
    assert counted - plain == pictures * 2 * CELLS * CELLS * 3  # tokens of three halves each


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
    assert "at least 950 vectors of 96 numbers" in str(error)


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

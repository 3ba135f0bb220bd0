"""A real small model and real pictures: built, resumed, refused, published, searched."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.corpus import FolderCorpus, open_corpus
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.wishes import Wishes
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import BuildError, CorpusError
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import InputError, TextError
from hivlp.models.levels import Modality
from tests.fakes import FakeEncoder, fake_model
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

QUIET = BuildSettings(batch_size=4, quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_tiny_artifact(tmp_path_factory.mktemp("artifact")))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three shades of every colour, each with two captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, colour in COLOURS.items():
        for shade in range(3):
            pixels = np.clip(np.array(colour) - 9 * shade, 0, 255).astype(np.uint8)
            (folder / f"{name}{shade}.png").write_bytes(png(solid(tuple(pixels.tolist()))))
            (folder / f"{name}{shade}.txt").write_text(f"a {name} square\n{name}{shade}\n")
    return folder


def build(
    folder: Path, model: Model, store: SnapshotStore, settings: BuildSettings = QUIET
) -> BuildReport:
    return build_index(open_corpus(folder), model, store, "default", settings)


def search(store: SnapshotStore, model: Model, text: str, side: Modality, k: int) -> list[str]:
    assert model.text is not None
    searcher = LocalSearcher(store.open("default"))
    outputs = query_outputs(model.text, model.text.prepare([text]))
    plan = searcher.plan(PlanRequest(side, "text", k))
    found = run_plan(searcher, side, plan, outputs)[0]
    return [item.id for item in searcher.items(side, found, k, 0)]


def test_a_folder_becomes_a_searchable_index(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    report = build(pictures, model, store)
    manifest = report.manifest
    assert (manifest.items, report.failures) == (30, 0)
    assert {side: record.rows for side, record in manifest.sides.items()} == {
        "image": 30,
        "text": 60,
    }
    assert manifest.sides["text"].max_rows_per_item == 2
    assert manifest.model == model.name
    assert manifest.gallery_space == model.gallery_space
    assert manifest.corpus.root == str(pictures.resolve())
    assert manifest.gate["image_self_retrieval_rows"] == 30
    for side in ("image", "text"):
        found = search(store, model, "red", side, 3)
        assert sorted(found) == ["red0.png", "red1.png", "red2.png"]
    assert json.loads((report.path / "manifest.json").read_text())["index"] == "default"


def test_every_direction_is_measured_at_its_target(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    widths = build(pictures, model, store).manifest.widths
    assert {(w.searched, w.query, w.plan, w.k) for w in widths} == {
        (searched, query, plan, k)
        for searched in ("image", "text")
        for query in ("image", "text")
        for plan in ("cascade", "funnel")
        for k in (1, 10, 100)
    }
    assert all(w.recall_chosen_on >= 0.99 - 1e-4 for w in widths)
    assert all(w.recall_lower is not None and w.recall_lower <= w.recall_held_out for w in widths)


@pytest.mark.parametrize("materialise", [False, True])
@pytest.mark.parametrize("gallery", ["nested", "per_exit"])
def test_both_kinds_of_gallery_hold_the_files_they_say(
    pictures: Path, tmp_path: Path, store: SnapshotStore, gallery: Any, materialise: bool
) -> None:
    model = Model.load(make_tiny_artifact(tmp_path / "artifact", gallery=gallery))
    settings = BuildSettings(batch_size=8, materialise=materialise, quiet=True)
    report = build(pictures, model, store, settings)
    every = materialise or gallery == "per_exit"
    assert report.manifest.sides["image"].faiss_levels == ((1, 2, 3) if every else (1,))
    names = set(report.manifest.files)
    assert ("image/rows.npy" in names) == (gallery == "nested")
    assert ("image/level2.npy" in names) == (gallery == "per_exit")
    assert ("text/level3.faiss" in names) == every
    assert sorted(search(store, model, "blue", "image", 3)) == [f"blue{i}.png" for i in range(3)]
    store.verify("default")


def test_a_limit_that_can_t_be_kept_is_told(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    def over(limit: int) -> list[str]:
        settings = BuildSettings(quiet=True, wishes=Wishes(max_memory_bytes=limit))
        report = build(pictures, model, store, settings)
        return [note for note in report.notes if "--max-memory" in note]

    words = "the scan family over flat codes is over --max-memory"
    told = [f"image: {words}", f"text: {words}"]
    assert over(1) == told
    options = store.manifest("default").options
    both = sum(option.memory_bytes for side in options.values() for option in side if option.chosen)
    assert over(both) == []
    assert over(both - 2) == told  # either side alone is far under it


def test_broken_pictures_are_skipped_counted_and_listed(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    (pictures / "broken.png").write_bytes((pictures / "red0.png").read_bytes()[:40])
    (pictures / "empty.png").write_bytes(b"")
    (pictures / "text.png").write_text("not a picture")
    settings = BuildSettings(batch_size=4, max_failures=0.1, quiet=True)
    report = build(pictures, model, store, settings)
    assert (report.manifest.items, report.failures) == (30, 3)
    listed = [json.loads(line) for line in report.failures_file.read_text().splitlines()]
    assert [entry["id"] for entry in listed] == ["broken.png", "empty.png", "text.png"]
    assert all(entry["reason"] for entry in listed)


def test_too_many_failures_fail_the_job_and_keep_the_old_version(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    version = build(pictures, model, store).manifest.version
    for i in range(3):
        (pictures / f"broken{i}.png").write_bytes(b"x")
    with pytest.raises(BuildError, match=r"3 of 33 items failed.*failures\.jsonl"):
        build(pictures, model, store)
    assert store.versions("default") == [version]
    assert store.current("default") == version


def test_bad_captions_are_left_out_and_their_item_stays(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    (pictures / "red0.txt").write_text("a red square\nnul\x00byte\n", encoding="utf-8")
    report = build(pictures, model, store)
    assert report.manifest.items == 30
    assert report.manifest.sides["text"].rows + report.failures == 60


class Picky(FakeEncoder[str]):
    """A tokenizer that leaves nothing of some texts."""

    def prepare(self, items: Sequence[str]) -> EncoderBatch:
        if any("nothing" in text for text in items):
            raise TextError("empty_text", "nothing is left of the text", param="texts[0]")
        return super().prepare(items)


def test_captions_that_the_tokenizer_refuses_cost_only_themselves(
    pictures: Path, tmp_path: Path, store: SnapshotStore
) -> None:
    (pictures / "red0.txt").write_text("a red square\nnothing\n")
    report = build(pictures, replace(fake_model(tmp_path), text=Picky("text")), store)
    assert report.manifest.items == 30
    assert (report.manifest.sides["text"].rows, report.failures) == (59, 1)


@pytest.mark.parametrize("caption", ["red " * 3_000, "\u0958" * 9_000], ids=["long", "doubled"])
def test_a_text_longer_than_the_tokenizer_takes_is_left_out(
    pictures: Path, model: Model, store: SnapshotStore, caption: str
) -> None:
    (pictures / "red0.txt").write_text(f"a red square\n{caption}\n", encoding="utf-8")
    report = build(pictures, model, store)
    assert (report.manifest.sides["text"].rows, report.failures) == (59, 1)
    assert "the limit is 10000" in report.failures_file.read_text()


def test_a_full_disk_fails_the_build_and_keeps_the_old_version(
    pictures: Path, model: Model, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = build(pictures, model, store).manifest.version

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hivlp.index.build.assemble.table_writer", full)
    with pytest.raises(BuildError, match=r"can't be written: .*No space left"):
        build(pictures, model, store)
    assert store.current("default") == version
    assert store.versions("default") == [version]
    assert not list((store.root / "default").glob(".building-*"))


def test_rows_are_not_written_through_a_mapping(
    pictures: Path, model: Model, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is full, such a write ends the process: no error, no message."""
    real = np.lib.format.open_memmap

    def mapped(*given: Any, **options: Any) -> Any:
        assert options.get("mode") == "r", options
        return real(*given, **options)

    monkeypatch.setattr(np.lib.format, "open_memmap", mapped)
    assert build(pictures, model, store).manifest.items == 30


def test_the_halves_that_widths_are_measured_on_share_no_query(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    table = tmp_path / "c.jsonl"
    rows = [{"id": f"{name}{i}", "text": f"a {name}"} for i in range(4) for name in COLOURS]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    widths = build(table, model, store).manifest.widths
    assert {record.queries for record in widths} == {len(COLOURS)}


class Interrupted(FolderCorpus):
    """Stops as a killed process would, after some items."""

    after = 0

    def __iter__(self) -> Iterator[Item | BadItem]:
        for number, found in enumerate(super().__iter__()):
            if number == self.after:
                raise KeyboardInterrupt
            yield found


def test_an_interrupted_build_goes_on_where_it_stopped(
    pictures: Path, model: Model, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.index.build.encode.WINDOW", 5)
    corpus = Interrupted(pictures)
    corpus.after = 20
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, model, store, "default", QUIET)
    assert store.versions("default") == []
    whole = 30 + 10 + 30  # pictures; "a red square" is one text for three items
    report = build(pictures, model, store)
    assert 0 < report.fresh < whole
    assert report.manifest.items == 30
    assert build(pictures, model, store).fresh == 0


def test_a_rebuild_encodes_only_what_is_new(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    build(pictures, model, store)
    (pictures / "zebra.png").write_bytes(png(solid((7, 77, 177))))
    report = build(pictures, model, store)
    assert report.fresh == 1
    assert report.manifest.items == 31


def test_the_same_corpus_gives_the_same_rows_whatever_the_batch(
    pictures: Path, model: Model, tmp_path: Path
) -> None:
    rows = []
    for size in (1, 7, 64):
        store = SnapshotStore(tmp_path / f"home{size}")
        report = build(pictures, model, store, BuildSettings(batch_size=size, quiet=True))
        rows.append(np.load(report.path / "image" / "rows.npy"))
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], atol=1e-5)


def test_pictures_without_captions_and_captions_without_pictures(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    folder = tmp_path / "only"
    folder.mkdir()
    for name in COLOURS:
        (folder / f"{name}.png").write_bytes(png(solid(name)))
    report = build(folder, model, store)
    assert set(report.manifest.sides) == {"image"}
    assert report.notes == ("no text queries to measure text to image with",)
    assert search(store, model, "red", "text", 5) == []
    assert search(store, model, "red", "image", 1) == ["red.png"]
    table = tmp_path / "texts.jsonl"
    table.write_text("".join(json.dumps({"id": n, "text": f"a {n}"}) + "\n" for n in COLOURS))
    report = build(table, model, store)
    assert set(report.manifest.sides) == {"text"}
    assert search(store, model, "red", "text", 1) == ["red"]


def test_one_item_alone_can_be_found(tmp_path: Path, model: Model, store: SnapshotStore) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "red.png").write_bytes(png(solid("red")))
    report = build(folder, model, store)
    assert report.manifest.widths == ()
    assert search(store, model, "blue", "image", 10) == ["red.png"]


def test_an_empty_corpus_is_refused(tmp_path: Path, model: Model, store: SnapshotStore) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BuildError, match="nothing that can be encoded"):
        build(tmp_path / "nothing", model, store)
    assert store.names() == []


def test_pictures_inside_parquet_are_built_and_measured(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    names = list(COLOURS)
    path = tmp_path / "c.parquet"
    pq.write_table(
        pa.table(
            {
                "id": names,
                "image": [png(solid(name)) for name in names],
                "caption": [f"a {name}" for name in names],
                "hue": list(range(len(names))),
            }
        ),
        path,
        row_group_size=3,
    )
    report = build(path, model, store)
    assert report.manifest.items == len(names)
    assert any(w.query == "image" for w in report.manifest.widths)
    searcher = LocalSearcher(store.open("default"))
    assert searcher.image_ref("blue") == f"c.parquet#row={names.index('blue')}"
    assert searcher.metadata(["blue"], None) == [{"hue": names.index("blue")}]


def test_vectors_that_are_not_finite_are_refused(
    pictures: Path, tmp_path: Path, store: SnapshotStore
) -> None:
    broken = fake_model(tmp_path, answers_nan=True)
    with pytest.raises(BuildError, match="NaN or Inf for rows"):
        build(pictures, broken, store)
    assert store.names() == []


def test_a_group_that_no_item_has_is_refused(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    settings = BuildSettings(quiet=True, metadata_group="concept")
    with pytest.raises(BuildError, match="'concept'"):
        build(pictures, model, store, settings)


def test_duplicate_ids_are_refused_by_name(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    table = tmp_path / "c.csv"
    table.write_text("id,text\nx,a red\nx,a blue\n")
    with pytest.raises(CorpusError, match="'x' is there twice"):
        build(table, model, store)


def test_a_bad_index_name_is_refused_before_anything_is_encoded(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    with pytest.raises(InputError, match="no index name"):
        build_index(open_corpus(pictures), model, store, "Bad/Name", QUIET)
    assert not store.home.exists()

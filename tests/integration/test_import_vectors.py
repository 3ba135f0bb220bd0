"""`hivlp import-vectors` from end to end: what is published, found, served, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.backends.exact import best_rows
from hivlp.index.build.vectors import source as source_module
from hivlp.index.build.vectors.importing import ImportReport, import_vectors
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.parquet import ParquetSource
from hivlp.index.build.vectors.queries import own_space
from hivlp.index.build.vectors.record import ImportSettings
from hivlp.index.build.wishes import Wishes
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import BuildError, CorpusError, SnapshotCorrupt
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.catalogue import id_hash
from hivlp.index.snapshot.manifest import write_manifest
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from hivlp.service.app import create_app
from hivlp.service.main import main
from hivlp.service.settings import Settings
from tests.property.test_rotation_properties import vectors_of
from tests.tiny_artifact import make_tiny_artifact, png, solid
from tests.unit.service.serving_app import serving

Capture = pytest.CaptureFixture[str]
ROWS, DIM = 1_200, 48
QUIET = ImportSettings(quiet=True, dims=(8, 16), sample=200)


def table_of(count: int) -> Any:
    numbers = range(count)
    return pa.table(
        {
            "id": [f"thing-{i}" for i in numbers],
            "colour": [("red", "green", "blue")[i % 3] for i in numbers],
            "price": pa.array([float(i) for i in numbers], pa.float32()),
            "name": [f"thing {i // 4}" for i in numbers],
        }
    )


def write(folder: Path, vectors: FloatArray, table: Any) -> NpySource:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "v.npy", vectors)
    pq.write_table(table, folder / "m.parquet")
    return NpySource(folder / "v.npy", folder / "m.parquet")


@pytest.fixture(scope="module")
def vectors() -> FloatArray:
    """Low-rank, and of many lengths."""
    lengths = np.random.default_rng(1).uniform(0.5, 9, (ROWS, 1)).astype(np.float32)
    return vectors_of("low-rank", ROWS, DIM, 0) * lengths


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, vectors: FloatArray
) -> tuple[Path, ImportReport]:
    """A home with an index `default` of the vectors."""
    root = tmp_path_factory.mktemp("imported")
    source = write(root / "given", vectors, table_of(ROWS))
    report = import_vectors(source, SnapshotStore(root / "home"), "default", QUIET)
    return root / "home", report


def found_by(searcher: LocalSearcher, finest: FloatArray, plan: Any, k: int = 10) -> list[Any]:
    modality = next(iter(searcher.snapshot.sides))
    outputs = {spec.level: nested_prefix(finest, spec.dim) for spec in searcher.info.levels}
    made_plan = searcher.plan(PlanRequest(modality, modality, k, plan))
    return run_plan(searcher, modality, made_plan, outputs)


def test_the_ranking_is_the_exhaustive_cosine_ranking_of_the_vectors_as_they_came(
    made: tuple[Path, ImportReport], vectors: FloatArray
) -> None:
    searcher = LocalSearcher(SnapshotStore(made[0]).open("default"))
    queries = vectors_of("low-rank", 20, DIM, 9)
    cosines = queries @ normalise(vectors).T
    finest = own_space(queries * 3, searcher.snapshot.rotation, "queries")
    for plan, least in (("exact", 1.0), ("funnel", 0.97), ("cascade", 0.97)):
        shares = []
        for scores, found in zip(cosines, found_by(searcher, finest, plan), strict=True):
            np.testing.assert_allclose(found.scores, scores[found.rows], atol=1e-5)
            shares.append(len(np.intersect1d(found.rows, np.argsort(-scores)[:10])) / 10)
        assert np.mean(shares) >= least, plan  # observed 1.0 for all three


def test_the_manifest_says_where_vectors_came_from_and_what_was_done(
    made: tuple[Path, ImportReport], vectors: FloatArray
) -> None:
    manifest = made[1].manifest
    imported = manifest.imported
    assert imported is not None
    assert (imported.source, imported.dim, imported.rotated) == ("npy", DIM, True)
    assert imported.fitted_on == ROWS
    assert list(imported.shares) == sorted(imported.shares)
    assert imported.shares[-1] == 1.0
    lengths = np.linalg.norm(vectors, axis=1)
    assert imported.lengths == pytest.approx((lengths.min(), lengths.max()), rel=1e-5)
    assert [(s.level, s.exit_layer, s.dim) for s in manifest.specs] == [
        (1, 1, 8), (2, 2, 16), (3, 3, DIM),
    ]  # fmt: skip
    assert "rotation.npy" in manifest.files
    assert {(r.query, r.searched, r.plan) for r in manifest.widths} == {
        ("image", "image", "cascade"),
        ("image", "image", "funnel"),
    }
    assert all(r.queries == 200 for r in manifest.widths)
    assert manifest.artifact == ""
    assert set(made[1].phases) >= {"fit rotation", "read, rotate, write", "publish"}


def test_the_files_can_be_read_as_they_are_documented(
    made: tuple[Path, ImportReport], vectors: FloatArray
) -> None:
    folder = made[1].path
    rotation = np.load(folder / "rotation.npy")
    rows = np.load(folder / "image/rows.npy")
    np.testing.assert_allclose(rows, normalise(vectors) @ rotation, atol=1e-5)
    norms = np.load(folder / "image/inverse_norms.npy")
    for level, dim in enumerate((8, 16)):
        np.testing.assert_allclose(
            norms[level], 1 / np.linalg.norm(rows[:, :dim], axis=1), rtol=1e-5
        )
    table = pa.ipc.open_file(folder / "items.arrow").read_all()
    assert table.column_names == ["id", "image", "colour", "name", "price"]
    assert table["price"].to_pylist()[:3] == [0.0, 1.0, 2.0]
    hashes, ordinals = np.load(folder / "item_hashes.npy"), np.load(folder / "item_ordinals.npy")
    ids = table["id"].to_pylist()
    assert [int(h) for h in hashes] == sorted(id_hash(one) for one in ids)
    assert all(id_hash(ids[o]) == int(h) for h, o in zip(hashes, ordinals, strict=True))


def test_imports_of_the_same_rows_share_a_space_and_others_do_not(
    tmp_path: Path, vectors: FloatArray
) -> None:
    few = vectors[:300]
    spaces = []
    for number, settings in enumerate(
        (
            QUIET,
            QUIET,
            replace(QUIET, model="clip"),
            replace(QUIET, dims=(8,)),
            replace(QUIET, rotate=False),
        )
    ):
        source = write(tmp_path / "given", few, table_of(300))
        store = SnapshotStore(tmp_path / "home")
        manifest = import_vectors(source, store, f"x{number}", settings).manifest
        spaces.append((manifest.gallery_space, manifest.query_encoder))
    assert spaces[0] == spaces[1]
    assert len(set(spaces)) == 4
    assert len({space for space, _ in spaces} & {encoder for _, encoder in spaces}) == 0


def test_vectors_that_nest_already_are_kept_as_they_are(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", vectors[:200], table_of(200))
    store = SnapshotStore(tmp_path / "home")
    report = import_vectors(source, store, "x", replace(QUIET, rotate=False))
    assert not (report.path / "rotation.npy").exists()
    rows = np.load(report.path / "image/rows.npy")
    np.testing.assert_allclose(rows, normalise(vectors[:200]), atol=1e-6)
    assert store.open("x").rotation is None


def test_bad_rows_are_listed_and_left_out_and_too_many_fail_the_import(
    tmp_path: Path, vectors: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PART_NUMBERS", 1)
    broken = vectors[:600].copy()
    broken[3], broken[300], broken[599, 2] = np.nan, 0, np.inf
    ids = [None if i == 7 else f"thing-{i}" for i in range(600)]
    source = write(tmp_path / "given", broken, table_of(600).set_column(0, "id", pa.array(ids)))
    store = SnapshotStore(tmp_path / "home")
    report = import_vectors(source, store, "x", QUIET)
    assert report.manifest.items == 596
    assert report.manifest.corpus.failures == report.failures == 4
    lines = [json.loads(line) for line in report.failures_file.read_text().splitlines()]
    assert [(line["place"], line["id"], line["reason"]) for line in lines] == [
        ("v.npy row 3", "thing-3", "a vector with NaN or Inf"),
        ("v.npy row 7", None, "no id"),
        ("v.npy row 300", "thing-300", "a vector of zeros"),
        ("v.npy row 599", "thing-599", "a vector with NaN or Inf"),
    ]
    snapshot = store.open("x")
    assert snapshot.catalogue.metadata(["thing-4"], ["price"]) == [{"price": 4.0}]
    row = LocalSearcher(snapshot).row_of("thing-598", "image")
    own = own_space(broken[598:599], snapshot.rotation, "")
    assert best_rows(snapshot.sides["image"].rows[3], own[0], 1).rows[0] == row
    with pytest.raises(BuildError, match=r"4 of 600 vectors failed, over the allowed share of 0"):
        import_vectors(source, store, "x", replace(QUIET, max_failures=0.0))
    assert store.versions("x") == [report.manifest.version]


def test_values_that_nothing_could_read_again_are_null_and_said(
    tmp_path: Path, vectors: FloatArray
) -> None:
    times = [10**18 if i == 5 else i * 10**6 for i in range(300)]
    names = [b"\xff" if i == 9 else b"x" for i in range(300)]
    table = table_of(300).append_column("at", pa.array(times, pa.timestamp("us")))
    table = table.append_column("title", pa.array(names).view(pa.string()))
    source = write(tmp_path / "given", vectors[:300], table)
    home = tmp_path / "home"
    report = import_vectors(source, SnapshotStore(home), "default", QUIET)
    assert report.failures == 0
    notes = "\n".join(report.notes)
    assert "column 'at': left out 1 of its values: times outside of the years 1 to 9999" in notes
    assert "column 'title': left out 1" in notes
    with serving(create_app(Settings(home=home))) as client:
        found = [client.get(f"/items/thing-{i}").json()["metadata"] for i in (5, 6, 9)]
        assert "at" not in found[0]
        assert found[1]["at"].startswith("1970-01-01T00:00:06")
        assert "title" not in found[2]


def test_an_id_that_is_there_twice_is_refused_with_both_places(
    tmp_path: Path, vectors: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PART_NUMBERS", 1)
    broken = vectors[:600].copy()
    broken[0] = 0  # places are those of the file, not of what was kept
    ids = [f"thing-{i if i != 590 else 12}" for i in range(600)]
    source = write(tmp_path / "given", broken, table_of(600).set_column(0, "id", pa.array(ids)))
    store = SnapshotStore(tmp_path / "home")
    words = r"v.npy row 590: id 'thing-12' is there twice: also v.npy row 12"
    with pytest.raises(CorpusError, match=words):
        import_vectors(source, store, "x", QUIET)
    assert store.versions("x") == []
    assert not list((tmp_path / "home/indexes/x").glob(".building-*"))


def test_hashes_that_collide_are_no_duplicates(
    tmp_path: Path, vectors: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.index.build.vectors.write.id_hashes", lambda ids: _few(len(ids)))
    source = write(tmp_path / "given", vectors[:100], table_of(100))
    report = import_vectors(source, SnapshotStore(tmp_path / "home"), "x", QUIET)
    assert report.manifest.items == 100
    twice = table_of(100).set_column(0, "id", pa.array([f"{i % 99}" for i in range(100)]))
    source = write(tmp_path / "twice", vectors[:100], twice)
    with pytest.raises(CorpusError, match=r"row 99: id '0' is there twice: also v.npy row 0"):
        import_vectors(source, SnapshotStore(tmp_path / "home"), "x", QUIET)


def _few(count: int) -> Any:
    return np.arange(count, dtype=np.uint64) % np.uint64(3)


def test_what_would_fail_at_the_end_fails_at_the_beginning(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", vectors[:100], table_of(100))
    store = SnapshotStore(tmp_path / "home")
    np.save(tmp_path / "few.npy", vectors[:19])
    np.save(tmp_path / "other.npy", vectors[:30, :5])
    np.save(tmp_path / "zero.npy", np.zeros((30, DIM), np.float32))
    for settings, words in (
        (replace(QUIET, queries=tmp_path / "few.npy"), "19 queries, at least 20 are needed"),
        (replace(QUIET, queries=tmp_path / "other.npy"), f"of 5 numbers; {DIM} are needed"),
        (replace(QUIET, queries=tmp_path / "none.npy"), "no such file|unreadable|not a readable"),
        (replace(QUIET, queries=tmp_path / "zero.npy"), "row 0 is a vector of zeros"),
        (replace(QUIET, pictures=tmp_path / "nowhere"), "no such folder"),
        (replace(QUIET, dims=(DIM + 1,)), f"from 1 to {DIM}"),
    ):
        with pytest.raises(BuildError, match=words):
            import_vectors(source, store, "x", settings)
    assert store.versions("x") == []


def test_real_queries_are_what_widths_are_measured_with(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", vectors[:400], table_of(400))
    np.save(tmp_path / "queries.npy", vectors_of("low-rank", 64, DIM, 9).astype(np.float16))
    settings = replace(QUIET, queries=tmp_path / "queries.npy")
    manifest = import_vectors(source, SnapshotStore(tmp_path / "home"), "x", settings).manifest
    assert {record.queries for record in manifest.widths} == {64}


def test_a_changed_rotation_is_a_corrupt_version(tmp_path: Path, vectors: FloatArray) -> None:
    source = write(tmp_path / "given", vectors[:100], table_of(100))
    store = SnapshotStore(tmp_path / "home")
    report = import_vectors(source, store, "x", QUIET)
    file = report.path / "rotation.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match=r"rotation\.npy: its sha256 differs"):
        store.verify("x")
    file.unlink()
    with pytest.raises(SnapshotCorrupt, match=r"rotation\.npy: missing"):
        store.open("x")


def test_pictures_are_named_and_served_without_having_been_opened(
    tmp_path: Path, vectors: FloatArray
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(png(solid("red")))
    names = [f"{i}.png" for i in range(60)]
    names[2] = "../outside.png"
    table = table_of(60).append_column("image", pa.array(names))
    source = write(tmp_path / "given", vectors[:60], table)
    settings = replace(QUIET, pictures=tmp_path / "pictures")
    report = import_vectors(source, SnapshotStore(tmp_path / "home"), "default", settings)
    assert any("1 pictures' paths lead out of" in note for note in report.notes)
    with serving(create_app(Settings(home=tmp_path / "home"))) as client:
        assert client.get("/items/thing-1/image").headers["content-type"] == "image/png"
        assert client.get("/items/thing-1").json()["image"] is not None
        assert client.get("/items/thing-2/image").status_code == 404


def test_a_picture_inside_an_imported_table_is_found_there(
    tmp_path: Path, vectors: FloatArray
) -> None:
    table = pa.table(
        {
            "id": [f"thing-{i}" for i in range(60)],
            "image": [{"bytes": png(solid("red")), "path": None}] * 60,
            "embedding": pa.array(list(vectors[:60])),
        }
    )
    pq.write_table(table, tmp_path / "v.parquet")
    source = ParquetSource(tmp_path / "v.parquet")
    import_vectors(source, SnapshotStore(tmp_path / "home"), "default", QUIET)
    with serving(create_app(Settings(home=tmp_path / "home"))) as client:
        assert client.get("/items/thing-59/image").headers["content-type"] == "image/png"


@pytest.mark.parametrize("metric", ["dot", "euclid"])
def test_lengths_that_count_elsewhere_are_refused_unless_cosine_is_wanted(
    tmp_path: Path, vectors: FloatArray, metric: Any
) -> None:
    source = write(tmp_path / "given", vectors[:200], table_of(200))
    store = SnapshotStore(tmp_path / "home")
    minded = replace(QUIET, metric=metric)
    with pytest.raises(BuildError, match=r"lengths differ, from 0\.5\d* to .*--as-cosine"):
        import_vectors(source, store, "x", minded)
    report = import_vectors(source, store, "x", replace(minded, as_cosine=True))
    assert report.manifest.imported is not None
    assert report.manifest.imported.metric == metric
    one_length = write(tmp_path / "same", 5 * normalise(vectors[:200]), table_of(200))
    assert import_vectors(one_length, store, "x", minded).manifest.items == 200


def test_a_ranking_that_cosine_never_gives_is_refused_whatever_the_lengths(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", normalise(vectors[:200]), table_of(200))
    store = SnapshotStore(tmp_path / "home")
    minded = replace(QUIET, metric="manhattan")
    with pytest.raises(BuildError, match=r"absolute differences.*--as-cosine"):
        import_vectors(source, store, "x", minded)
    assert import_vectors(source, store, "x", replace(minded, as_cosine=True)).failures == 0


def test_both_families_and_half_precision_find_what_the_vectors_say(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", vectors, table_of(ROWS))
    queries = vectors_of("low-rank", 20, DIM, 9)
    best = np.argsort(-(queries @ normalise(vectors).T), axis=1)[:, :10]
    for family, level1 in (("scan", "rabitqfs"), ("graph", "sq8")):
        wishes = Wishes(family=family, level1=level1)  # type: ignore[arg-type]
        settings = replace(QUIET, rows_type="fp16", wishes=wishes)
        store = SnapshotStore(tmp_path / family)
        manifest = import_vectors(source, store, "x", settings).manifest
        side = manifest.sides["image"]
        assert (side.family, side.level1, side.rows_type) == (family, level1, "fp16")
        searcher = LocalSearcher(store.open("x"))
        finest = own_space(queries, searcher.snapshot.rotation, "")
        found = found_by(searcher, finest, "funnel")
        pairs = zip(found, best, strict=True)
        share = np.mean([len(np.intersect1d(f.rows, wanted)) / 10 for f, wanted in pairs])
        assert share >= 0.95, family  # observed 1.0 and .995


def test_texts_and_vectors_of_one_parquet_file_become_the_text_side(
    tmp_path: Path, vectors: FloatArray
) -> None:
    table = table_of(300).append_column("embedding", pa.array(list(vectors[:300])))
    captions = [None if i == 5 else f"caption {i}" for i in range(300)]
    table = table.append_column("caption", pa.array(captions))
    pq.write_table(table, tmp_path / "v.parquet", row_group_size=128)
    store = SnapshotStore(tmp_path / "home")
    source = ParquetSource(tmp_path / "v.parquet")
    report = import_vectors(source, store, "x", replace(QUIET, modality="text"))
    assert set(report.manifest.sides) == {"text"}
    assert report.manifest.imported is not None
    assert report.manifest.imported.source == "parquet"
    searcher = LocalSearcher(store.open("x"))
    finest = own_space(vectors[[4, 5]], searcher.snapshot.rotation, "")
    hits = [searcher.items("text", found, 1, 0)[0] for found in found_by(searcher, finest, "exact")]
    assert [(hit.id, hit.text) for hit in hits] == [("thing-4", "caption 4"), ("thing-5", "")]
    assert "caption" not in searcher.snapshot.catalogue.metadata_names


@pytest.fixture(scope="module")
def client(made: tuple[Path, ImportReport]) -> Iterator[httpx.Client]:
    with serving(create_app(Settings(home=made[0]))) as client:
        yield client


def test_an_index_without_a_model_is_served(client: httpx.Client) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.get("/health").json()["status"] == "ready"
    assert client.get("/").status_code == 200
    info = client.get("/info").json()
    assert info["models"] == []
    (index,) = info["indexes"]
    assert index["queries"] == []
    assert index["levels"][-1] == {"level": 3, "dim": DIM}
    assert client.get("/indexes").status_code == 200
    assert client.get("/items/thing-3").json()["metadata"]["name"] == "thing 0"
    assert client.get("/items/thing-3/image").status_code == 404


def test_vectors_are_asked_as_they_were_imported(client: httpx.Client, vectors: FloatArray) -> None:
    cosines = normalise(vectors[77:78]) @ normalise(vectors).T
    for plan in ("auto", "cascade", "exact"):
        body = {"vector": vectors[77].tolist(), "k": 5, "plan": plan}
        answer = client.post("/search/vector", json=body).json()
        best = np.argsort(-cosines[0])[:5]
        assert [hit["id"] for hit in answer["hits"]] == [f"thing-{i}" for i in best]
        scores = [hit["score"] for hit in answer["hits"]]
        np.testing.assert_allclose(scores, cosines[0][best], atol=1e-5)
        assert answer["model"] == "vectors"
    filtered = {**body, "filter": {"field": "colour", "eq": "red"}}
    hits = client.post("/search/vector", json=filtered).json()["hits"]
    assert {hit["metadata"]["colour"] for hit in hits} == {"red"}
    wrong = client.post("/search/vector", json={"vector": [1.0] * (DIM - 1)})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "invalid_vector")


def test_similar_items_are_found_and_words_are_refused_with_what_can_be_asked(
    client: httpx.Client, vectors: FloatArray
) -> None:
    cosines = normalise(vectors[8:9]) @ normalise(vectors).T
    best = [i for i in np.argsort(-cosines[0])[:6] if i != 8][:5]
    hits = client.post("/search/similar", json={"id": "thing-8", "k": 5}).json()["hits"]
    assert [hit["id"] for hit in hits] == [f"thing-{i}" for i in best]
    for path, given in (
        ("/search/text", {"json": {"query": "red"}}),
        ("/search/image", {"files": {"image": png(solid("red"))}}),
        ("/embed/text", {"json": {"text": "red"}}),
    ):
        answer = client.post(path, **given)  # type: ignore[arg-type]
        assert answer.status_code == 422, path
        error = answer.json()["error"]
        assert error["code"] == "no_encoder"
        assert "ask by vector or by item" in error["message"]


def test_items_are_put_and_deleted_by_vectors_as_they_were_imported(
    tmp_path: Path, vectors: FloatArray
) -> None:
    source = write(tmp_path / "given", vectors[:200], table_of(200))
    import_vectors(source, SnapshotStore(tmp_path / "home"), "default", QUIET)
    late = vectors[900].tolist()
    with serving(create_app(Settings(home=tmp_path / "home"))) as client:
        body = {"vector": late, "metadata": {"colour": "red"}}
        assert client.put("/items/late", json=body).status_code in (200, 201)
        hits = client.post("/search/vector", json={"vector": late, "k": 3}).json()["hits"]
        cosines = normalise(vectors[900:901]) @ normalise(vectors[:200]).T
        best = np.argsort(-cosines[0])[:2]
        assert [hit["id"] for hit in hits] == ["late", *(f"thing-{i}" for i in best)]
        np.testing.assert_allclose(
            [hit["score"] for hit in hits], [1, *cosines[0][best]], atol=1e-5
        )
        assert client.delete("/items/late").status_code == 200
        hits = client.post("/search/vector", json={"vector": late, "k": 3}).json()["hits"]
        assert [hit["id"] for hit in hits][:2] == [f"thing-{i}" for i in best]
        words = client.put("/items/words", json={"texts": ["a red thing"]})
        assert (words.status_code, words.json()["error"]["code"]) == (422, "no_encoder")


def test_an_artifact_that_aims_at_the_space_answers_words(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path / "home" / "artifacts" / "tiny")
    space = json.loads((folder / "manifest.json").read_text())["gallery_space"]
    dims = [
        stage["dim"]
        for stage in json.loads((folder / "manifest.json").read_text())["towers"][0]["stages"]
    ]
    vectors = vectors_of("random", 60, dims[-1], 0)
    store = SnapshotStore(tmp_path / "home")
    settings = replace(QUIET, dims=tuple(dims[:-1]))
    import_vectors(write(tmp_path / "given", vectors, table_of(60)), store, "default", settings)
    with serving(create_app(Settings(home=tmp_path / "home"))) as client:  # aims elsewhere
        assert client.post("/search/text", json={"query": "red"}).status_code == 422
    _aim_at(store, space)
    with serving(create_app(Settings(home=tmp_path / "home"))) as client:
        answer = client.post("/search/text", json={"query": "red", "k": 3})
        assert answer.status_code == 200
        assert len(answer.json()["hits"]) == 3
        assert client.post("/search/vector", json={"vector": [1.0] * dims[-1]}).status_code == 200


def _aim_at(store: SnapshotStore, space: str) -> None:
    """Publish the index again as one of the space that a model aims at."""
    old = store.manifest("default")
    with store.stage("default") as staging:
        shutil.copytree(store.path("default", old.version), staging.path, dirs_exist_ok=True)
        update = {"version": staging.version, "gallery_space": space}
        write_manifest(staging.path, old.model_copy(update=update))
        store.publish(staging)


@pytest.fixture
def home(
    tmp_path: Path, vectors: FloatArray, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Path:
    """A home whose index `default` was imported by the command."""
    monkeypatch.setenv("HIVLP_HOME", str(tmp_path / "home"))
    write(tmp_path / "given", vectors, table_of(ROWS))
    given = ["--vectors", str(tmp_path / "given/v.npy"), "--metadata", str(tmp_path / "given")]
    assert main(["import-vectors", *given, "--dims", "8,16", "--explain"]) == 0
    out = capsys.readouterr().out
    assert f"{ROWS} image vectors of {DIM} numbers, scan over flat codes" in out
    assert "squared length in the rotation's first numbers: 8: " in out
    assert "must: mask" in out
    return tmp_path / "home"


def test_the_command_searches_verifies_and_calibrates_with_vectors(
    home: Path, tmp_path: Path, vectors: FloatArray, capsys: Capture
) -> None:
    np.save(tmp_path / "one.npy", vectors[77])
    assert main(["search", "--vector", str(tmp_path / "one.npy"), "--k", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:3] == ["1", "1.000", "thing-77"]
    assert "(funnel: scan level 1" in out[-1]
    assert main(["snapshots", "verify", "--recall"]) == 0
    assert "image to image, funnel: ANN recall@10" in capsys.readouterr().out
    np.save(tmp_path / "queries.npy", vectors_of("low-rank", 100, DIM, 9))
    before = SnapshotStore(home).manifest("default")
    assert main(["calibrate", "--queries", str(tmp_path / "queries.npy")]) == 0
    after = SnapshotStore(home).manifest("default")
    assert {record.queries for record in after.widths} == {100}
    assert after.calibrated_from == before.version
    assert (after.artifact, after.query_encoder) == ("", before.query_encoder)
    assert main(["calibrate", "--sample", "300"]) == 0
    again = SnapshotStore(home).manifest("default")
    assert {record.queries for record in again.widths} == {300}
    assert again.exits == (), "vectors encode nothing that could stop early"


def test_exported_files_find_with_faiss_and_the_rotation_alone(
    home: Path, tmp_path: Path, vectors: FloatArray
) -> None:
    assert main(["snapshots", "export", "--to", str(tmp_path / "out")]) == 0
    index = faiss.read_index(str(tmp_path / "out/image-level3.faiss"))
    turned = normalise(vectors[40:41]) @ np.load(tmp_path / "out/rotation.npy")
    scores, rows = index.search(turned, 1)
    ids = json.loads((tmp_path / "out/image-ids.json").read_text())
    assert ids[int(rows[0, 0])] == "thing-40"
    assert scores[0, 0] == pytest.approx(1, abs=1e-5)


def test_the_command_says_what_to_do_where_a_model_would_be_needed(
    home: Path, tmp_path: Path, vectors: FloatArray, capsys: Capture
) -> None:
    assert main(["evaluate"]) == 1
    assert "--group" in capsys.readouterr().err
    assert main(["evaluate", "--group", "name", "--sample", "100"]) == 0
    assert "image" in capsys.readouterr().out
    assert main(["search", "red"]) == 1
    assert "--vector" in capsys.readouterr().err
    (tmp_path / "words.txt").write_text("word\n" * 30)
    assert main(["calibrate", "--queries", str(tmp_path / "words.txt")]) == 1
    assert "text tower" in capsys.readouterr().err
    np.save(tmp_path / "short.npy", vectors[:30, :4])
    assert main(["calibrate", "--queries", str(tmp_path / "short.npy")]) == 1
    assert f"vectors of 4 numbers; {DIM} are needed" in capsys.readouterr().err
    np.save(tmp_path / "two.npy", vectors[:2])
    assert main(["search", "--vector", str(tmp_path / "two.npy")]) == 1
    assert f"one vector of {DIM} numbers is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vectors", "v.npy", "--collection", "c"], "--collection belongs to --qdrant"),
        (["--parquet", "v.parquet", "--metadata", "m"], "--metadata belongs to --vectors"),
        (["--qdrant", "http://localhost:1"], "--qdrant needs --collection"),
        ([], "one of the arguments"),
        (["--vectors", "v", "--parquet", "p"], "not allowed with"),
        (["--vectors", "v", "--dims", "a,b"], "not a whole number"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(
    arguments: list[str], words: str, capsys: Capture
) -> None:
    assert main(["import-vectors", *arguments]) == 2
    assert words in capsys.readouterr().err

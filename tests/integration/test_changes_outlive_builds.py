"""Builds take changes in, whatever happens meanwhile; erased items are in no file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.build import build as building
from hivlp.index.build import calibrate as calibrating
from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.calibrate import CalibrationSettings
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model
from hivlp.index.build.upsert_corpus import upsert_corpus
from hivlp.index.cascade import PlanRequest
from hivlp.index.cli_items import items
from hivlp.index.errors import BuildError
from hivlp.index.filters import parse_filter
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete, Upsert
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import unit_vectors
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png

QUIET = BuildSettings(quiet=True, sample=20)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home", make_corpus(tmp_path / "corpus"))


def model_of(home: Path, name: str = "tiny") -> Model:
    return Model.load(home / "artifacts" / name)


def put(home: Path, folder: Path, rows: list[dict[str, Any]]) -> None:
    """By the command's own function; every row has a picture of its own."""
    folder.mkdir(exist_ok=True)
    for i, row in enumerate(rows):
        if "image" not in row:
            row["image"] = f"{i}.png"
            (folder / f"{i}.png").write_bytes(colour_png(list(COLOURS)[i % len(COLOURS)]))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    upsert_corpus(open_corpus(file), model_of(home), SnapshotStore(home), "default", quiet=True)


def contents(store: SnapshotStore) -> dict[str, dict[str, Any]]:
    """Every item that can be found, with its metadata, by walking all rows of both sides."""
    searcher = open_searcher(store.open("default"))
    found: set[str] = set()
    for side in searcher.info.rows:
        level = searcher.info.levels[-1]
        query = np.zeros((1, level.dim), np.float32)
        query[0, 0] = 1
        plan = searcher.plan(PlanRequest(side, side, 10_000, "exact"))
        (candidates,) = searcher.step(side, plan.stages[0], query, None)
        found |= {item.id for item in searcher.items(side, candidates, 10_000, 0)}
    names = sorted(found)
    return dict(zip(names, searcher.metadata(names, None), strict=True))


def test_a_build_takes_in_what_was_put_and_leaves_out_what_was_deleted(
    home: Path, tmp_path: Path
) -> None:
    store = SnapshotStore(home)
    put(home, tmp_path / "new", [
        {"id": "new/1", "caption": "a lighthouse", "name": "new one", "stock": 4},
        {"id": "red/24", "caption": "not red at all", "name": "replaced"},
    ])  # fmt: skip
    amend(store, "default", [Delete("blue/300")])
    before = contents(store)
    assert "blue/300" not in before
    assert before["red/24"]["name"] == "replaced"
    report = build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", QUIET)
    assert report.fresh == 0
    assert contents(store) == before
    manifest = report.manifest
    assert manifest.changes is not None
    assert (manifest.changes.pending, manifest.changes.since) == ((), manifest.version)
    assert manifest.items == len(before)
    snapshot = store.open("default")
    assert snapshot.delta is None
    picture = open_searcher(snapshot).image_ref("new/1")
    assert picture is not None
    assert picture.startswith("upload:")
    again = build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", QUIET)
    assert contents(store) == before
    assert again.manifest.changes is not None
    assert len(again.manifest.changes.segments) == 1
    forgetful = replace(QUIET, forget_changes=True)
    build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", forgetful)
    assert set(contents(store)) == (set(before) | {"blue/300"}) - {"new/1"}
    assert store.manifest("default").changes is None


@pytest.fixture
def other(home: Path) -> str:
    make_tiny_artifact(home / "artifacts" / "other", seed=7)
    return "other"


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_changes_made_while_a_build_runs_are_carried_over(
    home: Path, tmp_path: Path, other: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(home)
    put(home, tmp_path / "a", [{"id": "early", "caption": "early bird", "name": "e"}])
    measure = building.measure

    def meanwhile(*given: Any, **named: Any) -> Any:
        put(home, tmp_path / "b", [
            {"id": "late", "caption": "late riser", "name": "l", "stock": 2},
            {"id": "early", "caption": "an early bird again", "name": "e2"},
        ])  # fmt: skip
        amend(store, "default", [Delete("red/300")])
        return measure(*given, **named)

    monkeypatch.setattr(building, "measure", meanwhile)
    report = build_index(
        open_corpus(tmp_path / "corpus"), model_of(home, name), store, "default", QUIET
    )
    found = contents(store)
    assert found["late"] == {"name": "l", "stock": 2}
    assert found["early"] == {"name": "e2"}
    assert "red/300" not in found
    assert report.manifest.changes is not None
    assert len(report.manifest.changes.pending) == 1
    snapshot = store.open("default")
    searcher = open_searcher(snapshot)
    mask = searcher.mask("text", parse_filter({"field": "stock", "eq": 2}))
    assert mask.count == 1
    model = model_of(home, name)
    assert model.text is not None
    (*_, exact) = model.text.encode(model.text.prepare(["late riser"]))
    row = searcher.row_of("late", "text")
    stored = searcher.vector("text", row, len(searcher.info.levels))
    np.testing.assert_allclose(stored, exact.vectors, atol=1e-5)
    monkeypatch.undo()
    build_index(open_corpus(tmp_path / "corpus"), model, store, "default", QUIET)
    assert contents(store) == found
    assert store.open("default").delta is None


def test_dates_and_csv_numbers_keep_their_type_through_a_build(tmp_path: Path) -> None:
    home, corpus = tmp_path / "home", tmp_path / "rows.csv"
    make_tiny_artifact(home / "artifacts" / "tiny")
    corpus.write_text("id,caption,price\na,red,5\nb,blue,7\n")
    store = SnapshotStore(home)
    build_index(open_corpus(corpus), model_of(home), store, "default", QUIET)
    more = tmp_path / "more.csv"
    more.write_text("id,caption,price\nc,green,9\n")
    assert items(["upsert", str(more), "--home", str(home)]) == 0
    build_index(open_corpus(corpus), model_of(home), store, "default", QUIET)
    assert contents(store) == {"a": {"price": 5}, "b": {"price": 7}, "c": {"price": 9}}


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something while the next build measures, once."""
    measure = building.measure

    def measured(*given: Any, **named: Any) -> Any:
        monkeypatch.undo()
        act()
        return measure(*given, **named)

    monkeypatch.setattr(building, "measure", measured)


def rebuild(home: Path, corpus: Path, name: str = "tiny") -> None:
    build_index(open_corpus(corpus), model_of(home, name), SnapshotStore(home), "default", QUIET)


def test_what_is_put_after_going_back_during_a_build_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(home)
    put(home, tmp_path / "a", [{"id": f"early/{i}", "caption": f"early {i}"} for i in range(3)])

    def go_back() -> None:
        store.rollback("default")
        put(home, tmp_path / "b", [{"id": "late", "caption": "late riser"}])

    meanwhile(monkeypatch, go_back)
    rebuild(home, tmp_path / "corpus")
    assert "late" in contents(store)
    rebuild(home, tmp_path / "corpus")
    assert "late" in contents(store)


def test_two_builds_at_once_lose_no_change(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(home)
    put(home, tmp_path / "a", [{"id": "first", "caption": "first thing"}])

    def another() -> None:
        put(home, tmp_path / "b", [{"id": "second", "caption": "second thing"}])

        def third() -> None:
            put(home, tmp_path / "c", [{"id": "third", "caption": "third thing"}])

        meanwhile(monkeypatch, third)
        rebuild(home, tmp_path / "corpus")
        put(home, tmp_path / "d", [{"id": "fourth", "caption": "fourth thing"}])

    meanwhile(monkeypatch, another)
    rebuild(home, tmp_path / "corpus")
    assert {"first", "second", "third", "fourth"} <= contents(store).keys()
    rebuild(home, tmp_path / "corpus")
    assert {"first", "second", "third", "fourth"} <= contents(store).keys()


def own(model: Model, item_id: str, seed: int, side: str = "text") -> Upsert:
    """An item with a given vector."""
    vector = unit_vectors(1, model.levels[-1].dim, seed)
    if side == "text":
        return Upsert(item_id, None, ("",), {}, None, vector, own=model.gallery_space)
    return Upsert(item_id, None, (), {}, vector[0], own=model.gallery_space)


def test_given_vectors_stay_through_builds_beside_encoded_texts(home: Path, tmp_path: Path) -> None:
    store, model = SnapshotStore(home), model_of(home)
    put(home, tmp_path / "a", [{"id": "mixed", "captions": ["one text", "two texts"]}])
    changes = [own(model, "own/text", 1), own(model, "own/image", 2, "image")]
    amend(store, "default", changes, model.gallery_space)
    before = contents(store)
    for _ in range(3):
        rebuild(home, tmp_path / "corpus")
        assert contents(store) == before
        searcher = open_searcher(store.open("default"))
        row = searcher.row_of("own/image", "image")
        np.testing.assert_allclose(
            searcher.vector("image", row, 3)[0], changes[1].image_vector, atol=1e-6
        )


def test_a_given_vector_is_never_served_in_another_models_space(
    home: Path, tmp_path: Path, other: str
) -> None:
    store, model = SnapshotStore(home), model_of(home)
    amend(store, "default", [own(model, "own/image", 2, "image")], model.gallery_space)
    for _ in range(2):
        rebuild(home, tmp_path / "corpus", other)
        assert "own/image" not in contents(store)
    rebuild(home, tmp_path / "corpus")
    assert "own/image" in contents(store)


def test_a_calibration_takes_along_what_changed_while_it_ran(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(home)
    measure = calibrating.measure

    def act(*given: Any, **named: Any) -> Any:
        put(home, tmp_path / "a", [{"id": "during", "caption": "put meanwhile"}])
        amend(store, "default", [Delete("red/24")])
        return measure(*given, **named)

    monkeypatch.setattr(calibrating, "measure", act)
    calibrating.calibrate(store, "default", None, model_of(home), CalibrationSettings(quiet=True))
    found = contents(store)
    assert "during" in found
    assert "red/24" not in found
    assert store.manifest("default").calibrated_from is not None


def test_a_calibration_is_refused_where_other_levels_became_active(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(home)
    measure = calibrating.measure

    def act(*given: Any, **named: Any) -> Any:
        (tmp_path / "corpus" / "squares" / "new.png").write_bytes(colour_png("red"))
        rebuild(home, tmp_path / "corpus")
        return measure(*given, **named)

    monkeypatch.setattr(calibrating, "measure", act)
    before = store.versions("default")
    with pytest.raises(BuildError, match="calibrate again"):
        calibrating.calibrate(
            store, "default", None, model_of(home), CalibrationSettings(quiet=True)
        )
    assert len(store.versions("default")) == len(before) + 1
    assert store.manifest("default").calibrated_from is None


def all_bytes(home: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(home.rglob("*")):
        if path.is_file() and "artifacts" not in path.parts:
            yield path, path.read_bytes()


def traces(home: Path, needles: list[bytes]) -> list[str]:
    return [
        f"{path.relative_to(home)}: {needle[:24]!r}"
        for path, data in all_bytes(home)
        for needle in needles
        if needle in data
    ]


SECRET = "quixotic velvet umbrella"


@pytest.mark.parametrize("where", ["built", "pending", "both"])
def test_what_is_erased_is_in_no_file(home: Path, tmp_path: Path, where: str) -> None:
    store = SnapshotStore(home)
    pixels = np.random.default_rng(5).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    picture = png(pixels)
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "s.png").write_bytes(picture)
    row = {"id": "secret/1", "caption": SECRET, "name": "hush hush", "image": "s.png"}
    put(home, folder, [row])
    if where != "pending":
        build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", QUIET)
    if where == "both":
        put(home, folder, [{**row, "name": "hush again"}])
    snapshot = store.open("default")
    searcher = open_searcher(snapshot)
    needles = [SECRET.encode(), b"hush", b"secret/1", picture]
    for side in ("image", "text"):
        vector = searcher.vector(side, searcher.row_of("secret/1", side), 3)[0]  # type: ignore[arg-type]
        needles.append(vector.astype("<f4").tobytes())
    assert traces(home, needles), "nothing would be proven"
    before = {i: m for i, m in contents(store).items() if i != "secret/1"}
    snapshot.close()
    report = erase(store, "default", ["secret/1", "never"], wait_s=0, quiet=True)
    assert (report.erased, report.unknown, report.left) == (("secret/1",), ("never",), ())
    assert report.cached >= 2
    assert report.pictures == 1
    assert traces(home, needles) == []
    store.verify("default")
    assert contents(store) == before
    assert len(store.versions("default")) >= 1
    build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", QUIET)
    assert contents(store) == before


def test_an_erased_item_of_the_corpus_stays_out_until_it_is_put_again(
    home: Path, tmp_path: Path
) -> None:
    store = SnapshotStore(home)
    assert items(["delete", "--erase", "red/24", "--home", str(home), "--wait", "0"]) == 0
    assert "red/24" not in contents(store)
    corpus = open_corpus(tmp_path / "corpus")
    build_index(corpus, model_of(home), store, "default", QUIET)
    assert "red/24" not in contents(store)
    put(home, tmp_path / "again", [{"id": "red/24", "caption": "red again"}])
    build_index(open_corpus(tmp_path / "corpus"), model_of(home), store, "default", QUIET)
    assert "red/24" in contents(store)


def test_versions_in_use_are_named_and_go_when_they_are_free(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SnapshotStore(home)
    reader: Snapshot = store.open("default")
    arguments = ["delete", "--erase", "red/24", "--home", str(home), "--wait", "0.1"]
    assert items(arguments) == 1
    assert reader.manifest.version in capsys.readouterr().err
    assert reader.catalogue.holds("red/24")
    timer = threading.Timer(0.3, reader.close)
    timer.start()
    arguments[-1] = "30"
    assert items(arguments) == 0
    timer.join()
    assert reader.manifest.version not in store.versions("default")

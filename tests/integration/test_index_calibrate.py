"""Measured again without building: new widths over the same files, promises that are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.calibrate import (
    CalibrationSettings,
    NotMeasured,
    RecallNow,
    calibrate,
    check_recall,
    read_queries,
)
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.build.tables import recall_table
from hivlp.index.build.wishes import Wishes
from hivlp.index.errors import BuildError
from hivlp.index.snapshot.manifest import SnapshotManifest, write_manifest
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import fake_model
from tests.tiny_artifact import COLOURS, png, solid

QUIET = CalibrationSettings(quiet=True, sample=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return fake_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures in ten colours, each with a caption of its own words."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        for shade in range(6):
            pixels = np.clip(np.array(colour) - 9 * shade, 0, 255).astype(np.uint8)
            (folder / f"{name}{shade}.png").write_bytes(png(solid(tuple(pixels.tolist()))))
            (folder / f"{name}{shade}.txt").write_text(f"{name} shade{shade} thing{name}{shade}\n")
    return folder


@pytest.fixture(params=["scan", "graph"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, pictures: Path, model: Model
) -> SnapshotStore:
    made = SnapshotStore(tmp_path / "home")
    settings = BuildSettings(quiet=True, wishes=Wishes(family=request.param), rows_type="fp16")
    build_index(open_corpus(pictures), model, made, "default", settings)
    return made


def test_a_build_records_what_was_asked_for_and_measures_its_family(store: SnapshotStore) -> None:
    manifest = store.manifest("default")
    side = manifest.sides["text"]
    assert side.rows_type == "fp16"
    assert {option.reason for option in manifest.options["text"]} == {"asked for"} or (
        side.family == "scan"
    )
    families = {r.family for r in manifest.widths}
    assert families == ({"scan", "graph"} if side.family == "graph" else {"scan"})
    assert all(r.recall_lower is not None for r in manifest.widths)


def test_calibrating_publishes_new_widths_over_the_same_files(
    store: SnapshotStore, model: Model
) -> None:
    before = store.manifest("default")
    report = calibrate(store, "default", None, model, QUIET)
    after = store.manifest("default")
    assert after == report.manifest
    assert (after.version, after.calibrated_from) == (report.path.name, before.version)
    assert after.files == before.files
    for name in after.files:
        old, new = (store.path("default", m.version) / name for m in (before, after))
        assert old.samefile(new)
    assert {(r.searched, r.query, r.plan, r.k, r.family) for r in after.widths} == {
        (r.searched, r.query, r.plan, r.k, r.family) for r in before.widths
    }
    store.verify("default")
    assert store.rollback("default") == before.version
    store.verify("default")


def test_real_queries_replace_the_measurements_of_their_own_modality_alone(
    store: SnapshotStore, model: Model, tmp_path: Path
) -> None:
    file = tmp_path / "queries.txt"
    words = [f"{colour} shade{i}" for colour in COLOURS for i in range(4)]
    file.write_text("\n".join([*words, "", *words[:3]]), encoding="utf-8")
    before = store.manifest("default")
    settings = CalibrationSettings(queries=file, target=0.9, quiet=True, activate=False)
    report = calibrate(store, "default", None, model, settings)
    assert store.current("default") == before.version
    records = report.manifest.widths
    assert {r.target for r in records if r.query == "text"} == {0.9}
    assert {r.target for r in records if r.query == "image"} == {0.99}
    assert {r.queries for r in records if r.query == "text"} == {len(words) + 3}
    assert "text to image" in report.to_text()


def test_equal_captions_of_the_corpus_are_one_query(
    tmp_path: Path, pictures: Path, model: Model
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for picture in pictures.glob("*.png"):
        (corpus / picture.name).write_bytes(picture.read_bytes())
        colour = picture.stem[:-1]
        (corpus / f"{picture.stem}.txt").write_text(f"{colour} thing\n")
    store = SnapshotStore(tmp_path / "home")
    build_index(open_corpus(corpus), model, store, "default", BuildSettings(quiet=True))
    records = calibrate(store, "default", None, model, QUIET).manifest.widths
    assert {r.queries for r in records if r.query == "text"} == {len(COLOURS)}


def test_measurements_kept_from_another_encoder_are_told(
    store: SnapshotStore, model: Model, tmp_path: Path
) -> None:
    version = store.current("default")
    other = store.manifest("default").model_copy(update={"query_encoder": "7" * 64})
    write_manifest(store.path("default", version), other)
    file = tmp_path / "queries.txt"
    file.write_text("\n".join(f"{c} shade{i}" for c in COLOURS for i in range(4)))
    settings = CalibrationSettings(queries=file, target=0.5, quiet=True)
    notes = calibrate(store, "default", None, model, settings).notes
    assert "image to text: still as measured with the encoder before" in notes
    assert not any("still" in n for n in calibrate(store, "default", None, model, QUIET).notes)


def test_a_file_system_without_hard_links_is_an_error_of_the_build(
    store: SnapshotStore, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = store.versions("default")
    monkeypatch.setattr("os.link", refused)
    with pytest.raises(BuildError, match="can't be written"):
        calibrate(store, "default", None, model, QUIET)
    assert store.versions("default") == before


def test_what_was_promised_is_found_again(store: SnapshotStore, model: Model) -> None:
    everything = check_recall(store.open("default"), model, sample=40)
    found = [now for now in everything if isinstance(now, RecallNow)]
    (left,) = [now for now in everything if isinstance(now, NotMeasured)]
    assert (left.query, left.searched) == ("image", "image")
    assert "doubles" in left.reason
    assert {(r.query, r.searched) for r in found} == {  # every picture here has doubles
        ("image", "text"), ("text", "image"), ("text", "text")
    }  # fmt: skip
    assert all(r.promised is not None and r.kept for r in found)
    assert all(r.lower < r.recall for r in found)


def test_a_promise_that_does_not_hold_is_told(store: SnapshotStore, model: Model) -> None:
    snapshot = store.open("default")
    lies = tuple(r.model_copy(update={"recall_lower": 1.5}) for r in snapshot.manifest.widths)
    snapshot.manifest = snapshot.manifest.model_copy(update={"widths": lies})
    measured = check_recall(snapshot, model, sample=40)
    assert not any(now.kept for now in measured if isinstance(now, RecallNow))


def test_a_target_out_of_reach_is_marked_in_the_table(store: SnapshotStore) -> None:
    manifest = store.manifest("default")
    low = manifest.widths[0].model_copy(update={"recall_held_out": 0.5})
    some: SnapshotManifest = manifest.model_copy(update={"widths": (low,)})
    assert "under 0.99" in recall_table(some)
    write_manifest(store.path("default", manifest.version), manifest)


@pytest.mark.parametrize(
    ("text", "words"), [("one\ntwo\n", "2 queries, at least 20"), (None, "No such file")]
)
def test_too_few_queries_or_no_file_are_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "queries.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BuildError, match=words):
        read_queries(file)

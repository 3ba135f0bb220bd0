"""Early exits of a built index: recorded by the build, used by the command, measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.calibrate import CalibrationSettings, calibrate
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.build.recheck import check_exits
from hivlp.index.build.tables import measured_tables
from hivlp.index.early_exit import SIGNALS
from hivlp.index.evaluation.evaluate import EvaluationSettings, evaluate
from hivlp.index.evaluation.tables import tables
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot.manifest import ExitRecord, ExitTrial, GateRecord, write_manifest
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import fake_model
from tests.tiny_artifact import COLOURS, png, solid

RECALLS = {"r1": None, "r10": None, "ann10": 1.0}


def made(folder: Path, noise: float, copies: int = 24) -> tuple[SnapshotStore, Model]:
    """Items whose captions are words of their own, two of them equal in every group."""
    corpus = folder / "pictures"
    corpus.mkdir(parents=True)
    for name, colour in COLOURS.items():
        for number in range(copies):
            (corpus / f"{name}{number}.png").write_bytes(png(solid(colour)))
            words = f"{name}{number} thing{number}\nsome {name}{number}\n"
            (corpus / f"{name}{number}.txt").write_text(words)
    store, model = SnapshotStore(folder / "home"), fake_model(folder / "model", noise=noise)
    build_index(open_corpus(corpus), model, store, "default", BuildSettings(quiet=True))
    return store, model


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[SnapshotStore, Model]:
    """Early outputs without noise: level 1 differs from the finest by its dimension alone."""
    return made(tmp_path_factory.mktemp("exact"), 0.0)


def with_rule(store: SnapshotStore, bias: float) -> None:
    """Say in the manifest that level 1 is always, or never, sure of texts among texts."""
    manifest = store.manifest("default")
    record = ExitRecord(
        searched="text",
        query="text",
        signal="margin",
        loss="ann",
        most_lost=0.005,
        threshold=0.5,
        gates=(GateRecord(level=1, weights=(0.0,) * len(SIGNALS), bias=bias),),
        queries=300,
        full=RECALLS,
        tried=(ExitTrial(signal="margin", shares={1: 1.0}, saved=0.6, recalls=RECALLS),),
    )
    changed = manifest.model_copy(update={"exits": (record,)})
    write_manifest(store.path("default", manifest.version), changed)


def test_a_build_measures_exits_paces_and_retrieval(exact: tuple[SnapshotStore, Model]) -> None:
    manifest = exact[0].manifest("default")
    directions = {(r.searched, r.query) for r in manifest.widths}
    assert {(r.searched, r.query) for r in manifest.exits} == directions
    assert {(r.searched, r.query) for r in manifest.paces} == directions
    by_plan = {(r.searched, r.query, r.plan): r for r in manifest.retrieval}
    texts = by_plan["text", "text", "exact"]
    assert set(texts.recalls) == {1, 5, 10}
    assert texts.recalls[1] <= texts.recalls[5] <= texts.recalls[10]
    assert ("text", "text", "cascade") in by_plan
    for record in manifest.exits:
        assert record.loss == "retrieval" or record.full["r1"] is None or record.queries < 199
        assert len(record.gates) == 2
    for pace in manifest.paces:
        assert len(pace.encode_ms) == 3
        assert min(pace.cascade_ms, pace.funnel_ms) >= sum(pace.encode_ms) * 0.99


def test_what_a_calibration_measured_is_printed(exact: tuple[SnapshotStore, Model]) -> None:
    store, model = exact
    report = calibrate(store, "default", None, model, CalibrationSettings(quiet=True))
    text = report.to_text()
    assert len(measured_tables(report.manifest)) == 4
    for word in ("R@10", "encoder saved", "auto takes", "text to text", "never", "margin"):
        assert word in text
    store.rollback("default")


def test_a_rule_that_never_stops_keeps_its_promise(exact: tuple[SnapshotStore, Model]) -> None:
    store, model = exact
    with_rule(store, -50.0)
    (now,) = check_exits(store.open("default"), model, 100)
    assert now.kept
    assert now.applied.trial.shares == {1: 0.0, 2: 0.0}
    assert now.applied.trial.saved == 0.0
    assert "0.0% at level 1" in now.to_text()


def test_a_rule_that_stops_too_soon_is_found_out(tmp_path: Path) -> None:
    store, model = made(tmp_path, 1.5, copies=8)
    with_rule(store, 50.0)
    (now,) = check_exits(store.open("default"), model, 200)
    assert not now.kept
    assert now.applied.trial.shares[1] == 1.0
    assert now.applied.trial.saved > 0
    report = evaluate(store.open("default"), model, EvaluationSettings(60, quiet=True)).report
    texts = next(d for d in report.directions if (d.query, d.searched) == ("text", "text"))
    early, cascade = texts.systems["early exit"], texts.systems["cascade"]
    assert early.shares == {1: 1.0, 2: 0.0, 3: 0.0}
    assert early.ann10 is not None
    assert cascade.ann10 is not None
    assert early.ann10.value < cascade.ann10.value
    assert "answered by level 1: 100.0%" in tables(report)


def test_an_index_without_rules_has_nothing_to_check(exact: tuple[SnapshotStore, Model]) -> None:
    store, model = exact
    manifest = store.manifest("default")
    write_manifest(
        store.path("default", manifest.version), manifest.model_copy(update={"exits": ()})
    )
    assert check_exits(store.open("default"), model) == []
    assert LocalSearcher(store.open("default")).info.items == 24 * len(COLOURS)

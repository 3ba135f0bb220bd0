"""A build whose choice is steered: graphs that gain nothing, and what an index must do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build import build as build_module
from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.wishes import Wishes
from hivlp.index.cascade import PlanRequest
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.manifest import OptionRecord
from hivlp.index.snapshot.store import SnapshotStore
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

SETTINGS = BuildSettings(batch_size=8, quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_tiny_artifact(tmp_path_factory.mktemp("artifact")))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shades of every colour, each with a caption."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        for shade in range(2):
            pixels = np.clip(np.array(colour) - 9 * shade, 0, 255).astype(np.uint8)
            (folder / f"{name}{shade}.png").write_bytes(png(solid(tuple(pixels.tolist()))))
            (folder / f"{name}{shade}.txt").write_text(f"a {name} square\n")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home")


def build(
    folder: Path, model: Model, store: SnapshotStore, settings: BuildSettings = SETTINGS
) -> BuildReport:
    return build_index(open_corpus(folder), model, store, "default", settings)


def found(store: SnapshotStore, model: Model) -> list[str]:
    """The two best pictures for "red"."""
    assert model.text is not None
    searcher = LocalSearcher(store.open("default"))
    outputs = query_outputs(model.text, model.text.prepare(["red"]))
    plan = searcher.plan(PlanRequest("image", "text", 2))
    hits = run_plan(searcher, "image", plan, outputs)[0]
    return [item.id for item in searcher.items("image", hits, 2, 0)]


def test_a_graph_that_gains_nothing_is_not_kept_unless_it_was_asked_for(
    pictures: Path, model: Model, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen_graph(side, *more):  # type: ignore[no-untyped-def]
        records = [
            OptionRecord(  # type: ignore[call-arg]
                family=family, level1="sq8", rows=side.size, memory_bytes=1,
                chosen=family == "graph", reason="estimated",
            )
            for family in ("scan", "graph")
        ]  # fmt: skip
        return tuple(records)

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "choose", chosen_graph)
        patch.setattr(build_module, "useless_graph", lambda *measured: None)
        kept = build(pictures, model, store).manifest
        assert {side.family for side in kept.sides.values()} == {"graph"}
        patch.setattr(build_module, "useless_graph", lambda *measured: "the graph gains nothing")
        report = build(pictures, model, store)
    assert {note for note in report.notes if "graph" in note} == {
        f"{side}: the graph gains nothing; the scan serves this side instead"
        for side in ("image", "text")
    }
    for side, record in report.manifest.sides.items():
        assert (record.family, record.level1, record.graph_levels) == ("scan", "sq8", ())
        taken = [o for o in report.manifest.options[side] if o.chosen]
        assert [(o.family, o.level1) for o in taken] == [("scan", "sq8")]
    assert {record.family for record in report.manifest.widths} == {"scan"}
    assert not list(report.path.rglob("*.hnsw"))
    assert found(store, model)[0].startswith("red")
    monkeypatch.setattr(build_module, "useless_graph", lambda *measured: "the graph gains nothing")
    asked = replace(SETTINGS, wishes=Wishes(family="graph"))
    report = build(pictures, model, store, asked)
    assert {side.family for side in report.manifest.sides.values()} == {"graph"}
    assert any("it is kept, as asked for" in note for note in report.notes)


def test_what_an_index_must_do_is_recorded_and_its_second_codes_are_built(
    pictures: Path, model: Model, store: SnapshotStore
) -> None:
    wishes = Wishes(level1="rabitqfs", must=("mask", "batch"))
    report = build(pictures, model, store, replace(SETTINGS, wishes=wishes, build_threads=2))
    manifest = report.manifest
    assert (manifest.build.must, manifest.build.build_threads) == (("mask", "batch"), 2)
    for side, record in manifest.sides.items():
        assert (record.level1, record.maskable) == ("rabitqfs", "sq8")
        assert f"{side}/level1.maskable.faiss" in manifest.files
    assert all(name.startswith("red") for name in found(store, model))

"""Snapshots of both families: the files they hold, the plans they give, what they find."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanRequest, Stage, run_stage
from hivlp.index.errors import SnapshotCorrupt
from hivlp.index.level_index import Must, SearchParams
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.masks import RowMask
from hivlp.index.plans import WidthPoint, make_plan, run_plan
from hivlp.index.snapshot.manifest import MANIFEST_NAME, WidthRecord, read_manifest, write_manifest
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import file_record
from hivlp.models.levels import EarlyOutput, FloatArray, nested_prefix, normalise
from hivlp.service.overlap import PlanRun
from hivlp.service.overlap import run_plan as overlapped
from hivlp.service.timeline import Timeline
from tests.fakes import DIMS, specs, unit_vectors, write_snapshot

ROWS = 2_500
SPECTRUM = np.geomspace(4, 0.2, 16, dtype=np.float32)  # prefixes hold most, as trained ones do
IMAGES = normalise(unit_vectors(ROWS, 16) * SPECTRUM)
QUERIES = normalise(IMAGES[:40] + 0.1 * unit_vectors(40, 16, 9))
MANY = 1_000_000
"""More rows than are scored without a cascade."""


@pytest.fixture(scope="module", params=["scan", "graph"])
def searcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    store = SnapshotStore(tmp_path_factory.mktemp(request.param))
    write_snapshot(store, images=IMAGES, family=request.param, level1="sq8", rows_type="fp16")
    return LocalSearcher(store.open("default"))


@pytest.fixture(scope="module")
def graph_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = SnapshotStore(tmp_path_factory.mktemp("home"))
    write_snapshot(store, images=IMAGES, family="graph", level1="sq8")
    return store.home


def outputs(queries: FloatArray) -> dict[int, FloatArray]:
    return {level: nested_prefix(queries, dim) for level, dim in enumerate(DIMS, start=1)}


def found_by(searcher: LocalSearcher, plan: Plan) -> list[Candidates]:
    return run_plan(searcher, "image", plan, outputs(QUERIES))


def recall(found: list[Candidates], exact: list[Candidates]) -> float:
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len(np.intersect1d(a.rows, b.rows)) / len(b) for a, b in pairs]))


@pytest.mark.parametrize("name", ["auto", "cascade", "funnel"])
def test_every_plan_of_both_families_finds_most_of_the_exact_best(
    searcher: LocalSearcher, name: str
) -> None:
    exact = found_by(searcher, searcher.plan(PlanRequest("image", "text", 10, "exact")))
    plan = searcher.plan(PlanRequest("image", "text", 10, name))  # type: ignore[arg-type]
    assert recall(found_by(searcher, plan), exact) >= 0.98  # observed 1.0


def test_a_graph_index_walks_unless_a_filter_or_widths_ask_for_a_scan(graph_home: Path) -> None:
    searcher = LocalSearcher(SnapshotStore(graph_home).open("default"))

    def methods(masked: bool = False, **asked: object) -> list[tuple[int, str, int]]:
        request = PlanRequest("image", "text", 10, **asked)  # type: ignore[arg-type]
        plan = searcher.plan(request, allowed=MANY if masked else None)
        return [(s.level, s.method, s.query_level) for s in plan.stages]

    scans = [(1, "scan", 1), (2, "rescore", 2), (3, "rescore", 3)]
    assert methods() == [(1, "graph", 1), (3, "graph", 3)]
    assert methods(name="funnel") == [(3, "graph", 3)]
    assert methods(name="exact") == [(3, "scan", 3)]
    assert methods(masked=True) == scans
    assert methods(keeps=((1, 100),)) == scans
    assert methods(max_level=2) == scans[:2]


def test_a_masked_plan_returns_allowed_rows_alone_all_k_of_them(searcher: LocalSearcher) -> None:
    plan = searcher.plan(PlanRequest("image", "text", 10), allowed=MANY)
    allowed = np.random.default_rng(0).random(ROWS) < 0.03
    mask = RowMask.of(allowed)
    found: list[Candidates] | None = None
    queries = outputs(QUERIES)
    for stage in plan.stages:
        found = searcher.step("image", stage, queries[stage.query_level], found, mask=mask)
    assert found is not None
    exact = searcher.snapshot.sides["image"].levels[3]
    truth = exact.search(QUERIES, 10, SearchParams(), None, mask)
    assert all(allowed[f.rows].all() and len(f) == 10 for f in found)
    assert recall(found, truth) == 1.0


def test_the_service_s_pipeline_runs_a_graph_plan_and_skips_the_level_between(
    graph_home: Path,
) -> None:
    searcher = LocalSearcher(SnapshotStore(graph_home).open("default"))
    plan = searcher.plan(PlanRequest("image", "text", 10))
    exits = outputs(QUERIES[:1])
    early = iter([EarlyOutput(level, vectors) for level, vectors in exits.items()])
    found = overlapped(PlanRun(searcher, plan, "image", Timeline()), early)
    assert found.level == 3
    assert sorted(found.kept) == [1, 3]
    expected = run_plan(searcher, "image", plan, exits)[0]
    assert found.candidates.rows.tolist() == expected.rows.tolist()


@pytest.mark.parametrize("must", [("mask",), ()])
def test_codes_that_take_no_mask_are_passed_over_under_one(
    tmp_path: Path, must: tuple[Must, ...]
) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=IMAGES, level1="pq64x4fs", must=must)
    searcher = LocalSearcher(store.open("default"))
    plan = searcher.plan(PlanRequest("image", "text", 10), allowed=MANY)
    mask = RowMask.of(np.arange(ROWS) % 2 == 0)
    found = searcher.step("image", plan.stages[0], outputs(QUERIES)[1], None, mask=mask)
    assert all(mask.allowed[f.rows].all() and len(f) == plan.stages[0].keep for f in found)


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("hidden", ["a tenth at random", "the 200 nearest of each query"])
def test_a_graph_walks_through_hidden_rows_and_returns_none_of_them(
    graph_home: Path, hidden: str, entered: bool
) -> None:
    side = SnapshotStore(graph_home).open("default").sides["image"]
    scores = QUERIES @ IMAGES.T
    for query, own in zip(QUERIES, scores, strict=True):
        allowed = np.random.default_rng(0).random(ROWS) > 0.1
        if hidden != "a tenth at random":
            allowed = np.ones(ROWS, np.bool_)
            allowed[np.argsort(-own)[:200]] = False
        mask = RowMask.of(allowed)
        entry = [Candidates.ranked(np.arange(20), own[:20], 20)] if entered else None
        stage = Stage(3, "graph", 10, 3, SearchParams(ef=64))
        found = run_stage(side.levels, stage, query[None], entry, graphs=side.graphs, mask=mask)[0]
        expected = Candidates.ranked(mask.rows, own[mask.rows], 10)
        assert allowed[found.rows].all()
        assert len(set(found.rows.tolist()) & set(expected.rows.tolist())) >= 9


def test_a_graph_index_keeps_scan_codes_links_and_one_copy_of_its_rows(graph_home: Path) -> None:
    manifest = SnapshotStore(graph_home).manifest("default")
    side = manifest.sides["image"]
    assert (side.family, side.level1, side.graph_levels) == ("graph", "sq8", (1, 3))
    sizes = {name: record.size_bytes for name, record in manifest.files.items()}
    assert {"image/level1.faiss", "image/level1.hnsw", "image/level3.hnsw"} <= set(sizes)
    assert sizes["image/level1.faiss"] < ROWS * (DIMS[0] + 1) + 200
    assert sizes["image/level3.hnsw"] < ROWS * 300  # 64 links of 4 bytes, and the upper levels


def test_without_faiss_a_graph_index_scans(graph_home: Path) -> None:
    searcher = LocalSearcher(SnapshotStore(graph_home).open("default", backend="numpy"))
    plan = searcher.plan(PlanRequest("image", "text", 10))
    assert [stage.method for stage in plan.stages] == ["scan", "rescore", "rescore"]
    exact = found_by(searcher, searcher.plan(PlanRequest("image", "text", 10, "exact")))
    assert recall(found_by(searcher, plan), exact) == 1.0


def test_a_graph_file_that_is_nonsense_is_named(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=IMAGES[:50], family="graph")
    folder = store.path("default", store.current("default"))
    name = "image/level3.hnsw"
    (folder / name).write_bytes(b"nonsense" * 20)
    manifest = read_manifest(folder, "default", folder.name)
    files = {**manifest.files, name: file_record(folder / name)}
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    with pytest.raises(SnapshotCorrupt, match=name):
        store.open("default")


def test_small_sides_of_a_graph_index_answer_exactly(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=np.repeat(IMAGES[:7], 9, axis=0), family="graph", level1="sq8")
    searcher = LocalSearcher(store.open("default"))
    exact = found_by(searcher, searcher.plan(PlanRequest("image", "text", 500, "exact")))
    found = found_by(searcher, searcher.plan(PlanRequest("image", "text", 500)))
    assert [f.rows.tolist() for f in found] == [e.rows.tolist() for e in exact]
    assert all(len(f) == 63 for f in found)


def test_beams_grow_with_k_and_never_below_it() -> None:
    points = {
        ("image", "text", "cascade"): (
            WidthPoint(10, (40,), (128, 16)),
            WidthPoint(100, (80,), (160, 200)),
        )
    }
    for need, least in ((1, 10), (10, 16), (30, 30), (100, 200), (1_000, 1_000)):
        request = PlanRequest("image", "text", need, "cascade")
        first, last = make_plan(request, specs(), {}, 10**6, graphs=points).stages
        assert first.params.ef is not None
        assert last.params.ef is not None
        assert last.params.ef >= least
        assert first.params.ef >= first.keep >= 1
        assert (last.keep, first.query_level, last.query_level) == (need, 1, 3)


def test_a_graph_without_measured_beams_walks_generously() -> None:
    for name, stages in (("cascade", 2), ("funnel", 1)):
        request = PlanRequest("image", "text", 10, name)  # type: ignore[arg-type]
        plan = make_plan(request, specs(), {}, 10**6, graphs={})
        assert len(plan.stages) == stages
        assert (plan.stages[-1].params.ef or 0) >= 256


def test_the_graph_of_one_level_walks_with_its_measured_beam() -> None:
    beams = {("image", "text", "funnel"): (WidthPoint(10, (), (77,)),)}
    plan = make_plan(PlanRequest("image", "text", 10), specs((16,)), {}, 5_000, graphs=beams)  # type: ignore[arg-type]
    assert [(s.method, s.params.ef) for s in plan.stages] == [("graph", 77)]


def test_widths_of_the_two_families_are_kept_apart(tmp_path: Path) -> None:
    def record(family: str, **more: object) -> WidthRecord:
        return WidthRecord(  # type: ignore[call-arg]
            searched="image", query="text", plan="cascade", k=10, target=0.99,
            recall_chosen_on=1.0, recall_held_out=0.98, queries=9, family=family, **more,
        )  # fmt: skip

    store = SnapshotStore(tmp_path)
    both = [record("scan", keeps=(50, 20)), record("graph", keeps=(40,), efs=(128, 16))]
    write_snapshot(store, images=IMAGES[:50], widths=both)
    manifest = store.manifest("default")
    key = ("image", "text", "cascade")
    assert manifest.width_table("scan")[key] == (WidthPoint(10, (50, 20)),)
    assert manifest.width_table("graph")[key] == (WidthPoint(10, (40,), (128, 16)),)
    assert not manifest.widths[0].reached


NEW_SINCE_3: tuple[str, ...] = ()
NEW_SINCE_2 = ("maskable", "must", "build_threads", *NEW_SINCE_3)
NEW_SINCE_1 = ("family", "level1", "rows_type", "graph_levels", "efs", "recall_lower", *NEW_SINCE_2)


def without(names: tuple[str, ...], value: object) -> object:
    """What a writer that didn't know these fields would have written."""
    if isinstance(value, dict):
        return {k: without(names, v) for k, v in value.items() if k not in names}
    return [without(names, v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("version", "new"), [(1, NEW_SINCE_1), (2, NEW_SINCE_2), (3, NEW_SINCE_3)])
def test_a_snapshot_of_an_older_format_is_still_searched(
    tmp_path: Path, version: int, new: tuple[str, ...]
) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=IMAGES[:300])
    file = store.path("default", store.current("default")) / MANIFEST_NAME
    old = without(new, json.loads(file.read_text()))
    assert isinstance(old, dict)
    old |= {"format_version": version, "seal": "0" * 64}
    text = json.dumps(old, indent=2)
    seal = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(text.replace('"seal": "' + "0" * 64, f'"seal": "{seal}'))
    searcher = LocalSearcher(store.open("default"))
    assert searcher.snapshot.manifest.format_version == version
    side = searcher.snapshot.manifest.sides["image"]
    assert (side.family, side.level1, side.rows_type) == ("scan", "flat", "fp32")
    assert side.maskable is None
    plan = searcher.plan(PlanRequest("image", "text", 10))
    exact = found_by(searcher, searcher.plan(PlanRequest("image", "text", 10, "exact")))
    assert recall(found_by(searcher, plan), exact) == 1.0


@pytest.mark.parametrize(
    ("share", "k", "expected"),
    [
        (1.0, 10, 19),  # as measured
        (0.1, 10, 116),  # a tenth of the 871 that 100 need, and 3 * sqrt(87)
        (0.5, 10, 48),  # half of the 60 that 20 need, on the line between, and 3 * sqrt(30)
        (0.01, 10, 459),  # a hundredth of what the line beyond says that 1,000 need, and chance
    ],
)
def test_under_a_mask_as_many_are_kept_as_more_results_of_all_rows_need(
    share: float, k: int, expected: int
) -> None:
    points = (WidthPoint(1, (6,)), WidthPoint(10, (19,)), WidthPoint(100, (871,)))
    table = {("image", "text", "funnel"): points}
    plan = make_plan(PlanRequest("image", "text", k, "funnel"), specs(), table, 10_000, share=share)
    assert plan.stages[0].keep == pytest.approx(expected, abs=2)

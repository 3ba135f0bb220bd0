"""The protocol, against naive counts: ties, blocks, folds, the toy, widths, the early exit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.cascade import PlanRequest
from hivlp.index.early_exit import DEPTH, ExitRule
from hivlp.index.errors import BuildError, PlanError
from hivlp.index.evaluation import counting, queries
from hivlp.index.evaluation.evaluate import DIRECTIONS, EvaluationSettings, Folds, evaluate
from hivlp.index.evaluation.plain import ann_recall, pessimistic_rank, plan_rank
from hivlp.index.evaluation.ranks_file import RanksWriter, read_ranks
from hivlp.index.evaluation.report import EvaluationReport
from hivlp.index.evaluation.tables import tables
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_early
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete
from hivlp.index.snapshot.manifest import ExitRecord, GateRecord
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, FakeEncoder, fake_model, unit_vectors, write_snapshot
from tests.tiny_artifact import png, solid


def written(
    store: SnapshotStore,
    images: FloatArray,
    texts: FloatArray,
    owners: list[int],
    dims: tuple[int, ...] = DIMS,
    exits: Sequence[ExitRecord] = (),
) -> None:
    """Items with a picture each; caption t, whose vector is texts[t], belongs to owners[t]."""
    order = np.argsort(owners, kind="stable")
    write_snapshot(
        store,
        images=images,
        texts=texts[order],
        text_items=[owners[t] for t in order],
        captions=[f"caption {t}" for t in order],
        dims=dims,
        exits=exits,
    )


class GivenVectors(FakeEncoder[str]):
    """Encodes `caption 3` as the fourth of some vectors; earlier exits are its exact prefixes."""

    table: FloatArray

    def _vector(self, item: Any) -> FloatArray:
        row: FloatArray = self.table[int(item.split()[-1])]
        return row


def report_on(
    tmp_path: Path, images: FloatArray, texts: FloatArray, owners: list[int], **settings: Any
) -> EvaluationReport:
    store = SnapshotStore(tmp_path)
    written(store, images, texts, owners)
    encoder = GivenVectors("text", dims=(4, 8, images.shape[1]), noise=0.0)
    object.__setattr__(encoder, "table", texts)
    model = replace(fake_model(tmp_path), text=encoder, image=None)
    given = EvaluationSettings(None, quiet=True, **settings)
    return evaluate(store.open("default"), model, given).report


def test_equal_scores_are_no_hits(tmp_path: Path) -> None:
    """Twelve pictures and captions of one vector: every rank is the last."""
    same = np.repeat(unit_vectors(1, 16), 12, axis=0)
    report = report_on(tmp_path, same, same, list(range(12)), resamples=0)
    found = {(d.query, d.searched): d for d in report.directions}["text", "image"]
    assert found.queries == 12
    for system in found.systems.values():
        assert {k: figure.value for k, figure in system.recalls.items()} == {1: 0, 5: 0, 10: 0}
    assert found.systems["funnel"].ann10 is not None
    assert found.systems["funnel"].ann10.value == 1.0


@pytest.mark.parametrize("count", [1, 9, 40])
def test_what_is_counted_in_blocks_is_what_is_counted_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Uneven blocks, several captions an item, equal rows: each rank as `plain.py` has it."""
    rng = np.random.default_rng(count)
    images = unit_vectors(60, 16, seed=count)
    images[7] = images[31] = images[50]  # doubles: they tie
    owners = sorted(rng.integers(0, 60, count + 30).tolist())
    noise = unit_vectors(len(owners), 16, seed=count + 1)
    texts = normalise(images[owners] + rng.uniform(0, 2) * noise)
    monkeypatch.setattr(counting, "BLOCK", 17 * count)
    monkeypatch.setattr(queries, "CHUNK", 7)
    ranks = tmp_path / "ranks.parquet"
    store = SnapshotStore(tmp_path)
    written(store, images, texts, owners)
    encoder = GivenVectors("text", dims=(4, 8, 16), noise=0.0)
    object.__setattr__(encoder, "table", texts)
    model = replace(fake_model(tmp_path), text=encoder, image=None)
    with RanksWriter(ranks) as writer:
        evaluate(store.open("default"), model, EvaluationSettings(None, quiet=True), writer)
    rows = read_ranks(ranks).to_pylist()
    seen = {(r["query"], r["system"]): r for r in rows if r["to"] == "image"}
    assert len(seen) == 5 * len(owners)
    places: dict[int, int] = {}
    for number, owner in enumerate(owners):
        name = f"i{owner}#{places.setdefault(owner, 0)}"
        places[owner] += 1
        right = np.arange(60) == owner
        for level, dim in enumerate((4, 8, 16), start=1):
            scores = nested_prefix(images, dim) @ nested_prefix(texts[number : number + 1], dim)[0]
            assert seen[name, f"level {level}"]["rank"] == pessimistic_rank(scores, right)
        exact = images @ texts[number]
        everything = np.argsort(-exact, kind="stable")
        assert seen[name, "cascade"]["rank"] == plan_rank(exact, everything, right)
        assert seen[name, "cascade"]["ann10"] == ann_recall(exact, everything)


class GivenPictures(FakeEncoder[RgbImage]):
    """The first of some vectors for a red picture, the second for another."""

    table: FloatArray

    def _vector(self, item: Any) -> FloatArray:
        row: FloatArray = self.table[0 if item[0, 0, 0] > 128 else 1]
        return row


def test_the_toy_of_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores (image x text) [[.9, .2, .8, .1], [.3, .85, .7, .6]], the texts' images [0, 0, 1, 1]:
    ranks from 0 TR [0, 1], IR [0, 1, 1, 0]; TR@1 = IR@1 = .5.

    Scaled by .8, so that unit vectors can have them; the right text of one more number each.
    """
    table = 0.8 * np.array([[0.9, 0.2, 0.8, 0.1], [0.3, 0.85, 0.7, 0.6]], dtype=np.float32)
    images = np.eye(2, 16, dtype=np.float32)
    texts = np.zeros((4, 16), dtype=np.float32)
    texts[:, :2] = table.T
    texts[np.arange(4), 2 + np.arange(4)] = np.sqrt(1 - (table**2).sum(axis=0))
    monkeypatch.chdir(tmp_path)
    Path("nowhere").mkdir()
    for number, colour in enumerate(("red", "blue")):
        Path(f"nowhere/{number}.png").write_bytes(png(solid(colour)))
    encoders = GivenVectors("text", dims=(16,)), GivenPictures("image", dims=(16,))
    for encoder, vectors in zip(encoders, (texts, images), strict=True):
        object.__setattr__(encoder, "table", vectors)
    store = SnapshotStore(tmp_path)
    written(store, images, texts, [0, 0, 1, 1], dims=(16,))
    model = Model("toy", tmp_path, *encoders)
    with RanksWriter(tmp_path / "ranks.jsonl") as writer:
        settings = EvaluationSettings(None, at=(1, 2), quiet=True, directions=DIRECTIONS[:2])
        report = evaluate(store.open("default"), model, settings, writer).report
    rows = read_ranks(tmp_path / "ranks.jsonl").to_pylist()
    for system in ("level 1", "cascade", "funnel"):
        own = [row for row in rows if row["system"] == system]
        assert [r["rank"] - 1 for r in own if r["from"] == "image"] == [0, 1]
        assert [r["rank"] - 1 for r in own if r["from"] == "text"] == [0, 1, 1, 0]
        for direction in report.directions:
            recalls = direction.systems[system].recalls
            assert {k: figure.value for k, figure in recalls.items()} == {1: 0.5, 2: 1.0}
        assert report.summary[system].ar.value == 75.0
        assert report.summary[system].rsum.value == 300.0


def test_the_best_ranked_caption_of_a_picture_counts(tmp_path: Path) -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.8], dtype=np.float32)
    assert pessimistic_rank(scores, np.array([True, False, False, True])) == 2


def test_folds_are_galleries_of_their_own(tmp_path: Path) -> None:
    """Each fold by hand: the recall of its own rows alone; the figure is the mean of the folds."""
    images = unit_vectors(31, 16, seed=3)
    owners = [i for i in range(31) for _ in range(1 + i % 3)]
    texts = normalise(images[owners] + 0.9 * unit_vectors(len(owners), 16, seed=4))
    report = report_on(tmp_path, images, texts, owners, folds=Folds(3, 10))
    (found,) = [d for d in report.directions if (d.query, d.searched) == ("text", "image")]
    assert report.protocol == "mean of 3 folds of 10 items"
    hits: list[list[bool]] = [[], [], []]
    for number, owner in enumerate(owners):
        if owner < 30:
            fold = owner // 10
            scores = images[10 * fold : 10 * fold + 10] @ texts[number]
            rank = pessimistic_rank(scores, np.arange(10) == owner - 10 * fold)
            hits[fold].append(rank <= 1)
    mean = np.mean([np.mean(fold) for fold in hits])
    for name in ("level 3", "cascade", "funnel"):
        figure = found.systems[name].recalls[1]
        assert figure.value == pytest.approx(mean, abs=1e-4)
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
    assert found.queries == sum(len(fold) for fold in hits)


def test_too_many_folds_are_refused_with_the_limit(tmp_path: Path) -> None:
    images = unit_vectors(12, 16)
    with pytest.raises(PlanError, match="3 folds of 5 items need 15; the index has 12") as found:
        report_on(tmp_path, images, images, list(range(12)), folds=Folds(3, 5))
    assert found.value.limit == 2


def test_widths_of_the_cascade_can_be_given(tmp_path: Path) -> None:
    images = unit_vectors(40, 16)
    texts = normalise(images + 0.3 * unit_vectors(40, 16, seed=5))
    report = report_on(tmp_path, images, texts, list(range(40)), keeps=((1, 25), (2, 15)))
    (found,) = [d for d in report.directions if (d.query, d.searched) == ("text", "image")]
    assert found.systems["cascade"].keeps == (25, 15, 10)
    with pytest.raises(PlanError, match="level 4"):
        report_on(tmp_path, images, texts, list(range(40)), keeps=tuple(enumerate([20] * 4, 1)))


def test_any_k_can_be_asked_for(tmp_path: Path) -> None:
    images = unit_vectors(40, 16)
    texts = normalise(images + 4 * unit_vectors(40, 16, seed=5))
    report = report_on(tmp_path, images, texts, list(range(40)), at=(5, 10, 20))
    (found,) = [d for d in report.directions if (d.query, d.searched) == ("text", "image")]
    recalls = found.systems["funnel"].recalls
    assert list(recalls) == [5, 10, 20]
    assert 0 < recalls[5].value < recalls[20].value
    assert "R@20" in tables(report)


def test_a_version_with_changes_is_refused_until_they_are_folded_in(tmp_path: Path) -> None:
    """A deleted picture of the same group would be found still, and counted as right."""
    store = SnapshotStore(tmp_path)
    words = [f"word{i}" for i in range(12)]
    vectors = normalise(
        np.asarray(FakeEncoder[str]("text").prepare(words).inputs["finest"], np.float32)
    )
    built = write_snapshot(
        store,
        images=vectors,
        texts=vectors,
        text_items=list(range(12)),
        captions=words,
        metadata=[{"kind": str(i // 2)} for i in range(12)],
    )
    settings = EvaluationSettings(None, quiet=True, group="kind", directions=DIRECTIONS[:1])
    model = fake_model(tmp_path)

    def measured(version: str | None = None) -> EvaluationReport:
        return evaluate(store.open("default", version), model, settings).report

    before = measured()
    amend(store, "default", [Delete("i3")])  # i2 remains, of the same kind
    with pytest.raises(BuildError, match="'default' has items that were put, deleted or erased"):
        measured()
    assert measured(built).directions == before.directions
    erase(store, "default", ["i3"], quiet=True)
    with pytest.raises(BuildError, match="`hivlp build` takes them in"):
        measured()


def test_only_the_queries_of_some_items_can_be_asked(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    words = [f"word{i} common" for i in range(20)]
    vectors = normalise(
        np.asarray(FakeEncoder[str]("text").prepare(words).inputs["finest"], np.float32)
    )
    split = ["test" if i < 6 else "train" for i in range(20)]
    write_snapshot(
        store,
        images=vectors,
        texts=vectors,
        text_items=list(range(20)),
        captions=words,
        metadata=[{"split": name} for name in split],
    )
    settings = EvaluationSettings(None, quiet=True, only={"field": "split", "eq": "test"})
    report = evaluate(store.open("default"), fake_model(tmp_path), settings).report
    (found,) = report.directions
    assert (found.queries, found.rows) == (6, 20)
    nobody = replace(settings, only={"field": "split", "eq": "val"})
    with pytest.raises(PlanError, match="no item"):
        evaluate(store.open("default"), fake_model(tmp_path), nobody)


def test_the_early_exit_is_what_the_cascade_does_when_it_may_stop(tmp_path: Path) -> None:
    """Stage by stage, at the recorded threshold and at others: `run_early` is the slow version."""
    images = unit_vectors(80, 16, seed=8)
    texts = normalise(images + 0.8 * unit_vectors(80, 16, seed=9))
    signals = (0.0, 0.0, 30.0, 0.0, 0.0, 0.0, 0.0)  # margin3 alone
    gates = [GateRecord(level=n, weights=signals, bias=-2.0) for n in (1, 2)]
    record = ExitRecord(
        searched="image",
        query="text",
        signal="margin",
        loss="ann",
        most_lost=0.005,
        threshold=0.5,
        gates=tuple(gates),
        queries=80,
        full={},
        tried=(),
    )
    store = SnapshotStore(tmp_path)
    written(store, images, texts, list(range(80)), exits=[record])
    encoder = GivenVectors("text", noise=0.3)
    object.__setattr__(encoder, "table", texts)
    model = replace(fake_model(tmp_path), text=encoder, image=None)
    snapshot = store.open("default")
    settings = EvaluationSettings(None, quiet=True, directions=DIRECTIONS[:1])
    (tally,) = evaluate(snapshot, model, settings).tallies
    assert tally.stages is not None
    searcher = LocalSearcher(snapshot)
    plan = searcher.plan(PlanRequest("image", "text", DEPTH, early_exit=True))
    assert plan.exits is not None
    words = [f"caption {n}" for n in range(80)]
    outputs = query_outputs(encoder, encoder.prepare(words))
    for threshold in (0.5, 0.3, 0.9):
        rule = ExitRule(threshold, plan.exits.gates)
        levels = []
        stopped = tally.stages.stopped(threshold)
        scored = tally.stages.at(stopped)
        for n in range(80):
            own = {level: out[n : n + 1] for level, out in outputs.items()}
            found, level = run_early(searcher, "image", replace(plan, exits=rule), own)
            levels.append(level)
            exact = {
                rung: nested_prefix(images, 4 * 2 ** (rung - 1)) @ own[rung][0]
                for rung in (1, 2, 3)
            }
            right = np.arange(80) == n
            assert scored.ranks[n] == plan_rank(exact[level], found.rows, right)
            assert scored.ann[n] == pytest.approx(ann_recall(exact[3], found.rows))
        assert levels == (stopped + 1).tolist()
        assert len(set(levels)) > 1

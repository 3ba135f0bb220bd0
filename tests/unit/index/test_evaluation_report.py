"""Ranks and recalls as they are defined, and what an evaluation reports or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.errors import PlanError
from hivlp.index.evaluation.evaluate import EvaluationSettings, evaluate
from hivlp.index.evaluation.plain import ann_recall, pessimistic_rank, plan_rank
from hivlp.index.evaluation.tables import tables
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import SpaceMismatch
from hivlp.models.levels import nested_prefix, normalise
from tests.fakes import FakeEncoder, fake_model, unit_vectors, write_snapshot


@pytest.mark.parametrize(
    ("scores", "right", "rank"),
    [
        ([0.9, 0.8, 0.7], [0], 1),
        ([0.9, 0.8, 0.7], [2], 3),
        ([0.9, 0.9, 0.9], [0], 3),
        ([0.5, 0.5, 0.5, 0.5], [0, 1], 3),
        ([0.9, 0.8, 0.9], [1, 2], 2),
        ([0.9, 0.8], [], float("inf")),
    ],
)
def test_a_right_row_counts_behind_every_wrong_one_of_its_score(
    scores: list[float], right: list[int], rank: float
) -> None:
    mask = np.isin(np.arange(len(scores)), right)
    assert pessimistic_rank(np.array(scores, dtype=np.float32), mask) == rank


def test_ann_recall_takes_an_equal_row_for_the_exact_one() -> None:
    vectors = np.repeat(unit_vectors(20, 8), 2, axis=0)
    scores = vectors @ vectors[0]
    best = np.argsort(-scores, kind="stable")
    assert ann_recall(scores, best[:10]) == 1.0
    twins = [*best[:9].tolist(), int(best[9]) ^ 1]
    assert ann_recall(scores, np.array(twins)) == 1.0
    assert ann_recall(scores, best[5:15]) == pytest.approx(0.5, abs=0.11)
    assert ann_recall(scores, best[-10:]) == 0.0
    assert ann_recall(scores, np.array([], dtype=np.int64)) == 0.0


def test_ann_recall_of_a_small_gallery_is_over_what_there_is() -> None:
    assert ann_recall(np.array([0.1, 0.5, 0.2], dtype=np.float32), np.array([2, 0, 1])) == 1.0


WORDS = ["red", "green", "blue", "cat", "dog", "pizza", "rain", "heart"]


@pytest.fixture
def report_of(tmp_path: Path) -> Any:
    """Captions only: each word three times, by three items of one concept."""
    store = SnapshotStore(tmp_path)
    encoder: FakeEncoder[str] = FakeEncoder("text")
    texts = [word for word in WORDS for _ in range(3)]
    vectors = normalise(np.asarray(encoder.prepare(texts).inputs["finest"], dtype=np.float32))
    write_snapshot(
        store,
        texts=vectors,
        text_items=list(range(24)),
        captions=texts,
        metadata=[{"concept": word} for word in texts],
    )
    model = fake_model(tmp_path)

    def report(group: str | None) -> Any:
        return evaluate(
            store.open("default"), model, EvaluationSettings(100, group, quiet=True)
        ).report

    return report


def test_without_a_right_row_there_is_nothing_to_measure(report_of: Any) -> None:
    assert report_of(None).directions == ()


def test_an_unknown_group_is_refused(report_of: Any) -> None:
    with pytest.raises(PlanError, match="'colour'"):
        report_of("colour")


def test_a_report_says_both_recalls_of_every_level_and_plan(report_of: Any) -> None:
    report = report_of("concept")
    (found,) = report.directions
    assert (found.query, found.searched, found.rows) == ("text", "text", 24)
    assert found.queries == 24
    assert list(found.systems) == ["level 1", "level 2", "level 3", "cascade", "funnel"]
    for name in ("cascade", "funnel"):
        assert found.systems[name].ann10 is not None
        assert 0.9 <= found.systems[name].ann10.value <= 1.0
    assert found.systems["level 3"].recalls[1].value == 1.0
    assert {level: set(widths) for level, widths in found.by_width.items()} == {
        1: {10, 20},
        2: {10, 20},
    }
    assert 0 < found.width_needed[24] <= 24
    text = tables(report)
    for word in ("text to text", "level 1", "cascade", "funnel", "R@10", "K1 for .99"):
        assert word in text
    assert '"recalls"' in report.to_json()


def test_a_model_of_another_space_is_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, texts=unit_vectors(4, 16), text_items=[0, 1, 2, 3])
    model = fake_model(tmp_path, gallery_space="9" * 64)
    with pytest.raises(SpaceMismatch):
        evaluate(store.open("default"), model)


def test_wrong_rows_that_tie_count_though_a_plan_left_them_out() -> None:
    exact = np.array([0.9, 0.5, 0.5, 0.5, 0.5, 0.1], dtype=np.float32)
    right = np.isin(np.arange(6), [1])
    assert plan_rank(exact, np.array([0, 1]), right) == 5
    assert plan_rank(exact, np.array([0, 1, 2, 3, 4]), right) == 5
    assert plan_rank(exact, np.array([0, 2]), right) == float("inf")
    assert plan_rank(exact, np.array([0, 1]), np.isin(np.arange(6), [0, 1])) == 1


def test_a_query_is_no_answer_to_itself(tmp_path: Path) -> None:
    """ANN recall of level 1, counted naively over the other rows."""
    store = SnapshotStore(tmp_path)
    words = [f"word{i} common" for i in range(40)]
    encoder: FakeEncoder[str] = FakeEncoder("text")
    finest = np.asarray(encoder.prepare(words).inputs["finest"], dtype=np.float32)
    write_snapshot(
        store,
        texts=normalise(finest),
        text_items=list(range(40)),
        captions=words,
        metadata=[{"half": i % 2} for i in range(40)],
    )
    model = fake_model(tmp_path, noise=0.0)
    settings = EvaluationSettings(100, "half", quiet=True)
    (found,) = evaluate(store.open("default"), model, settings).report.directions
    vectors = nested_prefix(normalise(finest), 4)
    scores, fine = vectors @ vectors.T, normalise(finest) @ normalise(finest).T
    shares = []
    for own in range(40):
        others = np.delete(np.arange(40), own)
        best = others[np.argsort(-fine[own, others])[:10]]
        among = scores[own, others]
        shares += [float(np.count_nonzero(among >= scores[own, row]) <= 10) for row in best]
    assert found.by_width[1][10] == pytest.approx(np.mean(shares), abs=1e-4)


def test_pictures_that_are_gone_are_counted(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(3, 16))
    report = evaluate(store.open("default"), fake_model(tmp_path)).report
    assert report.unread == 3
    assert "3 pictures could not be read" in tables(report)

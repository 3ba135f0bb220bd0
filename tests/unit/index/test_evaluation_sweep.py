"""Other widths, and sample answers: what a search with those widths finds, as ranks count it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.evaluation.evaluate import Evaluation, EvaluationSettings, Folds, evaluate
from hivlp.index.evaluation.samples import HITS, samples
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, normalise
from tests.fakes import FakeEncoder, fake_model, unit_vectors, write_snapshot

ITEMS = 120
Run = Callable[..., Evaluation]


class Given(FakeEncoder[str]):
    """Encodes text n as vector n of a table; early exits are blurred."""

    table: FloatArray

    def _vector(self, item: Any) -> FloatArray:
        row: FloatArray = self.table[int(item.split()[-1])]
        return row


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """What encodes the captions of `tmp_path`'s index: pictures in equal pairs, hard to tell."""
    images = np.repeat(unit_vectors(ITEMS // 2, 16, seed=2), 2, axis=0)
    texts = normalise(images + 2.0 * unit_vectors(ITEMS, 16, seed=3))
    write_snapshot(
        SnapshotStore(tmp_path), images=images, texts=texts, text_items=list(range(ITEMS))
    )
    encoder = Given("text", noise=0.4)
    object.__setattr__(encoder, "table", texts)
    return replace(fake_model(tmp_path), text=encoder, image=None)


@pytest.fixture
def run(tmp_path: Path, model: Any) -> Run:
    def measured(**settings: Any) -> Evaluation:
        given = EvaluationSettings(None, quiet=True, resamples=0, **settings)
        return evaluate(SnapshotStore(tmp_path).open("default"), model, given)

    return measured


def test_a_width_that_is_tried_finds_what_a_search_with_it_finds(run: Run) -> None:
    (direction,) = run(sweep=True, directions=(("text", "image"),)).report.directions
    widths = [(own.level, own.keep) for own in direction.widths]
    every = [10, 20, 50, 100, ITEMS]
    assert widths == [(level, keep) for level in (1, 2) for keep in every]
    for own in direction.widths:
        keeps = ((own.level, own.keep),)
        (alone,) = run(keeps=keeps, directions=(("text", "image"),)).report.directions
        cascade = alone.systems["cascade"]
        assert own.keeps == cascade.keeps
        assert own.queries == ITEMS
        assert own.recalls == {k: figure.value for k, figure in cascade.recalls.items()}
        assert cascade.ann10 is not None
        assert own.ann10 == cascade.ann10.value
    narrow, wide = direction.widths[0], direction.widths[len(every) - 1]
    assert narrow.ann10 < wide.ann10
    assert narrow.recalls[10] < wide.recalls[10]


def test_widths_are_not_tried_unasked_nor_of_folds(run: Run) -> None:
    assert run().report.directions[0].widths == ()
    assert run(sweep=True, folds=Folds(2, 50)).report.directions[0].widths == ()


@pytest.mark.parametrize(
    "settings", [{}, {"folds": Folds(3, 30)}, {"keeps": ((1, 12), (2, 11))}, {"at": (1, 40)}]
)
def test_a_sample_shows_the_right_row_where_its_rank_says(
    run: Run, model: Any, settings: dict[str, Any]
) -> None:
    """Equal pictures and all: of two that are the same, the right one stands second."""
    evaluation = run(directions=(("text", "image"),), **settings)
    shown = samples(evaluation, model)
    assert len(shown) >= 4
    for sample in shown:
        places = [place for place, (_, right) in enumerate(sample.hits, start=1) if right]
        assert places == ([] if sample.rank is None or sample.rank > HITS else [sample.rank])
        assert [own.id for own, right in sample.hits if right] in ([], [sample.asked.id])
        assert len(sample.hits) == HITS
    assert {sample.rank for sample in shown} - {None, 1}


def test_a_sample_of_a_fold_shows_rows_of_that_fold(run: Run, model: Any) -> None:
    evaluation = run(directions=(("text", "image"),), folds=Folds(4, 30))
    for sample in samples(evaluation, model):
        fold = int(sample.asked.id[1:]) // 30
        assert {int(own.id[1:]) // 30 for own, _ in sample.hits} == {fold}

"""R@K, ANN recall and plans against definitions written out."""

from __future__ import annotations

import numpy as np
import pytest

from hivlp.models.training.measures import (
    Side,
    Widths,
    ann_recall,
    early_ranks,
    first_right,
    level_recalls,
    plan_recalls,
    recall_at,
    unit,
    width_for,
)

DIMS = (4, 8, 16)


def _side(n: int, seed: int, *, noise: float = 0.0) -> Side:
    rng = np.random.default_rng(seed)
    whole = rng.normal(size=(n, DIMS[-1])).astype(np.float32)
    levels = [
        unit((whole[:, :d] + noise * rng.normal(size=(n, d))).astype(np.float32)) for d in DIMS
    ]
    return Side(levels, np.arange(n) % 7)


def test_ranks_count_ties_against_the_right_item() -> None:
    scores = np.array([[0.5, 0.9, 0.5], [0.1, 0.2, 0.3]], np.float32)
    right = np.array([[True, False, False], [False, False, False]])
    assert first_right(scores, right).tolist() == [2, 3]


def test_recall_is_the_share_of_ranks_below_k() -> None:
    assert recall_at(np.array([0, 4, 9, 20])) == {"R@1": 0.25, "R@5": 0.5, "R@10": 0.75}


def test_early_ranks_match_plain_sorting() -> None:
    queries, gallery = _side(3, 1, noise=0.5), _side(60, 2)
    ranks = early_ranks(queries, gallery)
    for q in range(3):
        exact = np.argsort(-(gallery.levels[-1] @ queries.levels[-1][q]))[:10]
        early = np.argsort(-(gallery.levels[0] @ queries.levels[0][q])).tolist()
        assert sorted(ranks[q]) == sorted(early.index(row) for row in exact)


def test_the_width_for_a_recall_reaches_it_and_one_less_does_not() -> None:
    ranks = early_ranks(_side(40, 1, noise=0.5), _side(300, 2))
    width = width_for(ranks, 0.9)
    assert (ranks < width).mean() >= 0.9 > (ranks < width - 1).mean()
    assert ann_recall(ranks)["1000"] == 1.0


def test_plans_that_keep_everything_equal_the_finest_level() -> None:
    queries, gallery = _side(30, 1, noise=0.5), _side(200, 2)
    plans = plan_recalls(queries, gallery, Widths((200, 200), (200, 200)))
    finest = level_recalls(queries, gallery)[-1]
    assert plans == {"cascade": finest, "funnel": finest}


def test_a_narrow_cascade_loses_what_level_1_dropped() -> None:
    queries, gallery = _side(30, 1, noise=3.0), _side(200, 2)
    narrow = plan_recalls(queries, gallery, Widths((1, 1), (1, 1)))["cascade"]
    assert narrow["R@10"] == pytest.approx(level_recalls(queries, gallery)[0]["R@1"])


def test_a_query_does_not_find_itself() -> None:
    gallery = _side(20, 1)
    queries = Side(gallery.levels, np.arange(20), np.arange(20))
    alone = Side(gallery.levels, np.arange(20))
    assert level_recalls(queries, alone)[-1] == {"R@1": 0.0, "R@5": 0.0, "R@10": 0.0}

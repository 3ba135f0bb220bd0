"""Ridge regression and main directions against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from hivlp.models.levels import FloatArray
from hivlp.models.training.closed_form import (
    main_directions,
    ridge,
    score_map,
    standard_directions,
)
from hivlp.models.training.distil import level_targets


def _rows(n: int = 50, d: int = 6) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(n, d)) * np.arange(1, d + 1) + 3).astype(np.float32)


def test_main_directions_are_orthonormal_and_ordered() -> None:
    rows = _rows()
    mean, directions = main_directions(rows, 4)
    assert directions.shape == (6, 4)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(directions.T @ directions, np.eye(4), atol=1e-5)
    spread = ((rows - mean) @ directions).std(0)
    assert (np.diff(spread) < 0).all()


def test_few_directions_of_many_features_are_nearly_the_exact_ones() -> None:
    rng = np.random.default_rng(1)
    spread = (1 / np.arange(1, 1101)).astype(np.float32)
    turn = np.linalg.qr(rng.normal(size=(1100, 1100)))[0].astype(np.float32)
    rows = (rng.normal(size=(300, 1100)).astype(np.float32) * spread) @ turn
    _, nearly = main_directions(rows, 20)
    _, again = main_directions(rows, 20)
    np.testing.assert_array_equal(nearly, again)
    exact = np.linalg.svd(rows - rows.mean(0))[2][:20].T
    held = np.linalg.norm(nearly.T @ exact, axis=0)  # 1 where the subspace holds the direction
    assert held.min() > 0.99


def test_directions_point_the_same_way_every_time() -> None:
    _, directions = main_directions(_rows(), 6)
    largest = np.abs(directions).argmax(0)
    assert (directions[largest, np.arange(6)] > 0).all()


def test_standardised_rows_have_length_1_on_average() -> None:
    rows = _rows()
    mean, basis = standard_directions(rows, 6)
    np.testing.assert_allclose(np.square((rows - mean) @ basis).sum(1).mean(), 1.0, rtol=1e-4)
    _, fewer = standard_directions(rows, 2)
    assert fewer.shape == (6, 2)


def test_a_feature_that_never_changes_is_no_trouble() -> None:
    rows = _rows()
    rows[:, 0] = 7
    mean, basis = standard_directions(rows, 3)
    assert np.isfinite((rows - mean) @ basis).all()
    for most in (3, 6):
        mean, basis = standard_directions(rows, most)
        unseen = rows[:1].copy()
        unseen[0, 0] = 9  # where it changes after all, it must not drown the others
        assert np.abs((unseen - mean) @ basis).max() < 10


def test_ridge_solves_its_normal_equations() -> None:
    rows = _rows()
    targets = rows @ np.ones((6, 2), np.float32) + 1
    weight, bias = ridge(rows, targets, 0.5)
    wide = np.concatenate([rows, np.ones((50, 1), np.float32)], 1).astype(np.float64)
    solved = np.concatenate([weight.T, bias[None]]).astype(np.float64)
    gradient = wide.T @ (wide @ solved - targets) + 0.5 * solved
    assert np.abs(gradient).max() < 1e-1
    exact, shift = ridge(rows, targets, 1e-9)
    np.testing.assert_allclose(rows @ exact.T + shift, targets, atol=1e-3)


def _unit(rows: FloatArray) -> FloatArray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def test_a_score_map_is_nearly_the_least_squares_of_centred_scores() -> None:
    gallery, dim = _unit(_rows(40_000) - 3), 3
    level = _unit(gallery[:, :dim])
    queries = np.eye(6, dtype=np.float32)
    wanted = (gallery - gallery.mean(0)) @ queries.T  # (40000, 6) scores less their mean
    slow = np.linalg.lstsq(level - level.mean(0), wanted, rcond=None)[0]
    np.testing.assert_allclose(score_map([gallery], dim, 0.0), slow, atol=1e-3)
    np.testing.assert_allclose(score_map([gallery, gallery], dim, 0.0), slow, atol=1e-3)


def test_targets_order_a_level_more_like_full_scores_than_prefixes_do() -> None:
    rng = np.random.default_rng(2)
    turn = rng.normal(size=(6, 24))  # what is left out of a level depends on what is kept
    gallery = _unit((rng.normal(size=(500, 6)) @ turn).astype(np.float32))
    queries, dim = _unit(rng.normal(size=(20, 24)).astype(np.float32)), 12
    exact, level = queries @ gallery.T, _unit(gallery[:, :dim])
    likeness = []
    for penalty in (0.01, 0.0):
        (target,) = level_targets(queries, [gallery], [dim], penalty)
        scores = target.numpy() @ level.T
        np.testing.assert_allclose(np.linalg.norm(target.numpy(), axis=1), 1.0, rtol=1e-5)
        pairs = zip(scores, exact, strict=True)
        likeness.append(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs]))
    np.testing.assert_allclose(target.numpy(), _unit(queries[:, :dim]), atol=1e-6)
    assert likeness[0] > 0.9 > likeness[1]


@pytest.mark.parametrize("gallery", [_unit(_rows(1)), np.ones((4, 6), np.float32)])
def test_a_score_map_of_rows_that_tell_nothing_is_the_plain_prefix(gallery: FloatArray) -> None:
    found = score_map([gallery], 5, 0.01)
    np.testing.assert_allclose(found / found[0, 0], np.eye(5, 6), atol=1e-5)

"""Ridge regression and main directions against their definitions."""

from __future__ import annotations

import numpy as np

from hivlp.models.training.closed_form import main_directions, ridge, standard_directions


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

"""Vectors of any length and type made unit vectors."""

from __future__ import annotations

import numpy as np
import pytest

from hivlp.index.build.vectors.units import unit_rows
from tests.fakes import unit_vectors


@pytest.mark.parametrize(
    ("dtype", "scales", "error"),
    [
        (np.float16, (1e-2, 1, 1e2), 1e-3),
        (np.float32, (1e-30, 1, 1e30), 1e-6),
        (np.float64, (1e-200, 1, 1e200), 1e-6),
    ],
)
def test_directions_and_lengths_are_told_whatever_the_scale(
    dtype: type, scales: tuple[float, ...], error: float
) -> None:
    wanted = unit_vectors(len(scales), 16)
    given = (wanted.astype(np.float64) * np.array(scales)[:, None]).astype(dtype)
    units = unit_rows(given)
    assert units.good.all()
    assert units.vectors.dtype == np.float32
    np.testing.assert_allclose(units.vectors, wanted, atol=error)
    np.testing.assert_allclose(units.lengths, scales, rtol=error)
    assert units.vectors is not given


def test_vectors_without_a_direction_are_told_apart() -> None:
    given = np.ones((5, 4), np.float32)
    given[1], given[2, 3], given[3, 0] = 0, np.nan, np.inf
    units = unit_rows(given)
    assert units.good.tolist() == [True, False, False, False, True]
    assert units.reason(1) == "a vector of zeros"
    assert units.reason(2) == units.reason(3) == "a vector with NaN or Inf"
    np.testing.assert_array_equal(units.vectors[[0, 4]], 0.5)


def test_the_given_numbers_are_left_alone() -> None:
    given = np.full((2, 4), 3, np.float32)
    unit_rows(given)
    assert (given == 3).all()


def test_the_largest_doubles_there_are_still_have_a_direction() -> None:
    units = unit_rows(np.full((1, 4), np.finfo(np.float64).max))
    assert units.good.all()
    np.testing.assert_allclose(units.vectors, 0.5)

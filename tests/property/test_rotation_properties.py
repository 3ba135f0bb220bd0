"""The nested rotation: inner products are kept, and prefixes become better views."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.index.build.vectors.rotation import (
    ORTHOGONAL,
    Rotation,
    check_orthogonal,
    fit_rotation,
    level_dims,
)
from hivlp.index.errors import BuildError
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import unit_vectors

TASTE = settings(max_examples=25, deadline=None, derandomize=True)
KINDS = ("random", "clustered", "low-rank", "one direction")


def vectors_of(kind: str, count: int, dim: int, seed: int) -> FloatArray:
    """(count, dim) float32 unit vectors in a basis that says nothing of their structure."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, dim)).astype(np.float32)
    if kind == "random":
        return normalise(noise)
    if kind == "clustered":
        centres = rng.standard_normal((6, dim)).astype(np.float32)
        return normalise(centres[rng.integers(0, 6, count)] + 0.3 * noise)
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0].astype(np.float32)
    kept = 1 if kind == "one direction" else max(1, dim // 4)
    return normalise(noise[:, :kept] @ basis[:kept] + np.float32(1e-3) * noise)


@TASTE
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(2, 300),
    dim=st.integers(1, 96),
    seed=st.integers(0, 1_000),
)
def test_every_inner_product_is_kept(kind: str, count: int, dim: int, seed: int) -> None:
    vectors = vectors_of(kind, count, dim, seed)
    turned = fit_rotation([vectors[: count // 2 + 1]], dim)(vectors)
    np.testing.assert_allclose(turned @ turned.T, vectors @ vectors.T, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), 1, atol=1e-5)


@TASTE
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(20, 300),
    dim=st.integers(2, 96),
    seed=st.integers(0, 1_000),
)
def test_the_ranking_is_that_of_the_vectors_as_they_came(
    kind: str, count: int, dim: int, seed: int
) -> None:
    vectors = vectors_of(kind, count, dim, seed)
    queries = vectors_of(kind, 5, dim, seed + 1)
    rotation = fit_rotation([vectors], dim)
    before = queries @ vectors.T
    after = rotation(queries) @ rotation(vectors).T
    for exact, found in zip(before, np.argsort(-after, axis=1, kind="stable"), strict=True):
        falls = np.diff(exact[found])
        assert falls.max() <= 1e-5, "rows may change places only where their cosines are equal"


@pytest.mark.parametrize("kind", ["clustered", "low-rank"])
@pytest.mark.parametrize("dim", [32, 96])
def test_prefixes_find_more_than_those_of_the_vectors_as_they_came(kind: str, dim: int) -> None:
    vectors, queries = vectors_of(kind, 2_000, dim, 1), vectors_of(kind, 50, dim, 2)
    rotation = fit_rotation([vectors], dim)
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    for part in (dim // 8, dim // 4, dim // 2):
        shares = []
        for turn in (rotation, Rotation(None, np.ones(dim), 1)):
            scores = nested_prefix(turn(queries), part) @ nested_prefix(turn(vectors), part).T
            found = np.argsort(-scores, axis=1)[:, :10]
            pairs = zip(found, best, strict=True)
            shares.append(np.mean([len(np.intersect1d(a, b)) for a, b in pairs]) / 10)
        assert shares[0] > shares[1], (part, shares)


@TASTE
@given(kind=st.sampled_from(KINDS), dim=st.integers(2, 64), seed=st.integers(0, 1_000))
def test_no_other_directions_hold_more_of_the_vectors(kind: str, dim: int, seed: int) -> None:
    vectors = vectors_of(kind, 200, dim, seed)
    turned = fit_rotation([vectors], dim)(vectors)
    held = np.cumsum((turned.astype(np.float64) ** 2).mean(axis=0))
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]
    other = np.cumsum(((vectors @ basis) ** 2).mean(axis=0))
    assert (held >= other - 1e-5).all()
    assert (held >= np.cumsum((vectors.astype(np.float64) ** 2).mean(axis=0)) - 1e-5).all()


def test_the_same_rows_give_the_same_rotation_and_the_shares_that_its_prefixes_hold() -> None:
    vectors = vectors_of("low-rank", 500, 32, 3)
    parts = [vectors[:123], vectors[123:400], vectors[400:]]
    rotation, again = fit_rotation(parts, 32), fit_rotation(parts, 32)
    assert rotation.matrix is not None
    assert np.array_equal(rotation.matrix, again.matrix)  # type: ignore[arg-type]
    held = (rotation(vectors)[:, :8] ** 2).sum(axis=1).mean()
    shares = rotation.shares((8, 32))
    assert shares == (pytest.approx(held, abs=1e-5), 1.0)
    assert rotation.rows == 500


def test_vectors_that_nest_already_are_only_measured() -> None:
    vectors = unit_vectors(200, 16)
    rotation = fit_rotation([vectors], 16, rotate=False)
    assert rotation.matrix is None
    assert rotation(vectors) is vectors
    assert rotation.shares((4,)) == (pytest.approx((vectors[:, :4] ** 2).sum(1).mean(), abs=1e-5),)


def test_rows_without_a_direction_do_not_count() -> None:
    vectors = unit_vectors(100, 8)
    vectors[3], vectors[5] = np.nan, 0
    assert fit_rotation([vectors], 8).rows == 98
    with pytest.raises(BuildError, match="all are zero, NaN or Inf"):
        fit_rotation([np.zeros((10, 8), np.float32)], 8)


def test_a_matrix_that_is_not_orthogonal_is_refused() -> None:
    matrix = np.eye(8, dtype=np.float32)
    check_orthogonal(matrix)
    matrix[0, 1] = 3 * ORTHOGONAL
    with pytest.raises(BuildError, match="not orthogonal: off by"):
        check_orthogonal(matrix)
    matrix[0, 1] = np.nan
    with pytest.raises(BuildError, match="not orthogonal"):
        check_orthogonal(matrix)


def test_levels_are_those_asked_for_or_such_as_fit_the_dimension() -> None:
    assert level_dims(None, 768) == (128, 300, 768)
    assert level_dims(None, 300) == (128, 300)
    assert level_dims(None, 128) == (64, 128)
    assert level_dims(None, 64) == (32, 64)
    assert level_dims(None, 8) == (8,)
    assert level_dims((96, 24), 512) == (24, 96, 512)
    assert level_dims((512,), 512) == (512,)
    for wrong in ((0,), (513,)):
        with pytest.raises(BuildError, match="from 1 to 512"):
            level_dims(wrong, 512)

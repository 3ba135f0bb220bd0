"""The kernel that scores every row: half precision, equal rows, prefixes of zeros."""

from __future__ import annotations

import numpy as np

from hivlp.index.backends.rows import LevelRows, inverse_norms
from tests.fakes import unit_vectors


def test_half_precision_rows_score_nearly_as_full_ones() -> None:
    vectors, query = unit_vectors(20_000, 12), unit_vectors(1, 12, seed=1)
    full = LevelRows(vectors, 8, inverse_norms(vectors, 8))
    halved = vectors.astype(np.float16)
    half = LevelRows(halved, 8, inverse_norms(halved, 8))
    some = np.array([3, 19_999, 5], dtype=np.int64)
    for a, b in (
        (full.scan(query[0, :8]), half.scan(query[0, :8])),
        (full.score(query[0, :8], some), half.score(query[0, :8], some)),
        (full.scan_many(query[:, :8]), half.scan_many(query[:, :8])),
        (full.vectors(some), half.vectors(some)),
    ):
        assert b.dtype == np.float32
        np.testing.assert_allclose(a, b, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(half.vectors(some), axis=1), 1, atol=1e-6)
    assert half.score(query[0, :8], some).tolist() == half.scan(query[0, :8])[some].tolist()


def test_equal_rows_score_equally_wherever_they_lie() -> None:
    for dim in (3, 7, 33, 128, 300, 768):
        rows = LevelRows(np.repeat(unit_vectors(1, dim), 1003, axis=0), dim)
        query = unit_vectors(1, dim, seed=1)[0]
        scores = {*rows.scan(query).tolist(), *rows.score(query, np.array([5, 1002])).tolist()}
        assert len(scores) == 1


def test_a_zero_prefix_scores_nothing_and_is_never_nan() -> None:
    vectors = np.zeros((3, 8), dtype=np.float32)
    vectors[:, 7] = 1.0
    rows = LevelRows(vectors, 4, inverse_norms(vectors, 4))
    assert rows.scan(unit_vectors(1, 4)[0]).tolist() == [0.0, 0.0, 0.0]
    assert rows.vectors(np.array([1])).tolist() == [[0.0] * 4]

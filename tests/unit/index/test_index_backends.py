"""One body for every backend: each answers as the slow obvious search does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends.choose import BACKENDS, open_level, write_level
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.level_index import LevelIndex, SearchParams
from hivlp.models.errors import InputError, MissingExtra
from hivlp.models.levels import FloatArray, nested_prefix
from tests.fakes import unit_vectors

PARAMS = SearchParams()
Open = Callable[[FloatArray, int], LevelIndex]


def oracle(vectors: FloatArray, query: FloatArray, k: int) -> tuple[RowArray, FloatArray]:
    """Sort every row by score, then by row, in float64."""
    scores = vectors.astype(np.float64) @ query.astype(np.float64)
    order = sorted(range(len(vectors)), key=lambda row: (-round(scores[row], 9), row))[:k]
    return np.array(order, dtype=np.int64), scores[order]


@pytest.fixture(params=BACKENDS)
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    def opened(vectors: FloatArray, dim: int) -> LevelIndex:
        inverse = inverse_norms(vectors, dim) if dim < vectors.shape[1] else None
        rows = LevelRows(vectors, dim, inverse)
        file = tmp_path / "level.faiss"
        write_level(file, rows)
        return open_level(1, rows, file, request.param)

    return opened


@pytest.mark.parametrize("dim", [4, 12, 16])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_a_search_equals_the_oracle_on_every_prefix(open_backend: Open, dim: int, k: int) -> None:
    vectors = unit_vectors(500, 16, seed=1)
    queries = unit_vectors(5, dim, seed=2)
    level = open_backend(vectors, dim)
    for query, found in zip(queries, level.search(queries, k, PARAMS, None), strict=True):
        rows, scores = oracle(nested_prefix(vectors, dim), query, k)
        assert found.rows.tolist() == rows.tolist()
        np.testing.assert_allclose(found.scores, scores, atol=2e-6)


@pytest.mark.parametrize("k", [499, 500, 501, 10_000])
def test_more_than_everything_gives_everything_once(open_backend: Open, k: int) -> None:
    level = open_backend(unit_vectors(500, 8), 8)
    found = level.search(unit_vectors(1, 8, seed=3), k, PARAMS, None)[0]
    assert len(found) == min(k, 500)
    assert len(set(found.rows.tolist())) == len(found)
    assert found.rows.min() >= 0
    assert np.isfinite(found.scores).all()


def test_ties_go_to_the_lower_row_also_at_the_boundary(open_backend: Open) -> None:
    vectors = np.tile(unit_vectors(5, 8), (60, 1))  # each vector 60 times
    query = vectors[:1]
    found = open_backend(vectors, 8).search(query, 10, PARAMS, None)[0]
    assert found.rows.tolist() == [5 * i for i in range(10)]
    assert len(set(found.scores.tolist())) == 1


def test_all_rows_equal_gives_the_first_rows(open_backend: Open) -> None:
    vectors = np.repeat(unit_vectors(1, 8), 300, axis=0)
    found = open_backend(vectors, 8).search(vectors[:1], 3, PARAMS, None)[0]
    assert found.rows.tolist() == [0, 1, 2]


def test_scoring_given_rows_ranks_them_as_a_search_would(open_backend: Open) -> None:
    vectors = unit_vectors(400, 16, seed=4)
    queries = unit_vectors(2, 12, seed=5)
    level = open_backend(vectors, 12)
    everything = level.search(queries, 400, PARAMS, None)
    given = [np.random.default_rng(i).permutation(400).astype(np.int64) for i in range(2)]
    for found, scored in zip(everything, level.score(queries, given), strict=True):
        assert found.rows.tolist() == scored.rows.tolist()
        assert found.scores.tolist() == scored.scores.tolist()


def test_scoring_no_rows_finds_nothing(open_backend: Open) -> None:
    level = open_backend(unit_vectors(50, 8), 8)
    nothing = np.empty(0, dtype=np.int64)
    assert len(level.score(unit_vectors(1, 8), [nothing])[0]) == 0


def test_a_batch_answers_as_one_query_at_a_time(open_backend: Open) -> None:
    level = open_backend(unit_vectors(300, 64, seed=6), 64)
    queries = unit_vectors(100, 64, seed=7)  # over the number from which faiss uses BLAS
    together = level.search(queries, 10, PARAMS, None)
    for i, found in enumerate(together):
        alone: Candidates = level.search(queries[i : i + 1], 10, PARAMS, None)[0]
        assert found.rows.tolist() == alone.rows.tolist()
        assert found.scores.tolist() == alone.scores.tolist()


def test_threads_searching_at_once_get_their_own_answers(open_backend: Open) -> None:
    level = open_backend(unit_vectors(2_000, 32, seed=6), 32)
    queries = unit_vectors(64, 32, seed=7)
    alone = [level.search(queries[i : i + 1], 10, PARAMS, None)[0] for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: level.search(queries[i : i + 1], 10, PARAMS, None)[0], range(64))
        for one, other in zip(found, alone, strict=True):
            assert one.rows.tolist() == other.rows.tolist()


def test_an_empty_level_finds_nothing(open_backend: Open) -> None:
    level = open_backend(np.empty((0, 8), dtype=np.float32), 8)
    assert level.size == 0
    assert len(level.search(unit_vectors(1, 8), 5, PARAMS, None)[0]) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_is_refused(open_backend: Open, bad: float) -> None:
    level = open_backend(unit_vectors(50, 8), 8)
    query = unit_vectors(1, 8)
    query[0, 3] = bad
    with pytest.raises(InputError, match="NaN or Inf"):
        level.search(query, 5, PARAMS, None)
    with pytest.raises(InputError, match="NaN or Inf"):
        level.score(query, [np.arange(3)])


def test_a_query_of_another_dimension_is_refused(open_backend: Open) -> None:
    level = open_backend(unit_vectors(50, 8), 8)
    with pytest.raises(InputError, match=r"\(n, 8\)"):
        level.search(unit_vectors(1, 16), 5, PARAMS, None)


def test_a_level_says_what_it_is(open_backend: Open) -> None:
    level = open_backend(unit_vectors(50, 8), 4)
    assert (level.level, level.dim, level.size) == (1, 4, 50)
    assert level.capabilities.methods == {"scan", "rescore"}
    assert level.capabilities.max_k is None


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


@pytest.mark.parametrize("size", [0, 20, 200])
def test_a_file_that_is_no_flat_index_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "level1.faiss"
    write_level(file, LevelRows(unit_vectors(50, 8), 8))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="not a readable FAISS index"):
        open_level(1, LevelRows(unit_vectors(50, 8), 8), file, "faiss-cpu")


def test_without_faiss_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hivlp.index.backends as backends

    monkeypatch.delitem(sys.modules, "hivlp.index.backends.faiss_cpu", raising=False)
    monkeypatch.delattr(backends, "faiss_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "faiss", None)
    rows = LevelRows(unit_vectors(5, 8), 8)
    with pytest.raises(MissingExtra, match=r"pip install 'hivlp\[cpu\]'"):
        open_level(1, rows, tmp_path / "level1.faiss", "faiss-cpu")
    assert open_level(1, rows, None, "faiss-cpu").size == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_faiss_file_that_cannot_be_written_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="full"):
        write_level(Path("/dev/full"), LevelRows(unit_vectors(5_000, 16), 16))

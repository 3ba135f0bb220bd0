"""One body for every backend: each answers as the slow obvious search does.

Exact kinds equal the oracle; lossy ones (codes, a narrow beam) reach a recall floor, and what they
return is scored and ranked exactly. The kind `gpu` needs a device; `gpu-fake` runs the same code
without one.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends import exact
from hivlp.index.backends.choose import codec_for, open_level, write_graph, write_level
from hivlp.index.backends.rows import LevelRows
from hivlp.index.candidates import Candidates
from hivlp.index.level_index import CODECS, FAST_SCAN, Codec
from hivlp.index.masks import RowMask
from hivlp.models.errors import InputError, MissingExtra
from hivlp.models.levels import nested_prefix
from tests.fakes import unit_vectors
from tests.opened_levels import CPU, EXACT, GPU, PARAMS, Open, opener, oracle, recall


@pytest.fixture(params=[*EXACT, GPU])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, tmp_path)


@pytest.fixture(params=[*CPU, GPU])
def open_any(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, tmp_path)


@pytest.mark.parametrize("dim", [4, 12, 16])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_a_search_equals_the_oracle_on_every_prefix(open_backend: Open, dim: int, k: int) -> None:
    vectors = unit_vectors(500, 16, seed=1)
    queries = unit_vectors(5, dim, seed=2)
    level = open_backend(vectors, dim)
    for query, found in zip(queries, level.search(queries, k, PARAMS, None, None), strict=True):
        rows, scores = oracle(nested_prefix(vectors, dim), query, k)
        assert found.rows.tolist() == rows.tolist()
        np.testing.assert_allclose(found.scores, scores, atol=2e-6)


@pytest.mark.parametrize("k", [499, 500, 501, 10_000])
def test_more_than_everything_gives_everything_once(open_any: Open, k: int) -> None:
    level = open_any(unit_vectors(500, 8), 8)
    found = level.search(unit_vectors(1, 8, seed=3), k, PARAMS, None, None)[0]
    assert len(found) == min(k, 500)
    assert len(set(found.rows.tolist())) == len(found)
    assert found.rows.min() >= 0
    assert np.isfinite(found.scores).all()


def test_ties_go_to_the_lower_row_also_at_the_boundary(open_any: Open) -> None:
    vectors = np.tile(unit_vectors(5, 8), (60, 1))  # each vector 60 times
    query = vectors[:1]
    found = open_any(vectors, 8).search(query, 10, PARAMS, None, None)[0]
    assert found.rows.tolist() == [5 * i for i in range(10)]
    assert len(set(found.scores.tolist())) == 1


def test_all_rows_equal_gives_the_first_rows(open_any: Open) -> None:
    vectors = np.repeat(unit_vectors(1, 8), 300, axis=0)
    found = open_any(vectors, 8).search(vectors[:1], 3, PARAMS, None, None)[0]
    assert found.rows.tolist() == [0, 1, 2]


def test_scoring_given_rows_ranks_them_as_a_search_would(open_any: Open) -> None:
    vectors = unit_vectors(400, 16, seed=4)
    queries = unit_vectors(2, 12, seed=5)
    level = open_any(vectors, 12)
    everything = level.search(queries, 400, PARAMS, None, None)
    given = [np.random.default_rng(i).permutation(400).astype(np.int64) for i in range(2)]
    for found, scored in zip(everything, level.score(queries, given), strict=True):
        assert found.rows.tolist() == scored.rows.tolist()
        assert found.scores.tolist() == scored.scores.tolist()


def test_scoring_no_rows_finds_nothing(open_any: Open) -> None:
    level = open_any(unit_vectors(50, 8), 8)
    nothing = np.empty(0, dtype=np.int64)
    assert len(level.score(unit_vectors(1, 8), [nothing])[0]) == 0


def test_a_batch_answers_as_one_query_at_a_time(open_any: Open) -> None:
    level = open_any(unit_vectors(300, 64, seed=6), 64)
    queries = unit_vectors(100, 64, seed=7)  # over the number from which faiss uses BLAS
    together = level.search(queries, 10, PARAMS, None, None)
    for i, found in enumerate(together):
        alone: Candidates = level.search(queries[i : i + 1], 10, PARAMS, None, None)[0]
        assert found.rows.tolist() == alone.rows.tolist()
        assert found.scores.tolist() == alone.scores.tolist()


def test_threads_searching_at_once_get_their_own_answers(open_any: Open) -> None:
    level = open_any(unit_vectors(2_000, 32, seed=6), 32)
    queries = unit_vectors(64, 32, seed=7)
    alone = [level.search(queries[i : i + 1], 10, PARAMS, None, None)[0] for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda i: level.search(queries[i : i + 1], 10, PARAMS, None, None)[0], range(64)
        )
        for one, other in zip(found, alone, strict=True):
            assert one.rows.tolist() == other.rows.tolist()


def test_an_empty_level_finds_nothing(open_any: Open) -> None:
    level = open_any(np.empty((0, 8), dtype=np.float32), 8)
    assert level.size == 0
    assert len(level.search(unit_vectors(1, 8), 5, PARAMS, None, None)[0]) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_is_refused(open_any: Open, bad: float) -> None:
    level = open_any(unit_vectors(50, 8), 8)
    query = unit_vectors(1, 8)
    query[0, 3] = bad
    with pytest.raises(InputError, match="NaN or Inf"):
        level.search(query, 5, PARAMS, None, None)
    with pytest.raises(InputError, match="NaN or Inf"):
        level.score(query, [np.arange(3)])


def test_a_query_of_another_dimension_is_refused(open_any: Open) -> None:
    level = open_any(unit_vectors(50, 8), 8)
    with pytest.raises(InputError, match=r"\(n, 8\)"):
        level.search(unit_vectors(1, 16), 5, PARAMS, None, None)


@pytest.mark.parametrize("kind", [*CPU, GPU])
def test_a_level_says_what_it_is_and_what_it_can_do(kind: str, tmp_path: Path) -> None:
    level = opener(kind, tmp_path)(unit_vectors(1_100, 8), 4)
    assert (level.level, level.dim, level.size) == (1, 4, 1_100)
    able = level.capabilities
    assert able.methods == {"graph" if kind == "graph" else "scan", "rescore"}
    assert able.max_k is None
    assert able.mask == (kind not in FAST_SCAN)
    assert able.entry_rows == (kind == "graph")
    assert able.exact == (kind in ("numpy", "flat"))


MASKABLE = ("numpy", "flat", "sq8", "gpu-fake", GPU)


@pytest.mark.parametrize("kind", MASKABLE)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("k", [1, 10, 5_000])
def test_under_a_mask_the_best_allowed_rows_are_found_all_k_of_them(
    kind: str, share: float, k: int, tmp_path: Path
) -> None:
    vectors = unit_vectors(12_000, 16, seed=1)
    level = opener(kind, tmp_path)(vectors, 16)
    mask = RowMask.of(np.random.default_rng(0).random(12_000) < share)
    query = unit_vectors(1, 16, seed=2)
    found = level.search(query, k, PARAMS, None, mask)[0]
    assert len(found) == min(k, mask.count)
    assert mask.allowed[found.rows].all()
    best, scores = oracle(vectors[mask.rows], query[0], k)
    rows = mask.rows[best]
    if kind == "sq8" and mask.count > 5_000:  # fewer are scored one by one, exactly
        assert len(np.intersect1d(found.rows, rows)) >= 0.9 * len(rows)
    else:
        np.testing.assert_allclose(found.scores, scores, atol=2e-6)
        assert found.rows[:10].tolist() == rows[:10].tolist()


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 65])
@pytest.mark.parametrize("allowed", [None, 0.0, 0.05, 0.6])
def test_in_turns_the_same_is_found_with_a_pause_after_every_slice(
    rows: int, allowed: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "SLICE_NUMBERS", 16 * 7)  # seven rows at a time
    vectors = unit_vectors(max(rows, 2), 16, seed=3)[:rows]
    vectors[rows // 2 :] = vectors[: rows - rows // 2]  # every score twice
    level = LevelRows(vectors, 16)
    draws = np.random.default_rng(rows).random(rows)
    mask = None if allowed is None else RowMask.of(draws < allowed)
    pauses: list[int] = []
    for query in unit_vectors(3, 16, seed=4):
        whole = exact.best_rows(level, query, 9, mask)
        found = exact.best_rows_in_turns(level, query, 9, lambda: pauses.append(1), mask)
        np.testing.assert_array_equal(found.rows, whole.rows)
        np.testing.assert_array_equal(found.scores, whole.scores)
    assert len(pauses) == 3 * -(-rows // 7)


@pytest.mark.parametrize("kind", sorted(FAST_SCAN))
def test_what_takes_no_mask_says_so_when_given_one(kind: str, tmp_path: Path) -> None:
    level = opener(kind, tmp_path)(unit_vectors(1_100, 8), 8)
    mask = RowMask.of(np.ones(1_100, dtype=np.bool_))
    with pytest.raises(AssertionError, match="no mask"):
        level.search(unit_vectors(1, 8), 5, PARAMS, None, mask)


def test_a_mask_knows_its_rows_and_bits() -> None:
    mask = RowMask.of(np.array([True, False, False, True, False, False, False, False, True]))
    assert (mask.size, mask.count, mask.rows.tolist()) == (9, 3, [0, 3, 8])
    assert mask.bits.tolist() == [0b1001, 0b1]


@pytest.mark.parametrize(
    ("kind", "floor"),
    [("sq8", 0.99), ("pq64x4fs", 0.90), ("rabitqfs", 0.75)],  # observed 1.0, 1.0, 0.82
)
def test_lossy_codes_find_most_of_the_best_and_score_them_exactly(
    kind: str, floor: float, tmp_path: Path
) -> None:
    vectors, queries = unit_vectors(4_000, 32, seed=1), unit_vectors(50, 32, seed=2)
    level = opener(kind, tmp_path)(vectors, 32)
    assert recall(level, vectors, queries) >= floor
    wide = level.search(queries, 400, PARAMS, None, None)
    for query, found in zip(queries, wide, strict=True):
        np.testing.assert_allclose(found.scores, vectors[found.rows] @ query, atol=2e-6)
        pairs = list(zip((-found.scores).tolist(), found.rows.tolist(), strict=True))
        assert pairs == sorted(pairs)


@pytest.mark.parametrize("codec", CODECS)
def test_numbers_that_are_not_finite_are_never_written(codec: Codec, tmp_path: Path) -> None:
    vectors = unit_vectors(2_000, 8)
    vectors[1_234, 3] = np.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        write_level(tmp_path / "level.faiss", LevelRows(vectors, 8), codec)
    with pytest.raises(ValueError, match="NaN or Inf"):
        write_graph(tmp_path / "level.hnsw", LevelRows(vectors, 8))
    assert list(tmp_path.iterdir()) == []


def test_too_few_rows_have_no_fast_scan_codes(tmp_path: Path) -> None:
    assert codec_for("pq64x4fs", 999) == "flat"
    assert codec_for("pq64x4fs", 1_000) == "pq64x4fs"
    with pytest.raises(ValueError, match="at least 1000 rows"):
        write_level(tmp_path / "level.faiss", LevelRows(unit_vectors(999, 8), 8), "pq64x4fs")


@pytest.mark.parametrize("codec", sorted(FAST_SCAN))
@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 100, 128, 300])
def test_any_dimension_can_be_a_fast_scan_level(codec: Codec, dim: int, tmp_path: Path) -> None:
    level = opener(codec, tmp_path)(unit_vectors(1_200, dim), dim)
    assert not level.capabilities.exact
    assert len(level.search(unit_vectors(1, dim), 7, PARAMS, None, None)[0]) == 7


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

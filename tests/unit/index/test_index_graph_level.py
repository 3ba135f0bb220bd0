"""A level as a graph: beams, entry rows, the rows file it walks over, and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends.choose import (
    link_levels,
    open_graph,
    open_graphs,
    open_level,
    write_graph,
    write_level,
)
from hivlp.index.backends.faiss_graph import in_place
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.level_index import SearchParams
from hivlp.models.levels import normalise
from tests.fakes import unit_vectors
from tests.opened_levels import opener, oracle, recall


def test_a_graph_finds_more_with_a_wider_beam(tmp_path: Path) -> None:
    vectors, queries = unit_vectors(4_000, 32, seed=1), unit_vectors(50, 32, seed=2)
    level = opener("graph", tmp_path)(vectors, 32)
    narrow, wide = (recall(level, vectors, queries, ef=ef) for ef in (10, 400))
    assert narrow < wide
    assert wide >= 0.98  # observed 1.0
    assert recall(level, vectors, queries) == 1.0


def test_a_graph_entered_near_the_answer_needs_a_narrower_beam(tmp_path: Path) -> None:
    vectors, queries = unit_vectors(4_000, 32, seed=1), unit_vectors(50, 32, seed=2)
    level = opener("graph", tmp_path)(vectors, 32)
    truth = [oracle(vectors, query, 10)[0] for query in queries]
    params = SearchParams(ef=10)
    found = level.search(queries, 10, params, [t[5:] for t in truth], None)
    shares = [len(np.intersect1d(f.rows, t)) / 10 for f, t in zip(found, truth, strict=True)]
    assert np.mean(shares) >= recall(level, vectors, queries, ef=10) + 0.05
    nowhere = level.search(queries, 10, params, [np.empty(0, np.int64)] * 50, None)
    cold = level.search(queries, 10, params, None, None)
    assert [f.rows.tolist() for f in nowhere] == [f.rows.tolist() for f in cold]


def test_a_graph_returns_unique_rows_whatever_it_is_entered_at(tmp_path: Path) -> None:
    vectors = np.repeat(unit_vectors(40, 16), 50, axis=0)  # equal rows crowd each other out
    level = opener("graph", tmp_path)(vectors, 16)
    for k in (1, 10, 60, 1_500):
        entry = np.arange(0, 1_999, 7, dtype=np.int64)
        for entries in (None, [entry]):
            found = level.search(vectors[777:778], k, SearchParams(ef=20), entries, None)[0]
            assert len(found) == len(set(found.rows.tolist())) == k
            pairs = list(zip((-found.scores).tolist(), found.rows.tolist(), strict=True))
            assert pairs == sorted(pairs)


def test_threads_entering_a_graph_at_once_get_their_own_answers(tmp_path: Path) -> None:
    vectors, queries = unit_vectors(3_000, 32, seed=6), unit_vectors(64, 32, seed=7)
    level = opener("graph", tmp_path)(vectors, 32)

    def entered(i: int) -> list[int]:
        entry = [np.arange(i, 3_000, 300, dtype=np.int64)]
        params = SearchParams(ef=40)
        rows: list[int] = level.search(queries[i : i + 1], 10, params, entry, None)[0].rows.tolist()
        return rows

    alone = [entered(i) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(entered, range(64))) == alone


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [24, 64, 256, 768])
def test_a_graph_walks_over_a_rows_file_in_place(tmp_path: Path, dtype: type, dim: int) -> None:
    spread = np.geomspace(4, 0.2, dim, dtype=np.float32)
    vectors = normalise(unit_vectors(1_500, dim, seed=6) * spread).astype(dtype)
    np.save(tmp_path / "rows.npy", vectors)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r").view(np.ndarray)
    rows = LevelRows(mapped, dim)
    write_graph(tmp_path / "level3.hnsw", rows)
    size = (tmp_path / "level3.hnsw").stat().st_size
    assert size < 1_500 * 300  # links alone
    before = (tmp_path / "rows.npy").read_bytes()
    codes = open_level(3, rows, None, "faiss-cpu")
    level = open_graph(tmp_path / "level3.hnsw", rows, codes)
    queries = normalise(vectors[:20] + 0.1 * unit_vectors(20, dim, seed=7))
    assert recall(level, vectors.astype(np.float32), queries, ef=400) >= 0.98  # observed 1.0
    write_level(tmp_path / "level3.faiss", rows)
    copy = open_level(3, rows, tmp_path / "level3.faiss", "faiss-cpu")
    copied = open_graph(tmp_path / "level3.hnsw", rows, copy)
    for a, b in zip(
        level.search(queries, 10, SearchParams(ef=50), None, None),
        copied.search(queries, 10, SearchParams(ef=50), None, None),
        strict=True,
    ):
        assert len(np.intersect1d(a.rows, b.rows)) >= 9
    assert (tmp_path / "rows.npy").read_bytes() == before


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("own_file", [False, True])
def test_the_level_before_the_finest_walks_the_finest_links(
    tmp_path: Path, dtype: type, own_file: bool
) -> None:
    spread = np.geomspace(4, 0.2, 64, dtype=np.float32)
    matrix = normalise(unit_vectors(4_000, 64, seed=6) * spread).astype(dtype)
    dims = {1: 16, 2: 40, 3: 64}
    rows = {n: LevelRows(matrix, d, inverse_norms(matrix, d) if n < 3 else None)
            for n, d in dims.items()}  # fmt: skip
    files = {n: tmp_path / f"{n}.hnsw" for n in ((1, 2, 3) if own_file else (1, 3))}
    for level, file in files.items():
        write_graph(file, rows[level])
    levels = {n: open_level(n, own, None, "faiss-cpu") for n, own in rows.items()}
    graphs = open_graphs(files, rows, levels)
    assert sorted(graphs) == [1, 2, 3]
    queries = normalise(matrix[:30, :40] + 0.1 * unit_vectors(30, 40, seed=7)).astype(np.float32)
    prefixes = rows[2].vectors(np.arange(4_000))
    assert (graphs[2].level, graphs[2].dim) == (2, 40)
    assert recall(graphs[2], prefixes, queries, ef=200) >= 0.97  # observed 1.0
    found = graphs[2].search(queries[:1], 5, SearchParams(ef=200), [np.arange(3)], None)[0]
    assert found.scores[0] == pytest.approx(float((prefixes @ queries[0]).max()), abs=2e-3)


def test_links_are_shared_only_where_rows_are_prefixes_of_the_same_rows() -> None:
    matrix, other = unit_vectors(20, 16), unit_vectors(20, 8)
    nested = {n: LevelRows(matrix, d) for n, d in ((1, 4), (2, 8), (3, 16))}
    assert link_levels((1, 3), nested) == [(1, 1), (3, 3), (2, 3)]
    assert link_levels((), nested) == []
    assert link_levels((1,), nested) == [(1, 1)]
    own = {**nested, 2: LevelRows(other, 8)}
    assert link_levels((1, 3), own) == [(1, 1), (3, 3)]
    two = {n: nested[n] for n in (1, 2)}
    assert link_levels((1, 2), two) == [(1, 1), (2, 2)]


def test_one_thread_builds_the_same_graph_twice_and_several_build_as_good_a_one(
    tmp_path: Path,
) -> None:
    vectors, queries = unit_vectors(3_000, 32, seed=1), unit_vectors(50, 32, seed=2)
    rows = LevelRows(vectors, 32)
    codes = open_level(1, rows, None, "faiss-cpu")
    for name, threads in (("one", 1), ("again", 1), ("several", 3)):
        write_graph(tmp_path / name, rows, threads)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes()
    several = open_graph(tmp_path / "several", rows, codes)
    assert recall(several, vectors, queries, ef=400) >= 0.98  # observed 1.0


def test_a_build_tells_how_far_it_is_and_leaves_searches_to_one_thread(tmp_path: Path) -> None:
    import faiss

    parts: list[int] = []
    rows = LevelRows(unit_vectors(12_000, 4), 4)
    write_graph(tmp_path / "level.hnsw", rows, 2, parts.append)
    assert parts == [10_000, 2_000]
    assert faiss.omp_get_max_threads() == 1


def test_a_graph_of_other_rows_is_refused(tmp_path: Path) -> None:
    few, many = (LevelRows(unit_vectors(n, 8), 8) for n in (50, 60))
    write_graph(tmp_path / "level.hnsw", few)
    codes = open_level(1, many, None, "faiss-cpu")
    with pytest.raises(ValueError, match="50 vectors"):
        open_graph(tmp_path / "level.hnsw", many, codes)
    (tmp_path / "level.hnsw").write_bytes(b"nonsense" * 20)
    with pytest.raises(ValueError, match="not a readable FAISS index"):
        open_graph(tmp_path / "level.hnsw", few, codes)
    write_level(tmp_path / "level.faiss", few)
    with pytest.raises(ValueError, match="IndexFlatIP where an inner-product HNSW graph"):
        open_graph(tmp_path / "level.faiss", few, codes)


def test_rows_that_are_a_part_of_wider_ones_are_not_lent_to_faiss() -> None:
    part = unit_vectors(200, 100)[:, :64]
    with pytest.raises(AssertionError, match="own memory"):
        in_place(LevelRows(part, 64))

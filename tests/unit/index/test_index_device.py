"""The GPU backend without a GPU: the decision, the arithmetic of shards, one owner thread."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.index.backends import choose, faiss_gpu
from hivlp.index.backends.choose import Backend, choose_backend, decide, open_graph, write_graph
from hivlp.index.backends.exact import ExactLevel, best_rows
from hivlp.index.backends.faiss_gpu import DeviceLevel, Owner
from hivlp.index.backends.rows import LevelRows
from hivlp.index.backends.shards import (
    MOST_SHARDS,
    merge,
    questions,
    shard_count,
    shard_size,
)
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BrokenFaiss, DeviceFailed, NoDevice
from hivlp.index.level_index import SearchParams
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import MissingExtra
from hivlp.models.levels import FloatArray
from hivlp.models.runtime.providers import ConflictingDistributions
from tests.fakes import unit_vectors, write_snapshot
from tests.opened_levels import FAKE_LIMIT, OWNER, FakeDevice, on_fake_device

PARAMS = SearchParams()


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ("auto", None, "faiss-cpu"),
        ("auto", 0, "faiss-cpu"),
        ("auto", 2, "faiss-gpu"),
        ("faiss-cpu", 2, "faiss-cpu"),
        ("faiss-gpu", 1, "faiss-gpu"),
        ("numpy", 2, "numpy"),
    ],
)
def test_the_gpu_is_taken_where_there_is_one_unless_told_otherwise(
    asked: Backend, gpus: int | None, expected: str
) -> None:
    assert decide(asked, gpus) == expected


def test_a_gpu_that_is_asked_for_and_absent_is_a_clear_error() -> None:
    with pytest.raises(MissingExtra, match=r"faiss-gpu.*hivlp\[gpu\]"):
        decide("faiss-gpu", None)
    with pytest.raises(NoDevice, match="sees no GPU"):
        decide("faiss-gpu", 0)


def test_two_packages_that_bring_faiss_are_refused_before_either_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("faiss_cpu", "faiss_gpu"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    choose._check_once.cache_clear()
    try:
        with pytest.raises(ConflictingDistributions, match="faiss-cpu and faiss-gpu"):
            choose.faiss_version()
    finally:
        choose._check_once.cache_clear()


@pytest.mark.parametrize(
    ("rows", "limit", "count"),
    [(0, 16, 1), (16, 16, 1), (17, 16, 2), (100, 16, 7), (10**6, 2_048, MOST_SHARDS)],
)
def test_shards_are_as_few_as_can_be_and_hold_every_row_once(
    rows: int, limit: int, count: int
) -> None:
    assert shard_count(rows, limit) == count
    assert sum(shard_size(rows, count, shard) for shard in range(count)) == rows


def test_what_is_asked_of_a_shard_grows_to_what_is_always_enough_or_the_limit() -> None:
    assert questions(100, 1, 2_048, 32) == (100,)
    assert questions(100, 8, 2_048, 32) == (58, 100)
    assert questions(1_032, 8, 2_048, 32) == (290, 1_032)
    assert questions(5_032, 8, 2_048, 32) == (1_290, 2_048)
    assert questions(16_384, 8, 2_048, 32) == (2_048,)
    assert questions(16_385, 8, 2_048, 32) == ()


@given(
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 400),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_merge_that_is_sure_is_right_and_asking_for_enough_makes_it_sure(
    size: int, shards: int, ask: int, fetch: int, crowded: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 8, size).astype(np.float32) if crowded else rng.random(size, "f4")
    if seed % 3 == 0:  # the worst case: all the best rows lie in one shard
        scores[::shards] += 10

    def asked(count: int) -> list[tuple[FloatArray, np.ndarray]]:
        found = []
        for shard in range(shards):
            own = scores[shard::shards]
            best = np.argsort(-own, kind="stable")[:count]
            found.append((own[best], best.astype(np.int64)))
        return found

    merged = merge(asked(ask), size, fetch)
    truth = -np.sort(-scores)[:fetch]
    assert (scores[merged.rows] == merged.scores).all()
    assert len(set(merged.rows.tolist())) == len(merged.rows)
    if merged.sure:
        assert merged.scores.tolist() == truth.tolist()
    enough = merge(asked(fetch), size, fetch)
    assert enough.sure
    assert enough.scores.tolist() == truth.tolist()


def level_of(vectors: FloatArray) -> tuple[DeviceLevel, LevelRows]:
    rows = LevelRows(vectors, vectors.shape[1])
    return on_fake_device(ExactLevel(1, rows), rows), rows


def asked_of(level: DeviceLevel) -> list[int]:
    return [k for shard in level._shards for k in shard.asked]  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [1, 10, 40, 90, 96, 97, 128, 500, 2_000])
def test_any_k_is_answered_right_whatever_the_limit(k: int) -> None:
    level, rows = level_of(unit_vectors(2_000, 16, seed=1))
    queries = unit_vectors(6, 16, seed=2)
    for query, found in zip(queries, level.search(queries, k, PARAMS, None, None), strict=True):
        truth = best_rows(rows, query, k)
        assert found.rows.tolist() == truth.rows.tolist()
        assert found.scores.tolist() == truth.scores.tolist()
    assert all(ask <= FAKE_LIMIT for ask in asked_of(level))
    assert bool(asked_of(level)) == (k + 32 <= MOST_SHARDS * FAKE_LIMIT)


def test_a_shard_that_holds_all_the_best_is_asked_for_more_and_then_the_host() -> None:
    query = unit_vectors(1, 16)
    vectors = unit_vectors(2_000, 16, seed=1)
    near = vectors[:640:MOST_SHARDS]  # 80 rows of the first shard
    near[:] = query + 0.05 * unit_vectors(80, 16, seed=3)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    level, rows = level_of(vectors)
    found = level.search(query, 30, PARAMS, None, None)[0]
    assert found.rows.tolist() == best_rows(rows, query[0], 30).rows.tolist()
    assert FAKE_LIMIT in asked_of(level)


def test_several_callers_share_the_one_owner() -> None:
    level, rows = level_of(unit_vectors(3_000, 16, seed=1))
    queries = unit_vectors(64, 16, seed=2)
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda i: level.search(queries[i : i + 1], 5, PARAMS, None, None)[0], range(64)
            )
        )
    for query, one in zip(queries, found, strict=True):
        assert one.rows.tolist() == best_rows(rows, query, 5).rows.tolist()


def test_an_error_on_the_device_reaches_the_caller_and_the_owner_lives_on() -> None:
    owner = Owner()
    with pytest.raises(ZeroDivisionError):
        owner.run(lambda: 1 // 0)
    assert owner.run(threading.current_thread).name.startswith("hivlp-gpu")


def test_a_level_that_is_dropped_is_freed_by_the_owner() -> None:
    freed: list[str] = []

    class Device(FakeDevice):
        def __del__(self) -> None:
            freed.append(threading.current_thread().name)

    rows = LevelRows(unit_vectors(50, 8), 8)
    owner = Owner()
    level = DeviceLevel(ExactLevel(1, rows), rows, Device, FAKE_LIMIT, owner)
    del level
    gc.collect()
    owner.run(int)  # whatever was asked for before is done
    assert len(freed) == 4
    assert all(name.startswith("hivlp-gpu") for name in freed)


def test_a_graph_walks_over_the_codes_of_a_level_that_is_on_the_device(tmp_path: Path) -> None:
    vectors = unit_vectors(1_500, 16, seed=1)
    rows = LevelRows(vectors, 16)
    choose.write_level(tmp_path / "codes.faiss", rows, "sq8")
    write_graph(tmp_path / "level.hnsw", rows)
    host = choose.open_level(1, rows, tmp_path / "codes.faiss", "faiss-cpu")
    device = DeviceLevel(host, rows, FakeDevice, FAKE_LIMIT, OWNER)
    graph = open_graph(tmp_path / "level.hnsw", rows, device)
    found = graph.search(vectors[:3], 5, SearchParams(ef=64), None, None)
    assert [f.rows[0] for f in found] == [0, 1, 2]


def test_a_snapshot_opened_for_an_absent_gpu_says_so(tmp_path: Path) -> None:
    if choose_backend("auto") == "faiss-gpu":
        pytest.skip("there is a GPU here")
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(30, 16))
    with pytest.raises((MissingExtra, NoDevice)):
        store.open("default", backend="faiss-gpu")
    assert store.open("default", backend="auto").sides["image"].size == 30


def test_rows_nearer_than_fp16_can_tell_apart_are_left_to_the_host() -> None:
    rng = np.random.default_rng(0)
    vectors = unit_vectors(5_000, 128, seed=1)
    query = unit_vectors(1, 128, seed=2)
    near = query + rng.uniform(0, 0.012, (300, 1)).astype(np.float32) * unit_vectors(300, 128, 3)
    vectors[:300] = near / np.linalg.norm(near, axis=1, keepdims=True)
    rows = LevelRows(vectors, 128)
    level = DeviceLevel(ExactLevel(1, rows), rows, FakeDevice, FAKE_LIMIT, OWNER)
    truth = best_rows(rows, query[0], 10)
    assert float(truth.scores[0] - np.sort(rows.scan(query[0]))[-60]) < 1e-4
    assert level.search(query, 10, PARAMS, None, None)[0].rows.tolist() == truth.rows.tolist()


class FullDevice(FakeDevice):
    """A device without room for another row, or for a search."""

    full = True

    def add(self, vectors: FloatArray) -> None:
        if self.full:
            raise RuntimeError("Error in virtual void* alloc\nError: out of memory on device 0")
        super().add(vectors)

    def search(self, queries: FloatArray, k: int) -> tuple[FloatArray, RowArray]:
        raise RuntimeError("Faiss assertion\nCUDA error 700 an illegal memory access")


def test_a_level_that_does_not_fit_the_gpu_is_a_clear_error() -> None:
    rows = LevelRows(unit_vectors(50, 8), 8)
    with pytest.raises(DeviceFailed, match="level 1 can't be put on the GPU"):
        DeviceLevel(ExactLevel(1, rows), rows, FullDevice, FAKE_LIMIT, OWNER)


def test_a_device_that_fails_while_it_is_searched_leaves_the_answer_to_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(FullDevice):
        full = False

    rows = LevelRows(unit_vectors(500, 8), 8)
    level = DeviceLevel(ExactLevel(1, rows), rows, Failing, FAKE_LIMIT, OWNER)
    query = unit_vectors(2, 8, 5)
    found = level.search(query, 3, PARAMS, None, None)
    assert [f.rows.tolist() for f in found] == [best_rows(rows, q, 3).rows.tolist() for q in query]
    assert "CUDA error 700" in caplog.text


def test_a_level_can_be_dropped_by_the_collector_in_the_midst_of_anything() -> None:
    owner = Owner()
    freed: list[int] = []
    owner.later(lambda: freed.append(1))
    assert freed == []
    lock = owner._pool._shutdown_lock  # type: ignore[attr-defined]
    with lock:  # as if the collector ran inside `submit`
        owner.later(lambda: freed.append(2))
    assert owner.run(lambda: 3) == 3
    assert freed == [1, 2]


def test_every_caller_gets_the_same_owner() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len({id(found) for found in pool.map(lambda _: faiss_gpu.owner(), range(64))}) == 1


def test_auto_falls_back_to_the_cpu_where_the_gpu_can_not_take_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(60, 16))
    monkeypatch.setattr(faiss_gpu, "gpu_count", lambda: 1)
    monkeypatch.setattr(faiss_gpu, "_device_index", FullDevice)
    with pytest.raises(DeviceFailed):
        store.open("default", backend="faiss-gpu")
    opened = store.open("default", backend="auto")
    assert not isinstance(opened.sides["image"].levels[1], DeviceLevel)
    assert "searched on the CPU" in caplog.text


def test_a_faiss_that_can_not_be_loaded_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError(f"{name}: libcublas.so.12 is missing")

    monkeypatch.setattr(choose.importlib, "import_module", broken)
    with pytest.raises(BrokenFaiss, match="libcublas"):
        choose.faiss_version()

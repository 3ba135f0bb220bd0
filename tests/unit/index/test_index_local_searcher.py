"""One snapshot searched in place: rows become items, and k items come back where there are k."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import NoSuchItem
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.export import export_faiss
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import HivlpError
from hivlp.models.levels import FloatArray, Modality, nested_prefix
from tests.fakes import DIMS, unit_vectors, write_snapshot

IMAGES = unit_vectors(30, 16)
# Item 0 has 40 captions, all near one another; the others one each, as 30 items.
TEXT_ITEMS = [0] * 40 + list(range(1, 30))
TEXTS = np.concatenate([np.repeat(unit_vectors(1, 16, 7), 40, axis=0), unit_vectors(29, 16, 8)])


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> LocalSearcher:
    store = SnapshotStore(tmp_path_factory.mktemp("home"))
    write_snapshot(
        store,
        images=IMAGES,
        texts=TEXTS,
        text_items=TEXT_ITEMS,
        metadata=[{"name": f"n{i}", "size": i} for i in range(30)],
    )
    return LocalSearcher(store.open("default"))


def outputs(query: FloatArray) -> dict[int, FloatArray]:
    return {level: nested_prefix(query, dim) for level, dim in enumerate(DIMS, start=1)}


def ids(searcher: LocalSearcher, searched: Modality, query: FloatArray, k: int, offset: int = 0):  # type: ignore[no-untyped-def]
    plan = searcher.plan(PlanRequest(searched, "text", k + offset))
    found = run_plan(searcher, searched, plan, outputs(query))[0]
    return [item.id for item in searcher.items(searched, found, k, offset)]


def test_info_tells_what_is_searched(searcher: LocalSearcher) -> None:
    info = searcher.info
    assert (info.index, info.items, dict(info.rows)) == ("default", 30, {"image": 30, "text": 69})
    assert [spec.dim for spec in info.levels] == list(DIMS)


@pytest.mark.parametrize("k", [1, 2, 10, 29, 30])
def test_k_different_items_come_back_whenever_there_are_k(searcher: LocalSearcher, k: int) -> None:
    found = ids(searcher, "text", TEXTS[:1], k)
    assert found[0] == "i0"
    assert len(found) == len(set(found)) == k


@pytest.mark.parametrize("k", [31, 1_000])
def test_more_than_there_are_gives_all_and_no_made_up_ones(searcher: LocalSearcher, k: int) -> None:
    for side in ("image", "text"):
        found = ids(searcher, side, TEXTS[:1], k)
        assert sorted(found) == sorted(f"i{i}" for i in range(30))


def test_pages_continue_one_another(searcher: LocalSearcher) -> None:
    whole = ids(searcher, "text", TEXTS[:1], 20)
    assert (
        ids(searcher, "text", TEXTS[:1], 5, 0) + ids(searcher, "text", TEXTS[:1], 5, 5)
        == whole[:10]
    )
    assert ids(searcher, "text", TEXTS[:1], 5, 30) == []


def test_an_item_s_best_row_stands_for_it(searcher: LocalSearcher) -> None:
    rows = np.array([39, 3, 41, 40], dtype=np.int64)
    found = Candidates(rows, np.array([0.9, 0.8, 0.7, 0.6], dtype=np.float32))
    items = searcher.items("text", found, 10, 0)
    assert [(i.id, i.row, i.text) for i in items] == [
        ("i0", 39, "text 39"),
        ("i2", 41, "text 41"),
        ("i1", 40, "text 40"),
    ]
    assert items[0].score == pytest.approx(0.9)
    assert [i.id for i in searcher.items("text", found, 1, 1)] == ["i2"]


def test_nothing_found_is_no_items(searcher: LocalSearcher) -> None:
    assert searcher.items("image", Candidates.none(), 10, 0) == []


def test_similar_finds_the_item_itself_first(searcher: LocalSearcher) -> None:
    row = searcher.row_of("i12", "image")
    assert row == 12
    assert searcher.row_of("i0", "text") == 0
    assert searcher.row_of("i5", "text") == 44
    vector = searcher.vector("image", row, 3)
    np.testing.assert_array_equal(vector, IMAGES[12:13])
    assert ids(searcher, "image", vector, 3)[0] == "i12"


def test_level_vectors_have_unit_length(searcher: LocalSearcher) -> None:
    for level, dim in enumerate(DIMS, start=1):
        vector = searcher.vector("image", 4, level)
        assert vector.shape == (1, dim)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)


def test_explain_gives_the_score_of_every_level(searcher: LocalSearcher) -> None:
    query = unit_vectors(1, 16, 9)
    rows = np.array([3, 17], dtype=np.int64)
    found = searcher.explain("image", outputs(query), rows)
    for level, dim in enumerate(DIMS, start=1):
        expected = nested_prefix(IMAGES[rows], dim) @ nested_prefix(query, dim)[0]
        np.testing.assert_allclose(found[level], expected, atol=1e-6)


def test_metadata_and_pictures_by_id(searcher: LocalSearcher) -> None:
    assert searcher.metadata(["i3"], None) == [{"name": "n3", "size": 3}]
    assert searcher.image_ref("i3") == "3.png"
    for attempt in (searcher.image_ref, lambda i: searcher.row_of(i, "image")):
        with pytest.raises(NoSuchItem, match="nobody"):
            attempt("nobody")


def test_bad_queries_are_refused_with_an_input_error(searcher: LocalSearcher) -> None:
    plan = searcher.plan(PlanRequest("image", "text", 3))
    nan = np.full((1, DIMS[0]), np.nan, dtype=np.float32)
    with pytest.raises(HivlpError, match="NaN"):
        searcher.step("image", plan.stages[0], nan, None)


def test_a_side_without_rows_finds_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=IMAGES)
    searcher = LocalSearcher(store.open("default"))
    assert ids(searcher, "text", TEXTS[:1], 5) == []
    with pytest.raises(NoSuchItem):
        searcher.row_of("i3", "text")
    assert searcher.explain("text", outputs(TEXTS[:1]), np.empty(0, np.int64))[1].shape == (0,)


def test_closing_closes_the_snapshot(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=IMAGES)
    searcher = LocalSearcher(store.open("default"))
    searcher.close()
    assert searcher.snapshot.closed


def test_exported_files_are_plain_faiss(searcher: LocalSearcher, tmp_path: Path) -> None:
    import faiss

    written = export_faiss(searcher.snapshot, tmp_path / "out")
    assert sorted(path.name for path in written) == sorted(
        [f"{side}-level{level}.faiss" for side in ("image", "text") for level in (1, 2, 3)]
        + ["image-ids.json", "text-ids.json"]
    )
    index = faiss.read_index(str(tmp_path / "out" / "image-level2.faiss"))
    assert (index.ntotal, index.d, index.metric_type) == (30, 8, faiss.METRIC_INNER_PRODUCT)
    _, rows = index.search(nested_prefix(IMAGES[5:6], 8), 1)
    assert rows.tolist() == [[5]]
    with pytest.raises(HivlpError, match="not empty"):
        export_faiss(searcher.snapshot, tmp_path / "out")

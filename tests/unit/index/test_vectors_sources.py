"""Reading vectors of one's own: .npy with and without tables, Parquet with a column of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.build.vectors import source as source_module
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.parquet import ParquetSource
from hivlp.index.build.vectors.source import VectorSource
from hivlp.index.errors import CorpusError
from tests.fakes import unit_vectors


def rows_of(source: VectorSource) -> tuple[Any, list[Any], list[str]]:
    """All vectors, all table rows, and each row's place."""
    vectors, rows, places = [], [], []
    for batch in source.batches():
        vectors.append(batch.vectors)
        rows += batch.table.to_pylist() or [{}] * len(batch.vectors)
        places += [f"{batch.file.name}:{batch.first + i}" for i in range(len(batch.vectors))]
    return np.concatenate(vectors), rows, places


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 256 rows, so that a few hundred rows are several."""
    monkeypatch.setattr(source_module, "PART_NUMBERS", 1)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_arrays_of_any_float_are_read_in_parts(tmp_path: Path, dtype: str) -> None:
    vectors = unit_vectors(600, 8).astype(dtype)
    np.save(tmp_path / "v.npy", vectors)
    source = NpySource(tmp_path / "v.npy")
    assert (source.dim, source.count, source.schema.names) == (8, 600, [])
    found, rows, places = rows_of(source)
    np.testing.assert_array_equal(found, vectors)
    assert found.dtype.isnative
    assert rows == [{}] * 600
    assert (places[0], places[-1]) == ("v.npy:0", "v.npy:599")


def test_shards_are_paired_by_their_numbers_as_clip_retrieval_writes_them(tmp_path: Path) -> None:
    vectors = unit_vectors(700, 8)
    (tmp_path / "img_emb").mkdir()
    (tmp_path / "metadata").mkdir()
    for number, (first, end) in {10: (500, 700), 2: (300, 500), 0: (0, 300)}.items():
        np.save(tmp_path / f"img_emb/img_emb_{number}.npy", vectors[first:end])
        table = pa.table({"id": list(range(first, end)), "caption": ["a"] * (end - first)})
        pq.write_table(table, tmp_path / f"metadata/metadata_{number}.parquet", row_group_size=90)
    source = NpySource(tmp_path / "img_emb", tmp_path / "metadata")
    found, rows, places = rows_of(source)
    np.testing.assert_array_equal(found, vectors)
    assert [row["id"] for row in rows] == list(range(700))
    assert places[300] == "img_emb_2.npy:0"
    pattern = NpySource(tmp_path / "img_emb/img_*.npy", tmp_path / "metadata/metadata_*.parquet")
    assert pattern.count == 700


def test_tables_in_the_vectors_own_folder_belong_to_them(tmp_path: Path) -> None:
    np.save(tmp_path / "e_0.npy", unit_vectors(5, 4))
    pq.write_table(pa.table({"key": list("abcde")}), tmp_path / "m_0.parquet")
    assert NpySource(tmp_path).schema.names == ["key"]


def test_columns_of_bytes_are_not_read_and_missing_ones_are_null(tmp_path: Path) -> None:
    for number, table in enumerate(
        (
            pa.table({"id": [1, 2], "raw": [b"x", b"y"], "n": pa.array([1, 2], pa.int32())}),
            pa.table({"id": [3], "n": pa.array([2.5]), "late": ["z"]}),
        )
    ):
        np.save(tmp_path / f"v_{number}.npy", unit_vectors(table.num_rows, 4))
        pq.write_table(table, tmp_path / f"m_{number}.parquet")
    _, rows, _ = rows_of(NpySource(tmp_path))
    assert rows == [
        {"id": 1, "n": 1.0, "late": None},
        {"id": 2, "n": 2.0, "late": None},
        {"id": 3, "n": 2.5, "late": "z"},
    ]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(8, np.float32), r"shape \(8,\); \(rows, numbers\) is needed"),
        (np.asfortranarray(np.ones((4, 8), np.float32)), "Fortran order"),
        (np.ones((4, 8), np.int64), "holds int64; float16, float32 or float64"),
        (np.ones((0, 8), np.float32), "holds no vectors"),
    ],
)
def test_arrays_that_are_no_vectors_are_refused(tmp_path: Path, array: Any, words: str) -> None:
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(CorpusError, match=words):
        NpySource(tmp_path / "v.npy")


def test_files_that_are_broken_or_do_not_belong_together_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a_0.npy", unit_vectors(4, 8))
    whole = (tmp_path / "a_0.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "text.npy").write_bytes(b"not numpy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "three_0.parquet")
    for name, words in (
        ("cut.npy", "cut short: its header says 4 rows"),
        ("text.npy", "not a readable .npy file"),
        ("objects.npy", "shape"),
        ("nothing.npy", "no .npy file here"),
    ):
        with pytest.raises(CorpusError, match=words) as caught:
            NpySource(tmp_path / name)
        assert name in caught.value.place
    with pytest.raises(CorpusError, match=r"3 rows for 4 of a_0.npy"):
        NpySource(tmp_path / "a_0.npy", tmp_path / "three_0.parquet")
    np.save(tmp_path / "a_1.npy", unit_vectors(4, 8))
    with pytest.raises(CorpusError, match="no table of the same number"):
        NpySource(tmp_path / "a_*.npy", tmp_path / "three_0.parquet")
    np.save(tmp_path / "b_1.npy", unit_vectors(4, 8))
    with pytest.raises(CorpusError, match=r"the same number as a_1.npy"):
        NpySource(tmp_path / "[ab]_*.npy", tmp_path / "three_*.parquet")
    np.save(tmp_path / "a_2.npy", unit_vectors(4, 9))
    with pytest.raises(CorpusError, match=r"vectors of 9 numbers; those of a_0.npy have 8"):
        NpySource(tmp_path / "a_*.npy")


def test_a_sample_is_spread_over_all_rows_and_never_more_than_there_are(tmp_path: Path) -> None:
    numbers = np.arange(40_000, dtype=np.float32)
    np.save(tmp_path / "v_0.npy", np.stack([numbers[:30_000]] * 2, axis=1))
    np.save(tmp_path / "v_1.npy", np.stack([numbers[30_000:]] * 2, axis=1))
    source = NpySource(tmp_path)
    some = np.concatenate(list(source.sample(4_000)))[:, 0]
    assert 3_500 <= len(some) <= 4_500
    assert len(np.unique(some)) == len(some)
    assert np.histogram(some, bins=10, range=(0, 40_000))[0].min() > 200
    assert sum(map(len, source.sample(10**6))) == 40_000
    pq.write_table(
        pa.table({"embedding": np.stack([numbers] * 2, axis=1).tolist()}),
        tmp_path / "t.parquet",
        row_group_size=1_000,
    )
    spread = ParquetSource(tmp_path / "t.parquet")
    some = np.concatenate(list(spread.sample(4_000)))[:, 0]
    assert 3_500 <= len(some) <= 4_500
    assert np.histogram(some, bins=10, range=(0, 40_000))[0].min() > 200
    assert sum(map(len, spread.sample(10**6))) == 40_000


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
@pytest.mark.parametrize("numbers", [pa.float16(), pa.float32(), pa.float64()])
def test_a_column_of_vectors_is_read_whatever_its_list_and_float(
    tmp_path: Path, kind: str, numbers: Any
) -> None:
    vectors = unit_vectors(600, 8)
    makers = {"list": pa.list_, "large_list": pa.large_list, "fixed": lambda t: pa.list_(t, 8)}
    column = pa.array(list(vectors.astype(numbers.to_pandas_dtype())), makers[kind](numbers))
    table = pa.table({"id": [f"i{i}" for i in range(600)], "embedding": column, "x": range(600)})
    pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=250)
    source = ParquetSource(tmp_path / "part-0.parquet")
    assert (source.dim, source.count, source.schema.names) == (8, 600, ["id", "x"])
    found, rows, _ = rows_of(source)
    np.testing.assert_allclose(found.astype(np.float32), vectors, atol=1e-3)
    assert rows[599] == {"id": "i599", "x": 599}


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_without_a_vector_of_the_right_length_say_why(tmp_path: Path, fixed: bool) -> None:
    lists: list[Any] = [[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0], [7.0, None, 9.0]]
    kind = pa.list_(pa.float32(), 3) if fixed else pa.list_(pa.float32())
    if not fixed:
        lists += [[1.0, 2.0], []]
    table = pa.table({"embedding": pa.array(lists, kind)})
    pq.write_table(table, tmp_path / "v.parquet")
    (batch,) = ParquetSource(tmp_path / "v.parquet").batches()
    np.testing.assert_array_equal(batch.vectors[[0, 2]], [[1, 2, 3], [4, 5, 6]])
    assert np.isnan(batch.vectors[1]).all()
    assert np.isnan(batch.vectors[3]).tolist() == [False, True, False]
    assert batch.reasons[1] == "no vector"
    if not fixed:
        assert batch.reasons[4] == "a vector of 2 numbers, 3 are needed"
        assert batch.reasons[5] == "no vector"


def test_parquet_without_vectors_is_refused(tmp_path: Path) -> None:
    for name, table, words in (
        ("none", pa.table({"id": [1]}), r"no column 'embedding'; there are \['id'\]"),
        ("text", pa.table({"embedding": ["a"]}), "is string; lists of floats are needed"),
        ("whole", pa.table({"embedding": [[1, 2]]}), "lists of floats are needed"),
        ("empty", pa.table({"embedding": pa.array([None, []], pa.list_(pa.float32()))}), "no vec"),
    ):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(CorpusError, match=words):
            ParquetSource(tmp_path / f"{name}.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(CorpusError, match="not a readable Parquet file"):
        ParquetSource(tmp_path / "broken.parquet")
    named = pa.table({"mine": [[1.0, 2.0]]})
    pq.write_table(named, tmp_path / "mine.parquet")
    assert ParquetSource(tmp_path / "mine.parquet", "mine").dim == 2

"""Reading vectors of one's own: .npy with and without tables, Parquet with a column of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.build.vectors import source as source_module
from hivlp.index.build.vectors import tables
from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.parquet import ParquetSource
from hivlp.index.build.vectors.queries import check_queries, one_vector
from hivlp.index.build.vectors.rotation import fit_rotation
from hivlp.index.build.vectors.source import VectorSource
from hivlp.index.errors import BuildError, CorpusError
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


def test_ids_and_captions_that_are_bytes_are_texts_and_other_bytes_are_named(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "v.npy", unit_vectors(2, 4))
    table = pa.table(
        {
            "id": pa.array([b"a", b"b"]),
            "key": pa.array([b"aa", b"bb"], pa.binary(2)),
            "caption": pa.array([b"x", None], pa.large_binary()),
            "captions": pa.array([[b"y"], []]),
            "raw": pa.array([b"\xff", b""]),
            "nested": pa.array([{"bytes": b"x"}, None]),
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    source = NpySource(tmp_path)
    _, rows, _ = rows_of(source)
    assert rows == [
        {"id": "a", "key": "aa", "caption": "x", "captions": ["y"]},
        {"id": "b", "key": "bb", "caption": None, "captions": []},
    ]
    assert source.left_out == ("nested", "raw")
    pq.write_table(pa.table({"id": [b"a", b"\xff"]}), tmp_path / "m.parquet")
    with pytest.raises(CorpusError, match="column 'id': binary can't be read as string") as caught:
        rows_of(NpySource(tmp_path))
    assert caught.value.place == str(tmp_path / "m.parquet")


def test_files_whose_columns_widen_are_one_table_or_name_what_does_not_fit(tmp_path: Path) -> None:
    codes = pa.array(["a", "b"]).dictionary_encode()
    for number, table in enumerate(
        (
            pa.table({"c": codes, "n": pa.array([1, 2], pa.int8())}),
            pa.table({"c": pa.array(["c"]), "n": pa.array([2.5])}),
            pa.table({"c": pa.array(["d"], pa.large_string()), "n": pa.array([3], pa.int64())}),
        )
    ):
        np.save(tmp_path / f"v_{number}.npy", unit_vectors(table.num_rows, 4))
        pq.write_table(table, tmp_path / f"m_{number}.parquet")
    _, rows, _ = rows_of(NpySource(tmp_path))
    assert [(row["c"], row["n"]) for row in rows] == [
        ("a", 1.0), ("b", 2.0), ("c", 2.5), ("d", 3.0),
    ]  # fmt: skip
    pq.write_table(pa.table({"c": ["d"], "n": [2**53 + 1]}), tmp_path / "m_2.parquet")
    with pytest.raises(CorpusError, match="column 'n': int64 can't be read as double") as caught:
        rows_of(NpySource(tmp_path))
    assert caught.value.place == str(tmp_path / "m_2.parquet")


@pytest.mark.parametrize("dictionary", [False, True])
def test_parts_of_long_texts_are_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dictionary: bool
) -> None:
    monkeypatch.setattr(source_module, "PART_NUMBERS", 10**6)
    monkeypatch.setattr(tables, "PART_BYTES", 10**6)
    texts = ["x" * 2_000 if dictionary else f"{i:04d}" * 500 for i in range(3_000)]
    vectors = unit_vectors(3_000, 8)
    table = pa.table({"text": texts, "embedding": list(vectors)})
    pq.write_table(table, tmp_path / "v.parquet")
    parts = list(ParquetSource(tmp_path / "v.parquet").batches())
    sizes = [len(part.vectors) for part in parts]
    assert sum(sizes) == 3_000
    assert max(sizes) <= 10**6 / 2_000 + tables.READ_ROWS
    np.testing.assert_array_equal(np.concatenate([part.vectors for part in parts]), vectors)
    assert [t for part in parts for t in part.table["text"].to_pylist()] == texts
    monkeypatch.setattr(tables, "PART_BYTES", 10**9)
    assert [len(part.vectors) for part in ParquetSource(tmp_path / "v.parquet").batches()] == [
        3_000
    ]


def test_tables_of_other_columns_alone_still_have_their_rows(tmp_path: Path) -> None:
    for number, table in enumerate((pa.table({"a": [1] * 300}), pa.table({"raw": [b"x"] * 600}))):
        np.save(tmp_path / f"v_{number}.npy", unit_vectors(table.num_rows, 4))
        pq.write_table(table, tmp_path / f"m_{number}.parquet")
    vectors, rows, _ = rows_of(NpySource(tmp_path))
    assert len(vectors) == len(rows) == 900
    assert rows[299:301] == [{"a": 1}, {"a": None}]


def npy_header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (118 - len(text)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        npy_header("(-4, 8)"),
        npy_header("(4, True)"),
        npy_header("(4, 8"),
        npy_header("(4, 8)", "'<f4\x00'"),
        npy_header("(4, 8)", "[('a'"),
        npy_header("(4, 8)", "'no such'"),
        npy_header("[" * 90),
        npy_header("(4, '8')"),
        b"\x93NUMPY\x01\x00\xff\xff{",
        b"\x93NUMPY\x09\x00\x04\x00{}  ",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
        b"PK\x03\x04 an archive, cut short",
        b"",
    ],
)
def test_whatever_is_no_header_of_an_array_is_an_error_that_names_the_file(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(content + bytes(64))
    with pytest.raises(CorpusError, match=r"not a readable .npy file") as caught:
        NpySource(path)
    assert caught.value.place == str(path)
    with pytest.raises(BuildError, match=r"v\.npy: not a readable .npy file"):
        one_vector(path, 8)
    with pytest.raises(BuildError, match=r"v\.npy: not a readable .npy file"):
        check_queries(path, 8)


def test_one_vector_is_read_whatever_its_float_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "q.npy"
    vector = unit_vectors(1, 8)
    for given in (vector, vector[0].astype(">f8"), vector.astype(np.float16)):
        np.save(path, given)
        found = one_vector(path, 8)
        assert found.shape == (1, 8)
        assert found.dtype.isnative
        np.testing.assert_allclose(found[0], vector[0], atol=1e-3)
    for array, words in (
        (unit_vectors(2, 8), r"one vector of 8 numbers is needed, got \(2, 8\)"),
        (np.ones(8, np.int64), "holds int64; floats are needed"),
    ):
        np.save(path, array)
        with pytest.raises(BuildError, match=words):
            one_vector(path, 8)
    np.save(path, vector)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BuildError, match="cut short"):
        one_vector(path, 8)


@pytest.mark.parametrize("scale", [1e-50, 1e45])
def test_samples_of_doubles_that_float32_cannot_hold_have_a_direction(
    tmp_path: Path, scale: float
) -> None:
    vectors = unit_vectors(100, 8).astype(np.float64) * scale
    np.save(tmp_path / "v.npy", vectors)
    table = pa.table({"embedding": list(vectors)})
    pq.write_table(table, tmp_path / "v.parquet")
    for source in (NpySource(tmp_path / "v.npy"), ParquetSource(tmp_path / "v.parquet")):
        assert fit_rotation(source.sample(50), 8).rows >= 50


def test_a_sample_of_parquet_is_no_larger_than_asked_for(tmp_path: Path) -> None:
    table = pa.table({"embedding": np.arange(10_000.0).reshape(-1, 1).tolist()})
    for rows in (10_000, 999, 90):
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows)
        source = ParquetSource(tmp_path / "t.parquet")
        for limit in (7_999, 2_000, 31):
            some = np.concatenate(list(source.sample(limit)))[:, 0]
            assert limit * 0.9 <= len(some) <= limit
            assert len(np.unique(some)) == len(some)


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

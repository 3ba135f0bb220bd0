"""Ids, metadata types, and looking things up by id."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hivlp.index.build.columns import metadata_columns, typed_column
from hivlp.index.errors import NoSuchItem, PlanError
from hivlp.index.snapshot import catalogue as catalogue_module
from hivlp.index.snapshot.catalogue import Catalogue, id_index, open_table, write_table


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, -3], pa.int64()),
        (["1", "2", None], pa.int64()),
        (["1", "2.5"], pa.float64()),
        ([1, 2.5], pa.float64()),
        (["007", "1"], pa.string()),
        (["1e5", "2"], pa.string()),
        (["true", "false"], pa.bool_()),
        ([True, None], pa.bool_()),
        ([True, 1], pa.string()),
        (["x", 1], pa.string()),
        ([["a"], ["b", "c"]], pa.list_(pa.string())),
        ([{"a": 1}], pa.string()),
        ([2**70], pa.string()),
        (["9" * 25], pa.string()),
        ([None, None], pa.string()),
        (["1.10", "1.1"], pa.string()),
        (["1.10", "1.20"], pa.float64()),
        (["-0", "0"], pa.string()),
        ([2**53 + 1, 0.5], pa.string()),
        ([2**53, 0.5], pa.float64()),
        (["2024-01-01"], pa.string()),
    ],
)
def test_columns_get_the_narrowest_type_that_loses_nothing(
    values: list[Any], expected: Any
) -> None:
    assert typed_column(values).type == expected
    assert len(typed_column(values)) == len(values)


def test_half_a_character_in_metadata_becomes_printable() -> None:
    assert typed_column(["ok", "\ud83d"]).to_pylist() == ["ok", "?"]


def test_metadata_cannot_hide_the_catalogue_s_own_columns() -> None:
    assert sorted(metadata_columns([{"image": "x", "_image": "y", "b": 1}])) == [
        "__image",
        "_image",
        "b",
    ]


def make(ids: list[str], **columns: list[Any]) -> Catalogue:
    table = pa.table({"id": ids, "image": [None] * len(ids), **columns})
    return Catalogue(table, *id_index(ids))


def test_any_id_comes_back_as_it_went_in() -> None:
    ids = ["a", "A", "10", "9007199254740993", "日本", "a/b c.png", "f47ac10b-58cc", "é"]
    found = make(ids)
    assert [found.ordinal(item_id) for item_id in ids] == list(range(len(ids)))
    assert found.ids(np.arange(len(ids))) == ids


def test_an_unknown_id_is_named() -> None:
    for ids in ([], ["a", "b"]):
        with pytest.raises(NoSuchItem, match="'c'"):
            make(ids).ordinal("c")


def test_ids_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "id_hash", lambda item_id: 7)
    found = make(["a", "b", "c"])
    assert [found.ordinal(item_id) for item_id in "abc"] == [0, 1, 2]
    with pytest.raises(NoSuchItem):
        found.ordinal("d")


def test_metadata_by_id_all_or_by_name() -> None:
    found = make(["a", "b"], name=["x", None], price=[1, 2])
    assert found.metadata(["b", "a"], None) == [{"price": 2}, {"name": "x", "price": 1}]
    assert found.metadata(["a"], ["price"]) == [{"price": 1}]
    assert found.metadata(["a"], []) == [{}]
    with pytest.raises(PlanError, match="'colour'") as caught:
        found.metadata(["a"], ["colour"])
    assert caught.value.param == "with_metadata"
    with pytest.raises(NoSuchItem):
        found.metadata(["z"], None)


def test_tables_are_memory_mapped(tmp_path: Path) -> None:
    write_table(tmp_path / "t.arrow", pa.table({"id": [str(i) for i in range(1000)]}))
    before = pa.total_allocated_bytes()
    table = open_table(tmp_path / "t.arrow")
    assert table.num_rows == 1000
    assert pa.total_allocated_bytes() == before


def test_half_characters_become_question_marks_wherever_they_stand() -> None:
    columns = metadata_columns([{"tags": ["\ud800", "x"], "na\ud800me": "\udfff"}, {"na?me": 1}])
    assert columns["tags"].to_pylist() == [["?", "x"], None]
    assert columns["na?me"].to_pylist() == [None, 1]
    assert columns["_na?me"].to_pylist() == ["?", None]


def test_dates_mixed_with_other_things_are_text_as_they_print() -> None:
    values = [datetime(2024, 1, 2, 3, 4, 5), None, Decimal("1.50")]
    assert typed_column(values).to_pylist() == ["2024-01-02 03:04:05", None, "1.50"]


def test_dates_and_times_stay_what_they_are() -> None:
    days = typed_column([date(2024, 1, 2), None])
    assert days.type == pa.date32()
    assert days.to_pylist() == [date(2024, 1, 2), None]
    zone = timezone(timedelta(hours=2))
    mixed = [datetime(2024, 1, 2, 3), datetime(2024, 1, 2, 3, tzinfo=zone), date(2024, 1, 2)]
    times = typed_column(mixed)
    assert times.type == pa.timestamp("us", "UTC")
    assert [t.hour for t in times.to_pylist()] == [3, 1, 0]


def test_the_first_and_the_last_day_there_is_do_not_stop_a_build() -> None:
    east, west = timezone(timedelta(hours=2)), timezone(timedelta(hours=-2))
    ends = [datetime(1, 1, 1, tzinfo=east), datetime(9999, 12, 31, 23, tzinfo=west)]
    assert [t.year for t in typed_column(ends).to_pylist()] == [1, 9999]


def test_stored_values_that_python_lacks_are_left_out_and_never_raise() -> None:
    columns: dict[str, Any] = {
        "at": pa.array([10**18], pa.timestamp("us", "UTC")),
        "day": pa.array([10**8], pa.int32()).cast(pa.date32()),
        "text": pa.array([b"a\xff"]).view(pa.string()),
        "list": pa.ListArray.from_arrays([0, 2], pa.array([b"\xff", b"b"]).view(pa.string())),
        "fine": pa.array([1]),
    }
    table = pa.table({"id": ["x"], "image": pa.array([None], pa.string()), **columns})
    found = Catalogue(table, *id_index(["x"]))
    (values,) = found.metadata(["x"], None)
    assert values == {"text": "a\ufffd", "list": ["\ufffd", "b"], "fine": 1}
    assert found.column("at") == [None]
    assert found.column("text") == ["a\ufffd"]
    assert found.column("fine") == [1]

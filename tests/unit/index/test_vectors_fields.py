"""Which column is what, and the others in the catalogue's types."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hivlp.index.build.vectors.fields import Fields, ids_of, references, texts_of
from hivlp.index.build.vectors.payloads import Kinds, as_column
from hivlp.index.errors import CorpusError

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "kind", "wanted", "kept"),
    [
        ([True, None], pa.bool_(), [True, None], "bool"),
        ([1, None], pa.uint8(), [1, None], "int64"),
        ([1.5, float("nan"), float("inf")], pa.float32(), [1.5, None, None], "double"),
        ([date(2024, 5, 1)], pa.date64(), [date(2024, 5, 1)], "date32[day]"),
        ([NOON.replace(tzinfo=None)], pa.timestamp("ns"), [NOON], "timestamp[us, tz=UTC]"),
        ([NOON], pa.timestamp("s", "Europe/Paris"), [NOON], "timestamp[us, tz=UTC]"),
        (["a", "", None, "007"], pa.large_string(), ["a", None, None, "007"], "string"),
        (["a", "b"], pa.dictionary(pa.int8(), pa.string()), ["a", "b"], "string"),
        ([["a"], [], None], pa.large_list(pa.string()), [["a"], [], None], "list"),
        ([{"x": [1]}, None], pa.struct([("x", pa.list_(pa.int8()))]), ['{"x": [1]}', None], "str"),
        ([[1, 2]], pa.list_(pa.int8()), ["[1, 2]"], "string"),
        ([Decimal("1.10")], pa.decimal128(5, 2), ["1.10"], "string"),
        ([None], pa.null(), [None], "string"),
    ],
)
def test_a_column_keeps_its_own_type_as_far_as_the_catalogue_has_it(
    given: list[Any], kind: Any, wanted: list[Any], kept: str
) -> None:
    table = pa.table({"c": pa.array(given, kind)})
    fields = Fields.of(table.schema, "image")
    (column,), lost = fields.metadata_of(table)
    assert column.to_pylist() == wanted
    assert lost == {}
    assert str(column.type).startswith(kept)
    assert fields.schema.field("c").type == column.type


NOT_UTF8 = pa.array([b"\xff", b"a"]).view(pa.string())
ENDS = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_times_of_years_that_python_lacks_are_null_and_counted(unit: str, zone: str | None) -> None:
    each = {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    first, last = -62_135_596_800 * each, 253_402_300_799 * each
    given = [first - 1, first, last, last + each, 2**63 - 1, -(2**63), None]
    table = pa.table({"t": pa.array(given, pa.timestamp(unit, zone))})
    (column,), lost = Fields.of(table.schema, "image").metadata_of(table)
    assert column.to_pylist() == [None, *ENDS, None, None, None, None]
    assert lost == {"t": 4}


def test_days_of_years_that_python_lacks_are_null_and_counted() -> None:
    days = pa.array([10**8, -(10**7), 2_932_896, -719_162], pa.int32()).cast(pa.date32())
    table = pa.table({"short": days, "long": days.cast(pa.date64())})
    columns, lost = Fields.of(table.schema, "image").metadata_of(table)
    assert [c.to_pylist() for c in columns] == [[None, None, date.max, date.min]] * 2
    assert lost == {"long": 2, "short": 2}


@pytest.mark.parametrize(
    ("column", "wanted", "lost"),
    [
        (NOT_UTF8, [None, "a"], 1),
        (NOT_UTF8.dictionary_encode(), [None, "a"], 1),
        (pa.ListArray.from_arrays([0, 1, 2], NOT_UTF8), [None, ["a"]], 1),
        (pa.array([1_500, None], pa.duration("ns")), ["0:00:00.000001", None], 0),
        (pa.array([2**62], pa.duration("s")), [None], 1),
        (pa.array([1_001], pa.time64("ns")), ["00:00:00.000001"], 0),
        (
            pa.array([{"a": 1}], pa.struct([("a", pa.timestamp("ns"))])),
            ['{"a": "1970-01-01 00:00:00"}'],
            0,
        ),
        (pa.array([{"a": 2**62}, None], pa.struct([("a", pa.timestamp("s"))])), [None, None], 1),
        (pa.array([[2**62], []], pa.list_(pa.timestamp("s"))), [None, "[]"], 1),
    ],
)
def test_values_that_python_lacks_do_not_stop_a_column(
    column: Any, wanted: list[Any], lost: int
) -> None:
    table = pa.table({"c": column})
    (kept,), counted = Fields.of(table.schema, "image").metadata_of(table)
    assert kept.to_pylist() == wanted
    assert counted == ({"c": lost} if lost else {})


def test_a_number_that_does_not_fit_is_refused_by_its_columns_name() -> None:
    table = pa.table({"big": pa.array([2**63], pa.uint64())})
    with pytest.raises(CorpusError, match="keep it as text") as caught:
        Fields.of(table.schema, "image").metadata_of(table)
    assert caught.value.place == "column 'big'"


def test_columns_are_told_by_their_names() -> None:
    names = {"key": [1], "id": ["a"], "image_path": ["p.png"], "caption": ["c"], "text": ["t"]}
    schema = pa.table(names).schema
    image, text = Fields.of(schema, "image"), Fields.of(schema, "text")
    assert (image.id, image.image, image.text) == ("id", "image_path", None)
    assert (text.id, text.image, text.text) == ("id", "image_path", "caption")
    assert list(image.metadata) == ["caption", "key", "text"]
    assert list(text.metadata) == ["key", "text"]
    assert Fields.of(pa.table({"key": [1]}).schema, "image").id == "key"
    assert Fields.of(pa.table({"x": [1]}).schema, "image").id is None


def test_names_of_the_catalogue_itself_get_underscores() -> None:
    schema = pa.table({"id": [1], "image": [7], "_image": [8]}).schema
    fields = Fields.of(schema, "image")
    assert fields.image is None  # a number is no path
    assert fields.metadata == {"_image": "_image", "image": "__image"}


def test_ids_are_strings_and_each_that_cannot_be_one_says_why() -> None:
    ids, reasons = ids_of(pa.array([" a ", None, "", "x" * 513, "b\u0007", "é"]), 0, 6)
    assert ids.to_pylist()[0::5] == ["a", "é"]
    assert reasons == {
        1: "no id",
        2: "no id",
        3: "an id of more than 512 characters",
        4: "its id holds control characters",
    }
    assert ids_of(pa.array([7, 8]), 0, 2)[0].to_pylist() == ["7", "8"]
    assert ids_of(pa.array([7.0, None]), 0, 2)[0].to_pylist() == ["7", None]
    floats = pa.array([0.5, float("nan"), -3.0, 1e300, 2.0**53, float("-inf"), None])
    ids, reasons = ids_of(floats, 0, 7)
    assert ids.to_pylist() == ["0.5", None, "-3", str(int(1e300)), str(2**53), None, None]
    assert reasons == dict.fromkeys((1, 5, 6), "no id")
    assert ids_of(pa.array([7, 2**53 + 1]), 0, 2)[0].to_pylist() == ["7", str(2**53 + 1)]
    ids, reasons = ids_of(NOT_UTF8, 0, 2)
    assert (ids.to_pylist(), reasons) == ([None, "a"], {0: "its id is not UTF-8"})
    assert ids_of(None, 40, 3)[0].to_pylist() == ["40", "41", "42"]
    with pytest.raises(CorpusError, match="text or numbers are needed"):
        ids_of(pa.array([True]), 0, 1)


def test_pictures_stay_inside_the_corpus_and_none_is_opened(tmp_path: Path) -> None:
    given = ["a.png", "in/b.png", str(tmp_path / "c.png"), "/etc/passwd", "../x.png", "http://x/y"]
    refs, lost, unread = references(pa.array([*given, None, "in/../d.png", "..e.png"]), tmp_path)
    assert refs.to_pylist() == [
        "a.png", "in/b.png", "c.png", None, None, None, None, "d.png", "..e.png",
    ]  # fmt: skip
    assert (lost, unread) == (3, 0)
    refs, lost, unread = references(NOT_UTF8, tmp_path)
    assert (refs.to_pylist(), lost, unread) == ([None, "a"], 0, 1)


def test_a_row_has_one_text_and_an_empty_one_where_there_is_none() -> None:
    def texts(column: Any | None, count: int) -> tuple[list[str], int]:
        found, lost = texts_of(column, count)
        return found.to_pylist(), lost

    assert texts(None, 2) == (["", ""], 0)
    assert texts(pa.array(["a", None]), 2) == (["a", ""], 0)
    assert texts(pa.array([["a", "b"], [], None]), 3) == (["a", "", ""], 0)
    assert texts(NOT_UTF8, 2) == (["", "a"], 1)
    assert texts(pa.ListArray.from_arrays([0, 1, 2], NOT_UTF8), 2) == (["", "a"], 1)


def test_payloads_become_columns_that_fit_every_value_seen() -> None:
    payloads: list[dict[str, Any]] = [
        {
            "w": 2**53 + 1,
            "v": 1,
            "u": 2**53 + 1,
            "n": 1,
            "f": 1,
            "m": 1,
            "b": True,
            "l": ["x"],
            "z": None,
            "id": "mine",
            "big": 2**63,
        },
        {
            "w": 1,
            "v": 2.5,
            "u": 0.5,
            "n": 2,
            "f": 0.5,
            "m": "a",
            "b": None,
            "l": [],
            "o": {"k": "é"},
        },
    ]
    kinds = Kinds()
    for payload in payloads:
        kinds.add(payload)
    columns = Kinds.of_json(kinds.to_json()).columns(taken=("id",))
    found = {
        name: as_column([one.get(key) for one in payloads], kind) for key, name, kind in columns
    }
    assert {name: (str(c.type), c.to_pylist()) for name, c in found.items()} == {
        "n": ("int64", [1, 2]),
        "w": ("int64", [2**53 + 1, 1]),
        "v": ("double", [1.0, 2.5]),
        "u": ("string", [str(2**53 + 1), "0.5"]),
        "f": ("double", [1.0, 0.5]),
        "m": ("string", ["1", "a"]),
        "b": ("bool", [True, None]),
        "l": ("list<item: string>", [["x"], []]),
        "z": ("string", [None, None]),
        "_id": ("string", ["mine", None]),
        "big": ("string", [str(2**63), None]),
        "o": ("string", [None, '{"k": "é"}']),
    }
    assert as_column([np.nan, "x"], pa.string()).to_pylist() == [None, "x"]

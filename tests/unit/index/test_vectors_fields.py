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
    (column,) = fields.metadata_of(table)
    assert column.to_pylist() == wanted
    assert str(column.type).startswith(kept)
    assert fields.schema.field("c").type == column.type


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
    assert ids_of(None, 40, 3)[0].to_pylist() == ["40", "41", "42"]
    with pytest.raises(CorpusError, match="text or numbers are needed"):
        ids_of(pa.array([True]), 0, 1)


def test_pictures_stay_inside_the_corpus_and_none_is_opened(tmp_path: Path) -> None:
    given = ["a.png", "in/b.png", str(tmp_path / "c.png"), "/etc/passwd", "../x.png", "http://x/y"]
    refs, lost = references(pa.array([*given, None, "in/../d.png", "..e.png"]), tmp_path)
    assert refs.to_pylist() == [
        "a.png", "in/b.png", "c.png", None, None, None, None, "d.png", "..e.png",
    ]  # fmt: skip
    assert lost == 3


def test_a_row_has_one_text_and_an_empty_one_where_there_is_none() -> None:
    assert texts_of(None, 2).to_pylist() == ["", ""]
    assert texts_of(pa.array(["a", None]), 2).to_pylist() == ["a", ""]
    assert texts_of(pa.array([["a", "b"], [], None]), 3).to_pylist() == ["a", "", ""]


def test_payloads_become_columns_that_fit_every_value_seen() -> None:
    payloads: list[dict[str, Any]] = [
        {"n": 1, "f": 1, "m": 1, "b": True, "l": ["x"], "z": None, "id": "mine", "big": 2**63},
        {"n": 2, "f": 0.5, "m": "a", "b": None, "l": [], "o": {"k": "é"}},
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

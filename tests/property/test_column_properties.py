"""What is found of a column bit by bit, in bounded memory, is what its whole says."""

from __future__ import annotations

import tempfile
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hivlp.index.build import columns
from hivlp.index.build.columns import ColumnTyper, MetadataTypes, metadata_columns, typed_column
from hivlp.index.build.spool import from_json, to_json
from hivlp.index.snapshot import coding
from hivlp.index.snapshot.coded import code_column, open_coded, write_coded
from hivlp.index.snapshot.scratch import Scratch

NUMBERS_IN_TEXT = st.sampled_from(
    ["0", "1", "-1", "1.0", "1.10", "1.1", "-0", "-0.0", "0.0", "007", "1e5", "true", "false",
     "True", "9" * 18, "9" * 19, "123456789012345.1", "123456789012345.123456789012345",
     "0.1", "0.10000000000000001", "", " 1"]
)  # fmt: skip
DECIMALS = st.decimals(-1000, 1000, places=2, allow_nan=False).map(str)
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30))])
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": st.integers(-(2**66), 2**66) | st.integers(-5, 5) | st.sampled_from([2**53, 2**53 + 1]),
    "float": st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0]),
    "text": TEXTS,
    "numbers in texts": NUMBERS_IN_TEXT,
    "decimals in texts": DECIMALS,
    "date": st.dates(),
    "time": st.datetimes(timezones=ZONES),
    "list": st.lists(TEXTS, max_size=3) | st.lists(TEXTS, max_size=3).map(tuple),
    "nested": st.dictionaries(TEXTS, st.integers() | st.none(), max_size=2)
    | st.lists(st.integers() | TEXTS, max_size=3),
    "other": st.decimals(allow_nan=False, allow_infinity=False, places=1) | st.binary(max_size=3),
}


def column_values() -> st.SearchStrategy[list[Any]]:
    """Columns of one kind or of some mixed, with values missing."""
    one = st.sampled_from(sorted(VALUES)).map(lambda name: VALUES[name])
    mixed = st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=3, unique=True).map(
        lambda names: st.one_of(*(VALUES[name] for name in names))
    )
    return (one | mixed).flatmap(lambda values: st.lists(values | st.none(), max_size=14))


@settings(max_examples=400, deadline=None)
@example(["1.1"] * 4 + ["1.10"])
@example(["0.1", "2.5", "3.5", "4.5", "0.10", "5.5"])
@example(["1", "2", "3", "4", "1.0"])
@example(["-0", "0", "1.5"])
@example(["9" * 18, "x"])
@example(["true", "x", {}])
@given(column_values())
def test_types_found_bit_by_bit_are_those_of_the_whole_column(values: list[Any]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(columns, FEW=2, SPILL=2),
        Scratch(Path(folder)) as scratch,
    ):
        typer = ColumnTyper(scratch)
        for value in values:
            typer.see(value)
        kind = typer.type()
    whole = typed_column(values)
    cut = len(values) // 2
    parts = pa.chunked_array([kind.array(values[:cut]), kind.array(values[cut:])])
    assert parts.type == whole.type
    assert parts.combine_chunks().equals(whole)


@settings(max_examples=200, deadline=None)
@given(column_values())
def test_values_that_were_kept_as_text_make_the_same_column(values: list[Any]) -> None:
    kept = [from_json(to_json({"x": value}))["x"] for value in values]
    assert typed_column(kept).equals(typed_column(values))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "id", "_id", "image", "b\ud800", "b?"]), st.integers(0, 3)
        ),
        max_size=8,
    )
)
def test_columns_found_item_by_item_have_the_names_of_the_whole(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, Scratch(Path(folder)) as scratch:
        types = MetadataTypes(scratch)
        for row in rows:
            types.see(row)
        found = {
            free: kind.array([row.get(name) for row in rows])
            for free, (name, kind) in types.columns().items()
        }
    whole = metadata_columns(rows)
    assert list(found) == list(whole)
    assert all(found[name].equals(whole[name]) for name in whole)


def test_decimal_values_keep_what_they_print() -> None:
    kept = from_json(to_json({"x": Decimal("1.50"), "y": datetime(2024, 1, 2), "z": date(1, 1, 1)}))
    assert typed_column([kept["x"]]).to_pylist() == ["1.50"]
    assert (kept["y"], kept["z"]) == (datetime(2024, 1, 2), date(1, 1, 1))


ARROW: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), st.text(st.sampled_from("abé\U0001f600~"), max_size=3)),
    "list": (pa.list_(pa.string()), st.lists(st.sampled_from("abcdef"), max_size=4)),
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)),
    "float": (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, 1.5])),
    "boolean": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
}


@pytest.mark.parametrize("name", sorted(ARROW))
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    part=st.integers(1, 7),
    block=st.integers(1, 4),
    span=st.integers(1, 4),
    keep=st.integers(0, 3),
    big=st.sampled_from([1, 40, 10_000]),
)
def test_columns_coded_part_by_part_are_those_coded_at_once(
    data: st.DataObject, part: int, block: int, span: int, keep: int, big: int, name: str
) -> None:
    kind, values = ARROW[name]
    column = data.draw(st.lists(values | st.none(), max_size=40))
    cut = data.draw(st.integers(0, len(column)))
    chunks = [pa.array(column[:cut], kind), pa.array(column[cut:], kind)]
    table = pa.table({"c": pa.chunked_array(chunks, kind)})
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(coding, PART=part, BLOCK=block, RANGE=span, KEY_BYTES=keep, BLOCK_BYTES=big),
    ):
        write_coded(Path(folder), table, ["c"])
        found = open_coded(Path(folder), table, ["c"])["c"]
        whole = code_column("c", table.column("c"))
        assert [str(v) for v in found.values] == [str(v) for v in whole.values]
        assert type(found.values) is type(whole.values) or name in ("text", "list")
        for a, b in ((found.codes, whole.codes), (found.starts, whole.starts)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(found.items, whole.items)

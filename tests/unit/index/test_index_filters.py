"""Filters: what is read, what is refused and where; rows agree with looking at each item."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.index.filter_masks import ENTRY_BYTES, FilterMasks
from hivlp.index.filters import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_TEXT_CHARS,
    MAX_VALUES,
    FilterError,
    parse_date,
    parse_filter,
)
from hivlp.index.snapshot.coded import (
    CodedColumn,
    code_column,
    coded_files,
    open_coded,
    write_coded,
)

COLOURS = ("blue", "green", "red", "café", "")
COUNT = 400
BIG = 2**60 + 1


def items(seed: int = 0) -> list[dict[str, Any]]:
    """Every kind of column, with values missing, equal, huge and odd."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(COUNT):
        item: dict[str, Any] = {
            "colour": COLOURS[rng.integers(len(COLOURS))],
            "price": round(float(rng.integers(0, 60)) / 4, 2),
            "stock": int(rng.choice([0, 1, 2, 7, -3, BIG])),
            "new": bool(rng.integers(2)),
            "tags": [str(t) for t in rng.choice(["a", "b", "c", "d"], rng.integers(0, 4))],
            "day": date(2024, 1, 1 + int(rng.integers(28))),
            "at": datetime(2024, 5, 1, int(rng.integers(24)), 30, tzinfo=UTC),
            "name": f"n{i}",
        }
        for name in list(item):
            if name != "name" and rng.random() < 0.1:
                item[name] = None
        found.append(item)
    return found


ITEMS = items()
TYPES = {
    "colour": pa.string(),
    "price": pa.float64(),
    "stock": pa.int64(),
    "new": pa.bool_(),
    "tags": pa.list_(pa.string()),
    "day": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "name": pa.string(),
}
NAMES = tuple(TYPES)


def table() -> Any:
    return pa.table({n: pa.array([i[n] for i in ITEMS], t) for n, t in TYPES.items()})


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CodedColumn]:
    folder = tmp_path_factory.mktemp("snapshot")
    write_coded(folder, table(), NAMES)
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there == set(coded_files(NAMES, table()))
    return open_coded(folder, table(), NAMES)


@pytest.fixture(scope="module")
def masks(columns: dict[str, CodedColumn]) -> FilterMasks:
    return FilterMasks(columns, COUNT)


def slow(item: dict[str, Any], asked: dict[str, Any]) -> bool:
    """The filter's meaning, item by item."""
    if "and" in asked:
        return all(slow(item, part) for part in asked["and"])
    if "or" in asked:
        return any(slow(item, part) for part in asked["or"])
    if "not" in asked:
        return not slow(item, asked["not"])
    value = item[asked["field"]]
    if "exists" in asked:
        there = value is not None and value != []
        return there == asked["exists"]
    if value is None:
        return False
    values = value if isinstance(value, list) else [value]
    return any(_fits(one, asked) for one in values)


def _fits(value: Any, asked: dict[str, Any]) -> bool:
    if isinstance(value, str):
        return _compare(value.encode(), asked, str.encode)
    if isinstance(value, date):
        if not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        return _compare(value, asked, parse_date)
    return _compare(value, asked, lambda given: given)


def _compare(value: Any, asked: dict[str, Any], own: Any) -> bool:
    if "eq" in asked:
        return bool(value == own(asked["eq"]))
    if "in" in asked:
        return value in [own(v) for v in asked["in"]]
    ends = asked["range"]
    return bool(
        ("gt" not in ends or value > own(ends["gt"]))
        and ("gte" not in ends or value >= own(ends["gte"]))
        and ("lt" not in ends or value < own(ends["lt"]))
        and ("lte" not in ends or value <= own(ends["lte"]))
    )


TEXTS = st.sampled_from([*COLOURS, "violet", "a", "gree", "~"])
NUMBERS = st.sampled_from([0, 1, 2, 7, -3, BIG, BIG - 1, 0.25, 3.75, 2.0, -1e300, 1e300])
DAYS = st.sampled_from(["2024-01-05", "2024-01-05T12:00:00", "2023-01-01", "2024-05-01T10:30:00Z",
                        "2024-05-01T12:30:00+02:00", "2030-01-01"])  # fmt: skip
VALUES: dict[str, Any] = {
    "colour": TEXTS,
    "tags": TEXTS,
    "name": st.sampled_from(["n1", "n10", "n399", "x"]),
    "price": NUMBERS,
    "stock": NUMBERS,
    "new": st.booleans(),
    "day": DAYS,
    "at": DAYS,
}


@st.composite
def conditions(draw: Any) -> dict[str, Any]:
    field = draw(st.sampled_from(sorted(VALUES)))
    values = VALUES[field]
    kinds = ["eq", "in", "exists"] + ["range"] * (field != "new")
    kind = draw(st.sampled_from(kinds))
    if kind == "eq":
        return {"field": field, "eq": draw(values)}
    if kind == "in":
        return {"field": field, "in": draw(st.lists(values, min_size=1, max_size=4))}
    if kind == "exists":
        return {"field": field, "exists": draw(st.booleans())}
    low = draw(st.sampled_from([(), ("gt",), ("gte",)]))
    high = draw(st.sampled_from([("lt",), ("lte",)] if not low else [(), ("lt",), ("lte",)]))
    return {"field": field, "range": {name: draw(values) for name in (*low, *high)}}


FILTERS = st.recursive(
    conditions(),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"and": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"or": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"not": inner}),
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(FILTERS)
def test_a_filter_allows_the_items_that_looking_at_each_allows(
    masks: FilterMasks, asked: dict[str, Any]
) -> None:
    expression = parse_filter(json.loads(json.dumps(asked)))
    mask = masks.rows(expression, "image", np.arange(COUNT))
    expected = np.array([slow(item, asked) for item in ITEMS])
    assert mask.allowed.tolist() == expected.tolist()
    assert mask.count == int(expected.sum())
    assert np.array_equal(mask.bits, np.packbits(expected, bitorder="little"))


@settings(max_examples=60, deadline=None)
@given(FILTERS)
def test_comparing_and_gathering_find_the_same(
    columns: dict[str, CodedColumn], asked: dict[str, Any]
) -> None:
    expression = parse_filter(asked)
    stack = [expression]
    while stack:
        one = stack.pop()
        if hasattr(one, "parts"):
            stack += one.parts
            continue
        column = columns[one.field]
        if one.exists is None and column.codes is not None:
            slices = column._slices(one)
            gathered = np.zeros(COUNT, bool)
            for a, b in slices:
                gathered[column.items[column.starts[a] : column.starts[b]]] = True
            assert column._compared(slices).tolist() == gathered.tolist()


def test_rows_of_allowed_items_are_allowed(masks: FilterMasks) -> None:
    row_items = np.repeat(np.arange(0, COUNT, 2), 3)
    expression = parse_filter({"field": "colour", "eq": "red"})
    mask = masks.rows(expression, "text", row_items)
    allowed = [ITEMS[item]["colour"] == "red" for item in row_items]
    assert mask.allowed.tolist() == allowed
    assert masks.rows(expression, "text", row_items) is mask, "kept"
    again = parse_filter({"field": "colour", "eq": "red"})
    assert masks.rows(again, "text", row_items) is mask
    assert masks.rows(expression, "image", np.arange(COUNT)) is not mask


def test_what_is_kept_is_bounded_and_a_small_cache_still_answers(
    columns: dict[str, CodedColumn],
) -> None:
    small = FilterMasks(columns, COUNT, kept_bytes=10)
    expression = parse_filter({"field": "new", "eq": True})
    first = small.rows(expression, "image", np.arange(COUNT))
    second = small.rows(expression, "image", np.arange(COUNT))
    assert first is not second
    assert first.allowed.tolist() == second.allowed.tolist()


def test_the_same_parts_in_another_order_are_the_same_filter() -> None:
    a, b = {"field": "x", "eq": 1}, {"field": "y", "in": ["q", "p"]}
    swapped = {"field": "y", "in": ["p", "q"]}
    assert parse_filter({"and": [a, b]}).key == parse_filter({"and": [swapped, a]}).key
    assert parse_filter({"field": "x", "eq": True}).key != parse_filter(a).key
    assert parse_filter({"and": [a, b]}).key != parse_filter({"or": [a, b]}).key


DEEP: dict[str, Any] = {"field": "x", "eq": 1}
for _ in range(MAX_DEPTH):
    DEEP = {"not": DEEP}

REFUSED: list[tuple[str, Any, str]] = [
    ("no object", "colour = red", "filter"),
    ("empty", {}, "filter"),
    ("a list", [], "filter"),
    ("unknown key", {"colour": "red"}, "filter"),
    ("two combinations", {"and": [], "or": []}, "filter"),
    ("an empty and", {"and": []}, "filter.and"),
    ("an and of no list", {"and": {"field": "x", "eq": 1}}, "filter.and"),
    ("inside", {"and": [{"field": "x", "eq": 1}, {"not": {"or": [3]}}]}, "filter.and.1.not.or.0"),
    ("no operator", {"field": "x"}, "filter"),
    ("two operators", {"field": "x", "eq": 1, "in": [1]}, "filter"),
    ("unknown operator", {"field": "x", "like": "a%"}, "filter"),
    ("field of no text", {"field": 3, "eq": 1}, "filter.field"),
    ("null", {"field": "x", "eq": None}, "filter.eq"),
    ("a list as value", {"field": "x", "eq": [1]}, "filter.eq"),
    ("NaN", {"field": "x", "eq": float("nan")}, "filter.eq"),
    ("half a character", {"field": "x", "eq": "\ud83d"}, "filter.eq"),
    ("a long text", {"field": "x", "eq": "a" * (MAX_TEXT_CHARS + 1)}, "filter.eq"),
    ("in nothing", {"field": "x", "in": []}, "filter.in"),
    ("too many values", {"field": "x", "in": [1] * (MAX_VALUES + 1)}, "filter.in"),
    ("a bad value", {"field": "x", "in": [1, {}]}, "filter.in.1"),
    ("range of nothing", {"field": "x", "range": {}}, "filter.range"),
    ("range of a number", {"field": "x", "range": 3}, "filter.range"),
    ("unknown end", {"field": "x", "range": {"above": 3}}, "filter.range"),
    ("one end twice", {"field": "x", "range": {"gt": 3, "gte": 3}}, "filter.range"),
    ("a boolean end", {"field": "x", "range": {"gt": True}}, "filter.range.gt"),
    ("exists maybe", {"field": "x", "exists": 1}, "filter.exists"),
    ("too deep", DEEP, "filter" + ".not" * MAX_DEPTH),
    (
        "too many conditions",
        {"or": [{"field": "x", "eq": i} for i in range(MAX_CONDITIONS + 1)]},
        f"filter.or.{MAX_CONDITIONS}",
    ),
]


@pytest.mark.parametrize(("given_", "place"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_can_not_be_read_is_refused_with_its_place(given_: Any, place: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(given_)
    assert refused.value.param == place
    assert refused.value.code == "invalid_filter"
    assert place in refused.value.message


def test_limits_are_inclusive() -> None:
    assert len(parse_filter({"field": "x", "in": [1] * MAX_VALUES}).values) == MAX_VALUES  # type: ignore[union-attr]
    parse_filter({"or": [{"field": "x", "eq": i} for i in range(MAX_CONDITIONS)]})
    parse_filter(DEEP["not"])
    parse_filter({"field": "x", "eq": "a" * MAX_TEXT_CHARS})


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"field": "price", "eq": "3"}, "number"),
        ({"field": "price", "eq": True}, "number"),
        ({"field": "colour", "eq": 3}, "text"),
        ({"field": "tags", "in": ["a", 3]}, "list"),
        ({"field": "new", "eq": 1}, "boolean"),
        ({"field": "new", "range": {"gt": 0}}, "boolean"),
        ({"field": "day", "eq": "yesterday"}, "ISO 8601"),
        ({"field": "day", "range": {"gte": 20240101}}, "date"),
        ({"field": "shoe", "exists": True}, "there are: at, colour"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(
    masks: FilterMasks, asked: dict[str, Any], word: str
) -> None:
    with pytest.raises(FilterError) as refused:
        masks.rows(parse_filter({"not": asked}), "image", np.arange(COUNT))
    assert word in refused.value.message
    assert refused.value.param.startswith("filter.not")


def test_columns_that_do_not_fit_their_table_are_found(tmp_path: Path) -> None:
    write_coded(tmp_path, table(), ("colour",))
    with pytest.raises(ValueError, match="codes of"):
        open_coded(tmp_path, table().slice(0, 10), ("colour",))
    np.save(tmp_path / "filters" / "0.starts.npy", np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="don't agree"):
        open_coded(tmp_path, table(), ("colour",))


def test_an_empty_column_and_one_of_nulls_can_be_asked(tmp_path: Path) -> None:
    lists = pa.array([[], None], pa.list_(pa.string()))
    nothing = pa.table({"x": pa.array([None, None], pa.string()), "l": lists})
    write_coded(tmp_path, nothing, ("x", "l"))
    masks = FilterMasks(open_coded(tmp_path, nothing, ("x", "l")), 2)
    for field in ("x", "l"):
        for asked, count in (({"eq": "a"}, 0), ({"exists": False}, 2), ({"exists": True}, 0)):
            expression = parse_filter({"field": field, **asked})
            assert masks.rows(expression, "image", np.arange(2)).count == count


def test_as_many_rows_as_items_are_not_one_row_each(tmp_path: Path) -> None:
    colours = pa.table({"c": pa.array(["red", "blue", "red"])})
    write_coded(tmp_path, colours, ("c",))
    masks = FilterMasks(open_coded(tmp_path, colours, ("c",)), 3)
    blue = parse_filter({"field": "c", "eq": "blue"})
    assert masks.rows(blue, "text", np.array([0, 0, 2])).rows.tolist() == []
    assert masks.rows(blue, "image", np.arange(3)).rows.tolist() == [1]
    assert masks.rows(blue, "other", np.array([1, 1, 1])).rows.tolist() == [0, 1, 2]


def test_many_different_filters_are_kept_within_the_bound(tmp_path: Path) -> None:
    columns = {"c": code_column("c", pa.chunked_array([["red", "blue"] * 8]))}
    masks = FilterMasks(columns, 16, kept_bytes=20_000)
    for i in range(400):
        asked = {"field": "c", "in": [f"{i}-{j}" for j in range(20)]}
        masks.rows(parse_filter(asked), "image", np.arange(16))
    assert len(masks._masks) <= 20_000 // ENTRY_BYTES
    assert len(masks._bits) <= 20_000 // ENTRY_BYTES
    assert all(len(key) == 16 for key in masks._bits), "a key is a hash, whatever was asked"


def test_values_are_counted_over_the_whole_filter() -> None:
    half = [{"field": "x", "in": list(range(MAX_VALUES // 2))}] * 2
    parse_filter({"and": half})
    with pytest.raises(FilterError) as refused:
        parse_filter({"and": [*half, {"field": "y", "in": [1]}]})
    assert refused.value.param == "filter.and.2.in"
    assert refused.value.limit == MAX_VALUES


@pytest.mark.parametrize(
    "given_", [{f"k{i}" * 50: 1 for i in range(50_000)}, {"field": "x" * 10_000_000, "eq": 1}]
)
def test_an_error_does_not_repeat_all_that_was_sent(given_: Any) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(given_)
    assert len(refused.value.message) < 1_000


def test_columns_of_many_chunks_are_coded_as_one(tmp_path: Path) -> None:
    texts = pa.chunked_array([["b", None], ["a"], ["b", "c"]])
    lists = pa.chunked_array([[["x"], []], [["y", "x"]], [None, ["y"]]], pa.list_(pa.string()))
    many = pa.table({"t": texts, "l": lists})
    write_coded(tmp_path, many, ("t", "l"))
    masks = FilterMasks(open_coded(tmp_path, many, ("t", "l")), 5)
    for asked, rows in (
        ({"field": "t", "range": {"gte": "b"}}, [0, 3, 4]),
        ({"field": "l", "eq": "y"}, [2, 4]),
        ({"field": "l", "exists": False}, [1, 3]),
    ):
        assert masks.rows(parse_filter(asked), "image", np.arange(5)).rows.tolist() == rows


def test_nanoseconds_and_other_zones_become_microseconds_of_utc() -> None:
    moment = np.array(["2024-05-01T12:00:00.123456789", "NaT"], "datetime64[ns]")
    column = code_column("t", pa.chunked_array([pa.array(moment)]))
    masks = FilterMasks({"t": column}, 2)
    late = parse_filter({"field": "t", "range": {"gt": "2024-05-01T13:59:59+02:00"}})
    assert masks.rows(late, "image", np.arange(2)).rows.tolist() == [0]

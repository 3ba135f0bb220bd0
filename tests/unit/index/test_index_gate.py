"""What may not be published, with the rows and items named."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows
from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.encode import EncodedItem
from hivlp.index.build.gate import (
    check_items,
    check_metadata,
    check_rows,
    check_self_retrieval,
    check_side,
)
from hivlp.index.errors import BuildError
from hivlp.models.levels import normalise
from tests.fakes import unit_vectors

IDS = [f"i{i}" for i in range(20)]
MAP = np.arange(20, dtype=np.int64)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(np.nan, "NaN or Inf"), (np.inf, "NaN or Inf"), (-np.inf, "NaN or Inf"), (5.0, "unit length")],
)
def test_bad_rows_are_named_with_their_items(bad: float, reason: str) -> None:
    rows = unit_vectors(20, 8)
    rows[3, 2] = bad
    rows[17, 0] = bad
    with pytest.raises(BuildError, match=reason) as caught:
        check_rows(rows, MAP, IDS, "image level 3")
    assert "row 3 (item 'i3'), row 17 (item 'i17')" in str(caught.value)


def test_zero_rows_are_refused() -> None:
    rows = unit_vectors(20, 8)
    rows[5] = 0
    with pytest.raises(BuildError, match=r"row 5 \(item 'i5'\)"):
        check_rows(rows, MAP, IDS, "image level 3")


def test_many_bad_rows_are_counted_not_listed() -> None:
    rows = np.full((20, 8), np.nan, dtype=np.float32)
    with pytest.raises(BuildError, match="and 15 more"):
        check_rows(rows, MAP, IDS, "image level 3")


def test_counts_must_agree() -> None:
    side = BuiltSide("image", {1: LevelRows(unit_vectors(19, 8), 8)}, MAP, [])
    with pytest.raises(BuildError, match="19 rows for 20"):
        check_side(side, [EncodedItem(i, None, None, (), (), {}) for i in IDS])


def test_ids_must_be_unique() -> None:
    with pytest.raises(BuildError, match="'x' is there twice"):
        check_items([EncodedItem("x", None, None, (), (), {})] * 2)


def test_an_index_that_does_not_find_its_own_rows_is_refused() -> None:
    rows = LevelRows(unit_vectors(20, 8), 8)
    other = LevelRows(unit_vectors(20, 8, seed=9), 8)
    side = BuiltSide("image", {1: rows}, MAP, [])
    rng = np.random.default_rng(0)
    assert check_self_retrieval(side, {1: ExactLevel(1, rows)}, IDS, rng) == 20.0
    with pytest.raises(BuildError, match="do not find themselves"):
        check_self_retrieval(side, {1: ExactLevel(1, other)}, IDS, rng)


def test_rows_kept_as_fp16_may_find_a_near_row_that_is_longer() -> None:
    near = normalise(unit_vectors(1, 8) + 1e-4 * unit_vectors(200, 8, seed=1))
    rows = LevelRows(near.astype(np.float16), 8)
    side = BuiltSide("image", {3: rows}, np.arange(200), [])
    names = [f"i{i}" for i in range(200)]
    rng = np.random.default_rng(0)
    assert check_self_retrieval(side, {3: ExactLevel(3, rows)}, names, rng) == 200.0


def test_items_that_could_not_be_read_again_are_refused_by_column_and_item() -> None:
    ids = pa.chunked_array([[f"i{i}" for i in range(3)], ["x"]])
    rng = np.random.default_rng(0)
    days = pa.array([0, 1, 2, 10**8], pa.int32()).cast(pa.date32())
    check_metadata(pa.table({"id": ids.slice(0, 3), "day": days.slice(0, 3)}), rng)
    with pytest.raises(BuildError, match=r"column 'day': row 3 \(item 'x'\) has a time outside"):
        check_metadata(pa.table({"id": ids, "day": days}), rng)
    texts = pa.array([b"a", b"\xff", b"b", b"c"]).view(pa.string())
    with pytest.raises(BuildError, match=r"column 'text': row 1 \(item 'i1'\): not UTF-8"):
        check_metadata(pa.table({"id": ids, "text": texts}), rng)

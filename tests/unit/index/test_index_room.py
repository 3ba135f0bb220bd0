"""Room on a disk: what is free, what is to stay free, and who shares it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.index.build.footprint import SideShape
from hivlp.index.build.needs import sure_rows
from hivlp.index.build.wishes import FEW_ROWS, Wishes
from hivlp.index.errors import NoRoom
from hivlp.index.snapshot import room
from hivlp.index.snapshot.room import KEPT_BYTES, KEPT_SHARE, check_room, free_bytes, kept_bytes

GIB = 1 << 30


def free(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda folder: size)


@pytest.mark.parametrize("need", [1, GIB])
def test_just_enough_room_is_enough_and_a_byte_less_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: int
) -> None:
    enough = need + max(KEPT_BYTES, round(KEPT_SHARE * need))
    free(monkeypatch, enough)
    check_room({tmp_path: need}, "a version")
    free(monkeypatch, enough - 1)
    with pytest.raises(NoRoom, match="a version: needs") as caught:
        check_room({tmp_path: need}, "a version")
    error = caught.value
    assert (error.folder, error.need_bytes) == (tmp_path, need)
    assert (error.free_bytes, error.kept_bytes) == (enough - 1, kept_bytes(need))


def test_folders_of_one_file_system_share_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 3 * GIB)
    (tmp_path / "there").mkdir()
    needs = {tmp_path / "there": 2 * GIB, tmp_path / "not" / "yet": GIB}
    for folder, need in needs.items():
        check_room({folder: need}, "one alone")
    with pytest.raises(NoRoom) as caught:
        check_room(needs, "both")
    assert (caught.value.folder, caught.value.need_bytes) == (tmp_path / "there", 3 * GIB)


def test_two_folders_that_are_not_there_yet_are_both_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 3 * GIB)
    with pytest.raises(NoRoom) as caught:
        check_room({tmp_path / "one": 2 * GIB, tmp_path / "two": 2 * GIB}, "both")
    assert (caught.value.folder, caught.value.need_bytes) == (tmp_path, 4 * GIB)


def test_a_file_system_that_does_not_say_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, None)
    check_room({tmp_path: 1 << 60}, "a version")


def test_nothing_to_write_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    check_room({tmp_path: 0}, "what is all there")


def test_what_is_free_is_what_an_ordinary_user_may_write(tmp_path: Path) -> None:
    found = free_bytes(tmp_path)
    assert found is not None
    assert 0 < found < 1 << 60


@pytest.mark.parametrize(
    ("wishes", "least", "most"),
    [
        # SQ8 codes are the least, and with the links of two graphs the most.
        (Wishes(), 3_072 + 8 + 128, 3_072 + 8 + 128 + 560),
        (Wishes(must=("mask", "rebuild")), 3_072 + 8 + 128, 3_072 + 8 + 512),
        (Wishes(family="scan", level1="rabitqfs"), 3_072 + 8 + 152, 3_072 + 8 + 152),
        (Wishes(family="scan", level1="rabitqfs", must=()), 3_072 + 8 + 24, 3_072 + 8 + 24),
        (Wishes(family="graph", level1="flat"), 3_072 + 8 + 512 + 560, 3_072 + 8 + 512 + 560),
    ],
)
def test_a_side_takes_what_the_candidates_take_that_it_may_get(
    wishes: Wishes, least: int, most: int
) -> None:
    rows = 1_000_000
    shape = SideShape.planned(rows, (128, 300, 768), "nested", "fp32")
    item_of_row = 8
    found = shape.file_bytes(wishes, materialise=False)
    assert found == (rows * (least + item_of_row), rows * (most + item_of_row))


def test_few_rows_are_counted_flat() -> None:
    shape = SideShape.planned(20_000, (128, 300, 768), "per_exit", "fp16")
    every_level, codes = 2 * (128 + 300 + 768), 4 * (128 + 300 + 768)
    flat = 20_000 * (every_level + codes + 8)
    assert shape.file_bytes(Wishes(), materialise=False) == (flat, flat)


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(level1="pq64x4fs"), Wishes(family="graph")])
@pytest.mark.parametrize("rows", [10, 999, FEW_ROWS, FEW_ROWS + 1, 100_000])
def test_more_rows_never_take_less_than_what_is_sure_of_fewer(rows: int, wishes: Wishes) -> None:
    dims = (128, 300, 768)

    def least(count: int) -> int:
        shape = SideShape.planned(count, dims, "nested", "fp16")
        return shape.file_bytes(wishes, materialise=False)[0]

    sure = SideShape.planned(rows, dims, "nested", "fp16").sure_bytes(wishes, materialise=False)
    assert sure <= min(least(rows + more) for more in (0, 1, 1_000, 20_000))
    assert sure <= least(rows // 2) + least(rows - rows // 2)  # pictures and texts
    assert sure >= 0.7 * min(least(rows), least(rows + 1_000))


def test_nothing_of_few_items_is_sure_where_so_many_may_fail() -> None:
    assert [sure_rows(count, 0.05) for count in (0, 1, 100, -3)] == [0, 0, 95, 0]

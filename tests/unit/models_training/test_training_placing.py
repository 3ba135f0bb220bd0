"""A finished folder takes its place at once, and never another kind's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hivlp.models.training.placing import PlaceError, place_folder

MARK = "mark.json"


def _write(text: str) -> Callable[[Path], None]:
    def write(made: Path) -> None:
        (made / MARK).write_text(text)

    return write


def test_a_folder_of_the_same_kind_is_replaced_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    place_folder(target, MARK, _write("one"))
    place_folder(target, MARK, _write("two"))
    assert (target / MARK).read_text() == "two"
    assert list(target.parent.iterdir()) == [target]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("keep me")
    with pytest.raises(PlaceError, match="folder of something else"):
        place_folder(tmp_path / "full", MARK, _write(""))
    with pytest.raises(PlaceError, match="is a file"):
        place_folder(tmp_path / "full/notes.txt", MARK, _write(""))
    assert (tmp_path / "full/notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("fails_at", ["writing", "placing"])
def test_what_was_there_stays_where_the_new_one_comes_to_nothing(
    tmp_path: Path, fails_at: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / MARK).write_text("the one before")

    def write(made: Path) -> None:
        (made / MARK).write_text("new")
        if fails_at == "writing":
            raise KeyboardInterrupt
        made.rename(tmp_path / "gone")

    with pytest.raises((KeyboardInterrupt, FileNotFoundError)):
        place_folder(target, MARK, write)
    assert (target / MARK).read_text() == "the one before"

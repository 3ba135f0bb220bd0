"""Drafts of items: checked one by one, and encoded only where no vector was given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build.items import RowError, check_id
from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.snapshot.changes import Shape, Upsert
from hivlp.index.snapshot.uploads import upload_path
from hivlp.models.errors import InputError
from hivlp.models.levels import LevelSpec
from tests.tiny_artifact import png, solid

SHAPE = Shape((LevelSpec(1, 1, 4), LevelSpec(2, 2, 8)), "nested")
PICTURE = png(solid("red", (20, 20)))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """One without any encoder."""
    (tmp_path / "index").mkdir()
    return Workshop(
        None, None, SHAPE, "a" * 64, tmp_path / "cache", tmp_path / "index", max_texts=2
    )


def own() -> np.ndarray:
    return np.eye(8, dtype=np.float32)[0]


def test_a_vector_stands_for_the_picture_beside_it_which_is_kept(workshop: Workshop) -> None:
    draft = Draft("a", picture=PICTURE, vectors={"image": own()})
    (ready,) = encode_drafts([draft], workshop)
    assert isinstance(ready, Upsert)
    assert np.array_equal(ready.image_vector, own())
    path = upload_path(workshop.index_folder, ready.image or "")
    assert path is not None
    assert path.read_bytes() == PICTURE


def test_a_picture_beside_a_vector_must_be_one(workshop: Workshop) -> None:
    draft = Draft("a", picture=b"no picture", vectors={"image": own()})
    (wrong,) = encode_drafts([draft], workshop)
    assert isinstance(wrong, InputError)
    assert (wrong.code, wrong.param) == ("unsupported_image", "image")


def test_a_picture_alone_needs_an_encoder(workshop: Workshop) -> None:
    wrong, good = encode_drafts(
        [Draft("a", picture=PICTURE), Draft("b", ("x",), vectors={"text": own()[None]})], workshop
    )
    assert isinstance(wrong, InputError)
    assert wrong.code == "no_encoder"
    assert isinstance(good, Upsert)


def test_the_number_of_texts_is_bounded_by_the_workshop(workshop: Workshop) -> None:
    (wrong,) = encode_drafts([Draft("a", ("x", "y", "z"))], workshop)
    assert isinstance(wrong, InputError)
    assert (wrong.param, wrong.limit) == ("texts", 2)


@pytest.mark.parametrize("item_id", ["", " ", " a", "a\u2003", "\u00a0a"])
def test_ids_are_not_empty_and_have_no_blanks_at_their_edges(item_id: str) -> None:
    with pytest.raises(RowError, match="blanks at its edges"):
        check_id(item_id)
    assert check_id("a b") == "a b"

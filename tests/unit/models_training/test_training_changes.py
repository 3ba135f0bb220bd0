"""Random changes: of pictures (crop, flip, colours) and of texts (masking)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hivlp.models.artifact import ImagePreparation
from hivlp.models.encoder import RgbImage
from hivlp.models.runtime.preprocess import fit
from hivlp.models.training.data.augment import augment, crop_box, speaks_of
from hivlp.models.training.data.masking import NOT_MASKED, Vocabulary, mask_tokens
from hivlp.models.training.data.settings import AugmentSettings, MaskSettings
from tests.unit.models_training.pictured import noise

SPEC = ImagePreparation(height=12, width=16, fit="stretch", mean=(0.5,) * 3, std=(0.5,) * 3)
NOTHING = AugmentSettings(crop_least=1, flip=0, brightness=0, contrast=0, saturation=0)
PICTURE: RgbImage = np.asarray(noise(0))
VOCABULARY = Vocabulary(4, (0, 1, 2, 3, 4), np.arange(5, 1000))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_no_change_is_the_picture_itself() -> None:
    assert np.array_equal(augment(PICTURE, "a cat", SPEC, NOTHING, rng()), PICTURE)


def test_a_crop_has_the_towers_size_and_follows_from_the_seed() -> None:
    settings = replace(NOTHING, crop_least=0.5)
    first = augment(PICTURE, "a cat", SPEC, settings, rng(1))
    assert first.shape == (12, 16, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, augment(PICTURE, "a cat", SPEC, settings, rng(1)))
    assert not np.array_equal(first, augment(PICTURE, "a cat", SPEC, settings, rng(2)))


@pytest.mark.parametrize("how", ["stretch", "crop", "pad"])
def test_a_crop_is_stretched_no_more_than_inference_does_it(how: Literal["crop", "pad"]) -> None:
    # green values that rise from left to right, and red ones from top to bottom, of a wide picture
    wide = np.zeros((60, 180, 3), np.uint8)
    wide[:, :, 1] = np.linspace(0, 255, 180).astype(np.uint8)[None, :]
    wide[:, :, 0] = np.linspace(0, 255, 60).astype(np.uint8)[:, None]
    shapes = {
        name: ImagePreparation(height=32, width=32, fit=name, mean=(0.5,) * 3, std=(0.5,) * 3)
        for name in ("stretch", "crop", "pad")
    }
    nearly_all = replace(NOTHING, crop_least=0.97, crop_aspect=1)
    seen = augment(wide, "a cat", shapes[how], nearly_all, rng()).astype(int)
    far = {
        name: np.abs(seen - np.asarray(fit(Image.fromarray(wide), spec))).mean()
        for name, spec in shapes.items()
    }
    assert far[how] < 6
    assert min(value for name, value in far.items() if name != how) > 12


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.floats(0.01, 0.99),
    st.floats(1, 4),
    st.integers(0, 2**32),
)
def test_a_crop_lies_inside_and_keeps_its_share_and_aspect(
    width: int, height: int, least: float, aspect: float, seed: int
) -> None:
    settings = replace(NOTHING, crop_least=least, crop_aspect=aspect)
    left, top, right, bottom = crop_box(width, height, settings, rng(seed))
    assert 0 <= left < right <= width * (1 + 1e-9)
    assert 0 <= top < bottom <= height * (1 + 1e-9)
    assert (right - left) * (bottom - top) >= least * width * height * (1 - 1e-9)
    change = (right - left) / (bottom - top) * height / width
    assert 1 / aspect * (1 - 1e-6) <= change <= aspect * (1 + 1e-6)


def test_pictures_are_mirrored_unless_the_caption_speaks_of_a_side() -> None:
    settings = replace(NOTHING, flip=1)
    mirrored = augment(PICTURE, "a bright cat", SPEC, settings, rng())
    assert np.array_equal(mirrored, PICTURE[:, ::-1])
    kept = augment(PICTURE, "arrow pointing Leftwards", SPEC, settings, rng())
    assert np.array_equal(kept, PICTURE)


def test_a_side_is_a_words_beginning() -> None:
    words = AugmentSettings().flip_unless
    assert speaks_of("the Right hand", words)
    assert speaks_of("anticlockwise arrow", words)
    for caption in ("TOP-LEFT arrow", "(left) arrow", "up-right arrow", "“Right” hand"):
        assert speaks_of(caption, words), caption
    assert speaks_of("the left hand", ("LEFT",))
    assert not speaks_of("a bright day", words)
    assert not speaks_of("left", ())


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_colour_change_changes_pixels_by_no_more_than_its_factor(name: str) -> None:
    settings = replace(NOTHING, **{name: 0.3})
    changed = augment(PICTURE, "a cat", SPEC, settings, rng(3)).astype(int)
    assert changed.shape == PICTURE.shape
    assert not np.array_equal(changed, PICTURE)
    # the farthest a value can be from what a factor pulls it to is 255
    assert np.abs(changed - PICTURE).max() <= 0.3 * 255 + 1


def test_switching_one_change_off_leaves_the_others_draws_alone() -> None:
    both = replace(NOTHING, crop_least=0.5, contrast=0.3)
    crop_only = replace(both, contrast=0)
    flipped = replace(both, flip=1)
    with_flip = augment(PICTURE, "a cat", SPEC, flipped, rng(5))
    assert np.array_equal(with_flip[:, ::-1], augment(PICTURE, "a cat", SPEC, both, rng(5)))
    assert augment(PICTURE, "a cat", SPEC, crop_only, rng(5)).shape == (12, 16, 3)


def texts(count: int, words: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[TXT], words, [SEP], padding."""
    ids = np.zeros((count, words + 4), np.int64)
    ids[:, 0], ids[:, words + 1] = 2, 3
    ids[:, 1 : words + 1] = rng().integers(5, 1000, (count, words))
    return ids


def masked(count: int, words: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], ...]:
    ids = texts(count, words)
    streams = [rng(i) for i in range(count)]
    return ids, *mask_tokens(ids, VOCABULARY, MaskSettings(), streams)


def test_fifteen_in_a_hundred_words_are_hidden_and_only_they_have_labels() -> None:
    ids, hidden, labels = masked(40, 20)
    chosen = labels != NOT_MASKED
    assert (chosen.sum(1) == 3).all()
    assert np.array_equal(labels[chosen], ids[chosen])
    assert np.array_equal(hidden[~chosen], ids[~chosen])
    assert not chosen[:, 0].any()
    assert not chosen[:, 21:].any()


def test_eighty_ten_ten() -> None:
    ids, hidden, labels = masked(4000, 20)
    chosen = labels != NOT_MASKED
    became, was = hidden[chosen], ids[chosen]
    # 12,000 draws: three deviations are .011 of .8 and .008 of .1
    assert abs((became == 4).mean() - 0.8) < 0.011
    assert abs((became == was).mean() - 0.1) < 0.009
    others = became[(became != 4) & (became != was)]
    assert others.min() >= 5
    assert len(np.unique(others)) > 500


def test_even_a_single_word_is_hidden_and_a_text_without_one_is_left() -> None:
    _, _, labels = masked(5, 1)
    assert ((labels != NOT_MASKED).sum(1) == 1).all()
    ids, hidden, labels = masked(5, 0)
    assert np.array_equal(ids, hidden)
    assert (labels == NOT_MASKED).all()


def test_what_is_hidden_of_a_text_does_not_depend_on_its_batch() -> None:
    ids = texts(6, 9)
    whole = mask_tokens(ids, VOCABULARY, MaskSettings(), [rng(i) for i in range(6)])
    alone = mask_tokens(ids[4:5], VOCABULARY, MaskSettings(), [rng(4)])
    assert np.array_equal(whole[0][4:5], alone[0])
    assert np.array_equal(whole[1][4:5], alone[1])

"""Whatever is done to a picture or a text, it is decoded or refused, and nobody else hears of it.

`make fuzz` does the same for much longer.
"""

from __future__ import annotations

import contextlib
import zlib

import numpy as np
import pytest

from hivlp.models.errors import ImageError, TextError
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.texts import clean_text
from tests.property.mutated import mutations, rounds, seeds, texts

SEEDS = seeds()
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000)
ROUNDS = 300
CODES = {"empty_image", "image_too_large", "unsupported_image", "broken_image"}


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_a_mutated_picture_is_decoded_or_refused(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert decode_image(SEEDS[name], LIMITS).size == 13 * 17 * 3
    decoded = refused = 0
    others, seed = list(SEEDS.values()), zlib.crc32(name.encode())
    for data in mutations(SEEDS[name], others, seed, rounds(ROUNDS)):
        try:
            pixels = decode_image(data, LIMITS)
        except ImageError as error:
            refused += error.code in CODES
        else:
            decoded += 1
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[0] * pixels.shape[1] <= 1_000_000
    assert decoded + refused == rounds(ROUNDS)
    assert refused > 0
    assert capfd.readouterr() == ("", ""), "a library of a decoder speaks to the terminal"


def test_any_text_is_cleaned_once_and_for_all_or_refused() -> None:
    for text in texts(7, rounds(3_000)):
        with contextlib.suppress(TextError):
            cleaned = clean_text(text, max_chars=10_000)
            assert cleaned.encode()
            assert clean_text(cleaned, max_chars=30_000) == cleaned

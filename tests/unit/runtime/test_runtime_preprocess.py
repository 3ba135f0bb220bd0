"""One preprocessing: its golden tensor, its three fits, and pictures of awkward shapes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from PIL import Image

from hivlp.models.artifact import ImagePreparation
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.levels import FloatArray
from hivlp.models.runtime.preprocess import preprocess

Fit = Literal["stretch", "crop", "pad"]
FITS: tuple[Fit, ...] = ("stretch", "crop", "pad")


def preparation(
    fit: Fit, height: int = 16, width: int = 16, crop_ratio: float = 1.0
) -> ImagePreparation:
    return ImagePreparation(
        height=height,
        width=width,
        fit=fit,
        crop_ratio=crop_ratio,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )


def noise(height: int, width: int) -> RgbImage:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def bytes_of(pixels: FloatArray) -> RgbImage:
    """(3, h, w) float32 in [0, 1] back to (h, w, 3) uint8."""
    return np.rint(pixels * 255).astype(np.uint8).transpose(1, 2, 0)


def ramp() -> RgbImage:
    """5 high, 7 wide: red grows to the right, green downwards, blue falls to the right."""
    row = np.arange(7, dtype=np.uint8) * 40
    column = np.arange(5, dtype=np.uint8)[:, None] * 60
    red = np.broadcast_to(row, (5, 7))
    green = np.broadcast_to(column, (5, 7))
    return np.dstack([red, green, 240 - red]).astype(np.uint8)


GOLDEN: dict[Fit, list[list[list[int]]]] = {
    "stretch": [
        [[29, 120, 211], [29, 120, 211], [29, 120, 211], [29, 120, 211]],
        [[8, 8, 8], [82, 82, 82], [158, 158, 158], [232, 232, 232]],
        [[211, 120, 29], [211, 120, 29], [211, 120, 29], [211, 120, 29]],
    ],
    "crop": [
        [[63, 120, 177], [63, 120, 177], [63, 120, 177], [63, 120, 177]],
        [[8, 8, 8], [82, 82, 82], [158, 158, 158], [232, 232, 232]],
        [[177, 120, 63], [177, 120, 63], [177, 120, 63], [177, 120, 63]],
    ],
    "pad": [
        [[9, 9, 9], [29, 120, 211], [29, 120, 211], [9, 9, 9]],
        [[8, 8, 8], [51, 51, 51], [189, 189, 189], [8, 8, 8]],
        [[7, 7, 7], [211, 120, 29], [211, 120, 29], [7, 7, 7]],
    ],
}


@pytest.mark.parametrize("fit", FITS)
def test_golden_tensor(fit: Fit) -> None:
    spec = ImagePreparation(
        height=4,
        width=3,
        fit=fit,
        background=(9, 8, 7),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
    )
    golden = np.array(GOLDEN[fit], dtype=np.float64)
    mean, std = np.array(spec.mean)[:, None, None], np.array(spec.std)[:, None, None]
    pixels = preprocess([ramp()], spec)
    np.testing.assert_allclose(pixels[0], (golden / 255 - mean) / std, atol=1e-5)


@pytest.mark.parametrize("fit", FITS)
def test_output_is_contiguous_float32_channels_first(fit: Fit) -> None:
    pixels = preprocess([noise(9, 20), noise(30, 4)], preparation(fit, 16, 24))
    assert pixels.shape == (2, 3, 16, 24)
    assert pixels.dtype == np.float32
    assert pixels.flags.c_contiguous


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (1, 3), (3, 1), (1, 5000), (5000, 1), (2, 9000)])
@pytest.mark.parametrize("size", [(16, 16), (224, 224), (16, 48)])
def test_awkward_shapes_keep_a_solid_colour(
    fit: Fit, shape: tuple[int, int], size: tuple[int, int]
) -> None:
    image = np.full((*shape, 3), (10, 120, 250), dtype=np.uint8)
    pixels = bytes_of(preprocess([image], preparation(fit, *size))[0])
    coloured = (pixels == (10, 120, 250)).all(axis=2)
    assert coloured.any() if fit == "pad" else coloured.all()


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (33, 33), (100, 17), (8, 13)])
@pytest.mark.parametrize("crop_ratio", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("size", [(16, 16), (15, 20)])
def test_crop_equals_resizing_everything_and_cutting_the_centre(
    shape: tuple[int, int], crop_ratio: float, size: tuple[int, int]
) -> None:
    height, width = size
    # Mid tones: Pillow may swap its two passes, and between them clips what overshoots.
    image = Image.fromarray(noise(*shape) // 2 + 64)
    wide, high = int(width / crop_ratio), int(height / crop_ratio)
    scale = max(wide / image.width, high / image.height)
    full = (max(wide, int(image.width * scale)), max(high, int(image.height * scale)))
    left, top = (full[0] - width) // 2, (full[1] - height) // 2
    slow = image.resize(full, Image.Resampling.BICUBIC).crop(
        (left, top, left + width, top + height)
    )
    fast = bytes_of(
        preprocess([np.asarray(image)], preparation("crop", height, width, crop_ratio))[0]
    )
    np.testing.assert_allclose(fast.astype(int), np.asarray(slow, dtype=int), atol=2)


def test_pad_centres_on_the_background() -> None:
    spec = preparation("pad", 8, 8).model_copy(update={"background": (1, 2, 3)})
    pixels = bytes_of(preprocess([np.full((2, 4, 3), 200, dtype=np.uint8)], spec)[0])
    assert (pixels[2:6] == 200).all()
    assert (pixels[[0, 1, 6, 7]] == (1, 2, 3)).all()


def test_crop_ratio_shows_less_of_the_picture() -> None:
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    image[8:24, 8:24] = 255
    whole = preprocess([image], preparation("crop"))
    centre = preprocess([image], preparation("crop", crop_ratio=0.5))
    assert whole.mean() < 0.3
    assert centre.mean() > 0.99


def test_batch_equals_single_pictures() -> None:
    images = [noise(5, 9), noise(30, 30), noise(1, 1)]
    spec = preparation("crop")
    together = preprocess(images, spec)
    for row, image in enumerate(images):
        assert np.array_equal(together[row], preprocess([image], spec)[0])


def test_no_pictures_give_no_rows() -> None:
    assert preprocess([], preparation("stretch")).shape == (0, 3, 16, 16)


def test_interpolation_is_followed() -> None:
    spec = preparation("stretch")
    bilinear = spec.model_copy(update={"interpolation": "bilinear"})
    assert not np.array_equal(preprocess([noise(5, 5)], spec), preprocess([noise(5, 5)], bilinear))


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4), dtype=np.uint8),
        np.zeros((4, 4, 4), dtype=np.uint8),
        np.zeros((3, 4, 4), dtype=np.uint8),
        np.zeros((4, 4, 3), dtype=np.float32),
        np.zeros((0, 4, 3), dtype=np.uint8),
    ],
)
def test_other_arrays_are_refused_never_guessed(image: RgbImage) -> None:
    with pytest.raises(ImageError, match="height, width, 3") as caught:
        preprocess([noise(2, 2), image], preparation("stretch"))
    assert caught.value.param == "images[1]"

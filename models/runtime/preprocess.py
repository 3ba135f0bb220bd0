"""RGB pictures to an image tower's input: the one function that training, build and query share.

Any difference here between a gallery and its queries moves every vector, so a golden tensor guards
it. The channel axis is the last one by contract and is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from hivlp.models.artifact import ImagePreparation
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.levels import FloatArray

_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
_TINY = 1e-6


def preprocess(images: Sequence[RgbImage], spec: ImagePreparation) -> FloatArray:
    """Resize and scale pictures: (n, 3, height, width) float32, C-contiguous.

    Raises ImageError `unsupported_image` for an array that is not (height, width, 3) uint8.
    """
    pixels = np.empty((len(images), 3, spec.height, spec.width), dtype=np.float32)
    for row, image in enumerate(images):
        _check_pixels(image, row)
        fitted = np.asarray(fit(Image.fromarray(image), spec), dtype=np.float32)
        pixels[row] = fitted.transpose(2, 0, 1)
    mean = np.asarray(spec.mean, dtype=np.float32).reshape(1, 3, 1, 1)
    std = np.asarray(spec.std, dtype=np.float32).reshape(1, 3, 1, 1)
    pixels /= np.float32(255)
    pixels -= mean
    pixels /= std
    return pixels


def _check_pixels(image: RgbImage, row: int) -> None:
    fits = image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8 and image.size
    if not fits:
        raise ImageError(
            "unsupported_image",
            f"expected (height, width, 3) uint8 pixels, got {image.shape} {image.dtype}",
            param=f"images[{row}]",
        )


def fit(image: Image.Image, spec: ImagePreparation) -> Image.Image:
    """A picture brought to the tower's size: stretched, or its middle, or with a background."""
    resample = _RESAMPLING[spec.interpolation]
    if spec.fit == "stretch":
        return _middle(image, spec, _before_cut(spec), resample)
    if spec.fit == "crop":
        return _crop(image, spec, resample)
    return _pad(image, spec, resample)


def _crop(image: Image.Image, spec: ImagePreparation, resample: Image.Resampling) -> Image.Image:
    """Resize until both sides cover size / crop_ratio, and cut the centre."""
    wide, high = _before_cut(spec)
    if wide * image.height >= high * image.width:
        high = max(high, image.height * wide // image.width)
    else:
        wide = max(wide, image.width * high // image.height)
    return _middle(image, spec, (wide, high), resample)


def _before_cut(spec: ImagePreparation) -> tuple[int, int]:
    """Width and height of which the centre is cut; a ratio's last digit decides nothing."""
    return (
        math.floor(spec.width / spec.crop_ratio + _TINY),
        math.floor(spec.height / spec.crop_ratio + _TINY),
    )


def _middle(
    image: Image.Image, spec: ImagePreparation, whole: tuple[int, int], resample: Image.Resampling
) -> Image.Image:
    """Resize to `whole` (width, height), and cut the centre.

    Both at once, by resizing only the part that is kept: the whole of a 1 x 5000 strip would not
    fit into memory.
    """
    left, top = (whole[0] - spec.width) // 2, (whole[1] - spec.height) // 2
    per_column, per_row = image.width / whole[0], image.height / whole[1]
    box = (
        left * per_column,
        top * per_row,
        min((left + spec.width) * per_column, image.width),
        min((top + spec.height) * per_row, image.height),
    )
    return image.resize((spec.width, spec.height), resample, box=box)


def _pad(image: Image.Image, spec: ImagePreparation, resample: Image.Resampling) -> Image.Image:
    """Resize until the picture just fits inside, and centre it on the background."""
    scale = min(spec.width / image.width, spec.height / image.height)
    width = min(spec.width, max(1, round(image.width * scale)))
    height = min(spec.height, max(1, round(image.height * scale)))
    canvas = Image.new("RGB", (spec.width, spec.height), spec.background)
    corner = ((spec.width - width) // 2, (spec.height - height) // 2)
    canvas.paste(image.resize((width, height), resample), corner)
    return canvas


def resampling(spec: ImagePreparation) -> Image.Resampling:
    """Pillow's name for how a preparation resizes."""
    return _RESAMPLING[spec.interpolation]

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


def preprocess(images: Sequence[RgbImage], spec: ImagePreparation) -> FloatArray:
    """Resize and scale pictures: (n, 3, height, width) float32, C-contiguous.

    Raises ImageError `unsupported_image` for an array that is not (height, width, 3) uint8.
    """
    pixels = np.empty((len(images), 3, spec.height, spec.width), dtype=np.float32)
    for row, image in enumerate(images):
        _check_pixels(image, row)
        fitted = np.asarray(_fit(Image.fromarray(image), spec), dtype=np.float32)
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


def _fit(image: Image.Image, spec: ImagePreparation) -> Image.Image:
    resample = _RESAMPLING[spec.interpolation]
    if spec.fit == "stretch":
        return image.resize((spec.width, spec.height), resample)
    if spec.fit == "crop":
        return _crop(image, spec, resample)
    return _pad(image, spec, resample)


def _crop(image: Image.Image, spec: ImagePreparation, resample: Image.Resampling) -> Image.Image:
    """Resize until both sides cover size / crop_ratio, and cut the centre.

    Both at once, by resizing only the part that is kept: the whole of a 1 x 5000 strip would not
    fit into memory.
    """
    wide, high = math.floor(spec.width / spec.crop_ratio), math.floor(spec.height / spec.crop_ratio)
    scale = max(wide / image.width, high / image.height)
    full_width = max(wide, int(image.width * scale))
    full_height = max(high, int(image.height * scale))
    left = (full_width - spec.width) // 2
    top = (full_height - spec.height) // 2
    per_column, per_row = image.width / full_width, image.height / full_height
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

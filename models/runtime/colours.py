"""Any Pillow picture to 8-bit RGB: every mode, with transparency composited over white.

Colours are taken as sRGB: embedded profiles are not applied. What has more than 8 bits a channel is
brought to 8: 16-bit greys by their full scale, 32-bit integers and floats by their own range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from hivlp.models.encoder import RgbImage

_BACKGROUND = (255, 255, 255, 255)
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_WIDE = ("I", "F")
_BLOCK_PIXELS = 1 << 20


def to_rgb(image: Image.Image, *, grey_bits: int = 8) -> RgbImage:
    """The pixels of a loaded picture, (height, width, 3) uint8, C-contiguous.

    `grey_bits` is how many bits a grey sample has in the file: a transparent grey ("colour key") is
    written in the file's own scale. Raises what Pillow raises where it can't convert.
    """
    if image.mode in _SIXTEEN_BIT or image.mode in _WIDE:
        image = _to_eight_bits(image)
    elif image.mode == "LAB":
        image = _from_lab(image)
    elif image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = _over_white(_scale_colour_key(image, grey_bits))
    return np.ascontiguousarray(np.asarray(image.convert("RGB"), dtype=np.uint8))


def _over_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, _BACKGROUND), layer)


def _scale_colour_key(image: Image.Image, grey_bits: int) -> Image.Image:
    """Bring the transparent colour of an L or RGB picture to the 8 bits that its pixels have."""
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int) and grey_bits < 8:
        image.info["transparency"] = key * 255 // (2**grey_bits - 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """A deep grey picture as L, or as LA where one of its greys is transparent."""
    values = np.asarray(image)
    sixteen = image.mode in _SIXTEEN_BIT
    greys = _scale_sixteen_bit(values) if sixteen else _scale_by_range(values)
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return Image.fromarray(greys)
    alpha = np.where(values == key, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([greys, alpha]))


def _scale_sixteen_bit(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """0..65535 to 0..255, rounded."""

    def scaled(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
        wide = np.asarray(rows, dtype=np.uint32)
        return ((wide * 255 + 32767) // 65535).astype(np.uint8)

    return _by_blocks(values, scaled)


def _scale_by_range(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """The smallest finite value to 0, the largest to 255; what is not finite, or flat, to 0."""
    low, high = np.inf, -np.inf
    for rows in _blocks(values):
        wide = np.asarray(rows, dtype=np.float64)
        finite = np.isfinite(wide)
        low = min(low, float(wide.min(where=finite, initial=np.inf)))
        high = max(high, float(wide.max(where=finite, initial=-np.inf)))
    if not low < high:
        return np.zeros(values.shape, dtype=np.uint8)

    def scaled(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
        wide = np.asarray(rows, dtype=np.float64)
        within = np.where(np.isfinite(wide), wide, low)
        # Halved first, so that the range of the largest floats doesn't overflow.
        return np.rint((within / 2 - low / 2) / (high / 2 - low / 2) * 255).astype(np.uint8)

    return _by_blocks(values, scaled)


def _blocks(values: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
    """All rows, some at once: what is computed of them is several times their size."""
    step = max(1, _BLOCK_PIXELS // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        yield values[start : start + step]


def _by_blocks(
    values: npt.NDArray[np.generic],
    scaled: Callable[[npt.NDArray[np.generic]], npt.NDArray[np.uint8]],
) -> npt.NDArray[np.uint8]:
    return np.concatenate([scaled(rows) for rows in _blocks(values)])


def _from_lab(image: Image.Image) -> Image.Image:
    converted = ImageCms.applyTransform(image, _lab_to_srgb())
    assert converted is not None, "applyTransform returns a picture unless in_place"
    return converted


@functools.cache
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )

"""Any Pillow picture to 8-bit RGB: every mode, with transparency composited over white.

Colours are taken as sRGB: embedded profiles are not applied. What has more than 8 bits a channel is
brought to 8: 16-bit greys by their full scale, 32-bit integers and floats by their own range.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from hivlp.models.encoder import RgbImage

_BACKGROUND = (255, 255, 255, 255)
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_WIDE = ("I", "F")


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
    wide = np.asarray(values, dtype=np.uint32)
    return ((wide * 255 + 32767) // 65535).astype(np.uint8)


def _scale_by_range(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """The smallest finite value to 0, the largest to 255; what is not finite, or flat, to 0."""
    wide = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(wide)
    if not finite.any():
        return np.zeros(wide.shape, dtype=np.uint8)
    low, high = float(wide[finite].min()), float(wide[finite].max())
    if high == low:
        return np.zeros(wide.shape, dtype=np.uint8)
    # Halved first, so that the range of the largest floats doesn't overflow.
    scaled = (np.where(finite, wide, low) / 2 - low / 2) / (high / 2 - low / 2)
    return np.rint(scaled * 255).astype(np.uint8)


def _from_lab(image: Image.Image) -> Image.Image:
    converted = ImageCms.applyTransform(image, _lab_to_srgb())
    assert converted is not None, "applyTransform returns a picture unless in_place"
    return converted


@functools.cache
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )

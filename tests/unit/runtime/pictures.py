"""Picture files written for tests, and what decoding makes of them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.runtime.images import ImageLimits, decode_image

LIMITS = ImageLimits()
FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def noise(height: int = 40, width: int = 60) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decode(data: bytes, limits: ImageLimits = LIMITS) -> RgbImage:
    pixels = decode_image(data, limits)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.flags.c_contiguous
    return pixels


def refused(data: bytes, code: str, limits: ImageLimits = LIMITS) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode_image(data, limits, param="picture")
    assert caught.value.code == code
    assert caught.value.param == "picture"
    return caught.value


def png(width: int, height: int, depth: int, colour: int, data: bytes, *more: bytes) -> bytes:
    """A PNG written by hand: `data` are the filtered scanlines, `more` other chunks before them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + body


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

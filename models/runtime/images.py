"""Bytes that someone sent to RGB pixels: what a gallery build, a query and a training run share.

The content decides, never a name. The header's size is checked before anything is decoded, then
everything is decoded at once, so that a picture that breaks late breaks here and nowhere else.

Small files that cost a decoder much are refused before: see `parts`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    _imaging,
)

from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.runtime.colours import to_rgb
from hivlp.models.runtime.formats import SUPPORTED_FORMATS, guess_foreign, supported_format
from hivlp.models.runtime.parts import check_parts

# Called directly: Image.open would first apply Pillow's own pixel limit, which is one number for
# the whole process. The plain JPEG reader also takes the first picture of an MPO.
_READERS: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_BIT_DEPTH_AT = 24
# Pillow keeps a pointer a row, and no supported format but PNG, BMP and TIFF holds more.
_MAX_SIDE = 65_535
_PILLOW = r"PIL\."


class PixelRoom:
    """So many pixels are decoded at once, by all threads together; the others wait.

    Decoding takes up to 17 bytes a pixel for a while. A picture that is larger than all of the room
    has it to itself.
    """

    def __init__(self, pixels: int) -> None:
        self._all = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Hold room for so many pixels, once there is some."""
        wanted = min(pixels, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """How large a picture may be: bytes as sent, and width times height in pixels; and the `room`
    that all share who decode under these limits (None: each has what it needs).

    Pillow's readers of WebP, GIF and TIFF refuse by themselves what has over 178,956,970 pixels.
    """

    max_bytes: int = 10 * 2**20
    max_pixels: int = 50_000_000
    room: PixelRoom | None = None

    def take(self, pixels: int) -> AbstractContextManager[None]:
        """Room to decode so many pixels in."""
        return nullcontext() if self.room is None else self.room.take(pixels)


def decode_image(data: bytes, limits: ImageLimits, *, param: str = "image") -> RgbImage:
    """The first frame of a PNG, JPEG, WebP, GIF, BMP or TIFF: upright, RGB, over white.

    Returns (height, width, 3) uint8. Raises ImageError: `empty_image`, `image_too_large` (bytes or
    pixels, with the limit), `unsupported_image`, `broken_image`.
    """
    kind = _check_bytes(data, limits, param)
    check_parts(data, kind, param)
    _ignore_pillow_warnings()
    if kind == "TIFF":
        _silence_libtiff()
    image = _open(data, kind, limits, param)
    _check_size(image, limits, kind, param)
    with limits.take(image.width * image.height):
        # Pillow's readers raise whatever their parsing runs into, on bytes made to annoy them.
        try:
            image.load()
            upright = _turn_upright(image)
            return to_rgb(upright, grey_bits=_grey_bits(data, kind))
        except Exception as error:
            raise _refusal(kind, error, limits, param) from error


def _check_bytes(data: bytes, limits: ImageLimits, param: str) -> str:
    """The format's name, or ImageError."""
    if not data:
        raise ImageError("empty_image", "the picture is empty: 0 bytes were sent", param=param)
    if len(data) > limits.max_bytes:
        raise ImageError(
            "image_too_large",
            f"the picture has {len(data)} bytes, the limit is {limits.max_bytes}",
            param=param,
            limit=limits.max_bytes,
        )
    kind = supported_format(data)
    if kind is None:
        guess = guess_foreign(data)
        seems = f"it seems to be {guess}; " if guess else ""
        wanted = f"{', '.join(SUPPORTED_FORMATS[:-1])} or {SUPPORTED_FORMATS[-1]}"
        raise ImageError(
            "unsupported_image",
            f"not a supported picture: {seems}send {wanted}",
            param=param,
        )
    return kind


def _open(data: bytes, kind: str, limits: ImageLimits, param: str) -> ImageFile.ImageFile:
    """Read the header only."""
    try:
        return _READERS[kind](io.BytesIO(data))
    except Exception as error:
        raise _refusal(kind, error, limits, param) from error


def _check_size(image: ImageFile.ImageFile, limits: ImageLimits, kind: str, param: str) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            "image_too_large",
            f"the picture is {width} x {height} = {width * height} pixels, "
            f"the limit is {limits.max_pixels}",
            param=param,
            limit=limits.max_pixels,
        )
    if max(width, height) > _MAX_SIDE:
        raise ImageError(
            "image_too_large",
            f"the picture is {width} x {height} pixels, the most is {_MAX_SIDE} a side",
            param=param,
            limit=_MAX_SIDE,
        )
    if width < 1 or height < 1:
        raise ImageError(
            "broken_image", f"the {kind} picture says it is {width} x {height} pixels", param=param
        )


def _refusal(kind: str, error: Exception, limits: ImageLimits, param: str) -> ImageError:
    """What a reader's exception means to the one who sent the picture."""
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(
            "image_too_large",
            f"the {kind} picture has too many pixels, the limit is {limits.max_pixels}",
            param=param,
            limit=limits.max_pixels,
        )
    reason = str(error) or type(error).__name__
    return ImageError(
        "broken_image", f"the {kind} picture is broken or cut short: {reason}", param=param
    )


def _turn_upright(image: ImageFile.ImageFile) -> Image.Image:
    """Apply the EXIF orientation; one that can't be read counts as none."""
    try:
        # TIFF pictures were already turned when they were loaded, and their tag removed.
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:
        return image
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _grey_bits(data: bytes, kind: str) -> int:
    return data[_PNG_BIT_DEPTH_AT] if kind == "PNG" else 8


@functools.cache
def _silence_libtiff() -> None:
    """libtiff tells broken files on standard error, which is a log of JSON lines, or a terminal.

    Pillow turns off its warnings and has no switch for its errors. The library is found through
    Pillow's own module; a build that doesn't export it goes on telling.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


def _ignore_pillow_warnings() -> None:
    """Keep Pillow's remarks on odd but readable files out of logs, and from becoming errors.

    The filter stays: `warnings.catch_warnings` isn't safe where several threads decode.
    """
    if warnings.filters:
        action, _, _, module, _ = warnings.filters[0]
        if action == "ignore" and isinstance(module, re.Pattern) and module.pattern == _PILLOW:
            return
    warnings.filterwarnings("ignore", module=_PILLOW)

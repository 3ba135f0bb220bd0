"""Pictures and texts that are almost right: seeds of every kind, and what was done to them.

Everything follows from a number, so that what was found once is found again.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

Random = np.random.Generator
FUZZ_ROUNDS = "HIVLP_FUZZ_ROUNDS"
WORDS = (
    0,
    1,
    2,
    7,
    8,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
)


def rounds(usual: int) -> int:
    """How often to try: as often as `make fuzz` says, or as is usual."""
    return int(os.environ.get(FUZZ_ROUNDS, usual))


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def seeds() -> dict[str, bytes]:
    """Small pictures of every format, in most of what each format can be."""
    values = np.random.default_rng(1).integers(0, 256, (13, 17, 4), np.uint8)
    rgba = Image.fromarray(values)
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    palette, one = rgb.quantize(16), grey.convert("1")
    frames = [rgb, Image.new("RGB", rgb.size, "red"), rgb]
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a picture"
    text = PngImagePlugin.PngInfo()
    text.add_text("k", "v" * 50, zip=True)
    text.add_itxt("i", "é" * 20, zip=True)
    deep = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    found = {
        "png": _saved(rgb, "PNG"),
        "png rgba text": _saved(rgba, "PNG", pnginfo=text, icc_profile=b"\0" * 200, exif=exif),
        "png palette": _saved(palette, "PNG", transparency=3),
        "png deep": _saved(deep, "PNG"),
        "png one": _saved(one, "PNG"),
        "png animated": _saved(frames[0], "PNG", **more),
        "jpeg": _saved(rgb, "JPEG", exif=exif, icc_profile=b"\0" * 200),
        "jpeg progressive": _saved(rgb, "JPEG", progressive=True),
        "jpeg grey": _saved(grey, "JPEG"),
        "jpeg cmyk": _saved(rgb.convert("CMYK"), "JPEG"),
        "webp": _saved(rgb, "WEBP"),
        "webp lossless": _saved(rgba, "WEBP", lossless=True, exif=exif),
        "webp animated": _saved(frames[0], "WEBP", **more),
        "gif": _saved(palette, "GIF", transparency=1),
        "gif animated": _saved(frames[0], "GIF", **more),
        "bmp": _saved(rgb, "BMP"),
        "bmp palette": _saved(palette, "BMP"),
        "bmp one": _saved(one, "BMP"),
        "bmp rgba": _saved(rgba, "BMP"),
    }
    for name in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg"):
        found[f"tiff {name}"] = _saved(rgb, "TIFF", compression=name, exif=exif)
    found["tiff group4"] = _saved(one, "TIFF", compression="group4")
    found["tiff deep"] = _saved(deep, "TIFF")
    found["tiff float"] = _saved(grey.convert("F"), "TIFF", compression="tiff_lzw")
    found["tiff cmyk"] = _saved(rgb.convert("CMYK"), "TIFF")
    found["tiff lab"] = _saved(rgb.convert("LAB"), "TIFF")
    return found


def mutations(data: bytes, others: list[bytes], seed: int, count: int) -> Iterator[bytes]:
    """So many versions of a file, each changed in one to six places."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(int(random.integers(1, 7))):
            change = CHANGES[int(random.integers(len(CHANGES)))]
            change(changed, random, others)
            if not changed:
                break
        whole = bytes(changed)
        yield mended(whole) if random.random() < 0.7 else whole


def _place(data: bytearray, random: Random) -> int:
    """Anywhere, but at the beginning more often: that is where headers are."""
    end = len(data) if random.random() < 0.5 else min(len(data), 64)
    return int(random.integers(max(1, end)))


def _bits(data: bytearray, random: Random, _: list[bytes]) -> None:
    data[_place(data, random)] ^= 1 << int(random.integers(8))


def _word(data: bytearray, random: Random, _: list[bytes]) -> None:
    place, word = _place(data, random), WORDS[int(random.integers(len(WORDS)))]
    size = ("B", "<H", ">H", "<I", ">I")[int(random.integers(5))]
    packed = struct.pack(size, word & (256 ** struct.calcsize(size) - 1))
    data[place : place + len(packed)] = packed


def _cut(data: bytearray, random: Random, _: list[bytes]) -> None:
    place = _place(data, random)
    del data[place : place + int(random.integers(1, 40))]


def _end(data: bytearray, random: Random, _: list[bytes]) -> None:
    del data[max(12, _place(data, random)) :]


def _again(data: bytearray, random: Random, _: list[bytes]) -> None:
    place = _place(data, random)
    part = data[place : place + int(random.integers(1, 60))]
    data[place:place] = part * int(random.integers(1, 30))


def _noise(data: bytearray, random: Random, _: list[bytes]) -> None:
    place = _place(data, random)
    data[place:place] = random.bytes(int(random.integers(1, 40)))


def _splice(data: bytearray, random: Random, others: list[bytes]) -> None:
    other = others[int(random.integers(len(others)))]
    start = int(random.integers(len(other)))
    place = _place(data, random)
    data[place : place + 40] = other[start : start + int(random.integers(1, 200))]


CHANGES: tuple[Callable[[bytearray, Random, list[bytes]], None], ...] = (
    _bits,
    _bits,
    _word,
    _word,
    _word,
    _cut,
    _end,
    _again,
    _noise,
    _splice,
)


def mended(data: bytes) -> bytes:
    """A PNG with right checksums, without which no decoder looks any further; else as it is."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, place = bytearray(data[:8]), 8
    while place + 12 <= len(data):
        size = min(int.from_bytes(data[place : place + 4]), len(data) - place - 12)
        inside = data[place + 4 : place + 8 + size]
        out += struct.pack(">I", size) + inside + struct.pack(">I", zlib.crc32(inside))
        place += 12 + size
    return bytes(out)


PIECES = (
    *("red", " ", "\n", "'", '"', "\\", "##", "[SEP]", "[MASK]", "\x00", "\ud83d", "\ud83d\ude00"),
    *("é", "e\u0301", "\u200b", "\ufeff", "\ufdfa", "\u202e", "\u0915\u094d\u0937\u093f", "ß", "İ"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U000e0041"),
)


def texts(seed: int, count: int) -> Iterator[str]:
    """Texts of any characters, those that belong together and those that are none included."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        parts = []
        for _ in range(int(random.integers(0, 30))):
            if random.random() < 0.6:
                parts.append(PIECES[int(random.integers(len(PIECES)))])
            else:
                parts.append(chr(int(random.integers(0x110000))))
        yield "".join(parts)

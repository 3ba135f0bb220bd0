"""Pictures over a limit, broken, or none at all: refused with a reason, and never otherwise."""

from __future__ import annotations

import contextlib
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hivlp.models.errors import ImageError
from hivlp.models.runtime.images import ImageLimits
from tests.unit.runtime.pictures import (
    FORMATS,
    LIMITS,
    chunk,
    decode,
    noise,
    png,
    refused,
    saved,
)

# Limits


def test_nothing_at_all_is_an_empty_picture() -> None:
    refused(b"", "empty_image")


def test_byte_limit_is_named() -> None:
    data = saved(Image.new("RGB", (10, 10)))
    error = refused(data, "image_too_large", ImageLimits(max_bytes=len(data) - 1))
    assert error.limit == len(data) - 1
    assert str(len(data)) in error.message
    assert decode(data, ImageLimits(max_bytes=len(data))).shape == (10, 10, 3)


def test_pixel_limit_is_exact_and_named() -> None:
    data = saved(Image.new("RGB", (10, 10)))
    assert decode(data, ImageLimits(max_pixels=100)).shape == (10, 10, 3)
    error = refused(data, "image_too_large", ImageLimits(max_pixels=99))
    assert error.limit == 99
    assert "100" in error.message
    assert "99" in error.message


def _huge(kind: str) -> bytes:
    """A few bytes whose header promises more pixels than any machine should hold."""
    if kind == "PNG":
        return png(60000, 60000, 8, 2, b"")
    if kind == "GIF":
        return b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(20)
    if kind == "BMP":
        header = struct.pack("<IiiHHIIiiII", 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + header
    if kind == "WebP":
        small = saved(Image.new("RGBA", (4, 4), (1, 2, 3, 4)), "WebP", exif=b"Exif\x00\x00")
        at = small.index(b"VP8X") + 12
        return small[:at] + b"\xff\x3f\x00\xff\x3f\x00" + small[at + 6 :]
    small = saved(Image.new("L", (8, 8)), kind)
    if kind == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        return small[:at] + struct.pack(">HH", 65000, 65000) + small[at + 4 :]
    for tag in (256, 257):  # width, height
        entry = struct.pack("<HHI", tag, 4, 1)
        small = small.replace(entry + struct.pack("<I", 8), entry + struct.pack("<I", 60000))
    return small


@pytest.mark.parametrize("kind", FORMATS)
def test_header_of_a_bomb_is_refused_before_decoding(kind: str) -> None:
    error = refused(_huge(kind), "image_too_large")
    assert error.limit == LIMITS.max_pixels
    assert str(LIMITS.max_pixels) in error.message


def test_pillows_own_limit_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for kind in ("PNG", "JPEG", "BMP"):
        assert decode(saved(Image.new("RGB", (20, 20)), kind)).shape == (20, 20, 3)


# Bytes that are no picture

FOREIGN = {
    "HEIC": b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(40),
    "AVIF": b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00avifmif1" + bytes(40),
    "video": b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + bytes(40),
    "SVG": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
    "PDF": b"%PDF-1.7\n" + bytes(range(200)),
    "HTML": b"<!DOCTYPE html><html><body>403</body></html>",
    "JPEG XL": b"\xff\x0a" + bytes(40),
    "JPEG 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(40),
    "PSD": b"8BPS\x00\x01" + bytes(40),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "ICO": b"\x00\x00\x01\x00" + bytes(40),
    "ZIP": b"PK\x03\x04" + bytes(40),
    "data URI": b"data:image/png;base64,iVBORw0KGgo=",
    "text": "a caption named .png, naïvely".encode(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_named_and_the_supported_listed(name: str) -> None:
    error = refused(FOREIGN[name], "unsupported_image")
    assert name in error.message
    assert all(kind in error.message for kind in FORMATS)


def test_text_cut_inside_a_character_is_still_text() -> None:
    assert "text" in refused("é".encode() * 2000, "unsupported_image").message
    assert "text" in refused(b"x" + "é".encode() * 2000, "unsupported_image").message


@pytest.mark.parametrize("data", [b"\x00", b"\xff", bytes(5000), b"\xff\xd8", b"RIFF1234AVI LIST"])
def test_unrecognisable_bytes_are_unsupported(data: bytes) -> None:
    refused(data, "unsupported_image")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_truncated_picture_is_broken(kind: str, share: float) -> None:
    data = saved(Image.fromarray(noise(80, 80)), kind)
    error = refused(data[: int(len(data) * share)], "broken_image")
    assert kind in error.message


@pytest.mark.parametrize(
    "start",
    [
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"GIF89a",
        b"BM",
        b"RIFF\x10\x00\x00\x00WEBPVP8 ",
        b"II*\x00",
        b"MM\x00*",
        b"II+\x00",
    ],
)
@pytest.mark.parametrize("rest", [b"", b"\x00" * 64, b"\xff" * 64, bytes(range(256))])
def test_good_beginning_of_garbage_is_broken(start: bytes, rest: bytes) -> None:
    refused(start + rest, "broken_image")


def test_png_of_no_width_is_broken() -> None:
    refused(png(0, 5, 8, 2, b""), "broken_image")


def test_gif_of_no_size_is_broken() -> None:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 0, 0, 0) + b"\x02\x01\x44\x00;"
    refused(b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0x80, 0, 0) + bytes(6) + frame, "broken_image")


def test_late_error_in_the_data_is_broken() -> None:
    rows = b"\x00" + bytes(299)
    whole = zlib.compress(rows * 100)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0))
    spoilt = whole[:-30] + b"\xff" * 30
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", spoilt) + chunk(b"IEND", b"")
    refused(data, "broken_image")


SEEDS = [saved(Image.fromarray(noise(12, 9)), kind) for kind in FORMATS]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=12),
    end=st.integers(0, 10_000),
)
def test_any_damage_gives_pixels_or_an_image_error(
    seed: bytes, edits: list[tuple[int, int]], end: int
) -> None:
    damaged = bytearray(seed)
    for position, value in edits:
        damaged[position % len(seed)] = value
    data = bytes(damaged[: end % (2 * len(seed))])
    with contextlib.suppress(ImageError):
        decode(data, ImageLimits(max_pixels=1_000_000))

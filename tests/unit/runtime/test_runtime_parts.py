"""Small files made of very many parts, each of which costs a decoder more than it costs to send."""

from __future__ import annotations

import io
import struct

import pytest
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, TiffImagePlugin

from hivlp.models.runtime.images import ImageLimits, decode_image
from tests.unit.runtime.pictures import refused

READERS = (
    BmpImagePlugin.BmpImageFile,
    GifImagePlugin.GifImageFile,
    JpegImagePlugin.JpegImageFile,
    TiffImagePlugin.TiffImageFile,
)


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader of Pillow's is so much as begun."""

    def begun(*_: object) -> None:
        raise AssertionError("a reader was begun")

    for reader in READERS:
        monkeypatch.setattr(reader, "__init__", begun)


def run_lengths(width: int, height: int) -> bytes:
    """A BMP of lines that end after five pixels."""
    palette = b"".join(bytes((i, i, i, 0)) for i in range(256))
    lines = b"\x01\x05\0\0" * height
    start = 14 + 40 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(lines), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(lines), 0, 0, start) + head + palette + lines


def jpeg(segments: bytes) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "JPEG")
    return stream.getvalue()[:2] + segments + stream.getvalue()[2:]


def gif(extensions: bytes) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4)).save(stream, "GIF")
    data = stream.getvalue()
    start = 13 + (3 << (data[10] % 8 + 1) if data[10] & 0x80 else 0)
    return data[:start] + extensions + data[start:]


def tiff(strips: int, order: str = "<", *, big: bool = False, tags: int = 0) -> bytes:
    """Of 2 x 2 pixels, which lie in so many strips; `tags` more say nothing."""
    number, long, entry = ("Q", 16, "HHQQ") if big else ("I", 4, "HHII")
    word = 8 if big else 4
    begin = 16 if big else 8
    pixels = begin
    table = pixels + 16
    known = [(256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
             (277, 3, 1, 1), (278, 4, 1, 1)]  # fmt: skip
    many = len(known) + 2 + tags
    places = table + (8 if big else 2) + struct.calcsize(order + entry) * many + word
    known += [(273, long, strips, places), (279, long, strips, places + word * strips)]
    known += [(60_000 - tags + place, 4, 1, 0) for place in range(tags)]
    entries = b""
    for tag, kind, count, value in sorted(known):
        if kind == 3:  # lies at the left of its place
            cell = struct.pack(f"{order}H", value).ljust(word, b"\0")
        elif kind == 4:
            cell = struct.pack(f"{order}I", value).ljust(word, b"\0")
        else:
            cell = struct.pack(f"{order}{number}", value)
        entries += struct.pack(f"{order}{entry[:-1]}", tag, kind, count) + cell
    mark = b"II" if order == "<" else b"MM"
    head = (
        struct.pack(f"{order}HHHQ", 43, 8, 0, table)
        if big
        else struct.pack(f"{order}HI", 42, table)
    )
    return b"".join((
        mark, head, b"\x55" * 16, struct.pack(f"{order}{'Q' if big else 'H'}", many), entries,
        b"\0" * word, struct.pack(f"{order}{strips}{number}", *[pixels] * strips),
        struct.pack(f"{order}{strips}{number}", *[2] * strips),
    ))  # fmt: skip


COMMENT, EXIF = b"\xff\xfe\0\2", b"\xff\xe1\0\x09Exif\0\0A"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (run_lengths(65_000, 600), "more than 1000000 pixels"),
        (jpeg(EXIF * 900_000), "more than 1000 segments"),
        (jpeg(COMMENT * 2_600_000), "more than 1000 segments"),
        (jpeg(b"\xff\xd0" * 1_000_000), "more than 1000 segments"),
        (jpeg(b"\xff\0" * 1_000_000), "more than 1000 segments"),
        (jpeg(b"\xff" * 1_000_000), "more than 1000 segments"),
        (jpeg(COMMENT + b"A" * 1_000_000), "more than 1000 segments"),
        (gif(b"!\xfe\1A\0" * 2_000_000), "more than 65536 blocks"),
        (gif(b"!\xfe" + b"\1A" * 2_000_000 + b"\0"), "more than 65536 blocks"),
        (gif(b"!\1\0" + b"\1," * 2_000_000 + b"\0"), "more than 65536 blocks"),
        (gif(b"!\xff\x0bNETSCAPE2.0\0" + b"\1," * 2_000_000), "more than 65536 blocks"),
        (gif(b"A" * 1_000_000), "more than 65536 blocks"),
        (tiff(1_300_000), "more than 65536 strips"),
        (tiff(200_000, ">"), "more than 65536 strips"),
        (tiff(200_000, big=True), "more than 65536 strips"),
        (tiff(2, tags=5_000), "more than 65536 strips"),
    ],
)
@pytest.mark.usefixtures("unopened")
def test_a_file_of_very_many_parts_is_refused_before_it_is_read(data: bytes, said: str) -> None:
    error = refused(data, "broken_image", ImageLimits(max_bytes=16 << 20))
    assert said in error.message


@pytest.mark.parametrize(
    "data",
    [
        run_lengths(1_000, 1_000),
        jpeg(b"\xff\xe1\xff\xffhttp://ns.adobe.com/xap/1.0/\0" + b"x" * 65_504),
        jpeg(COMMENT * 900 + b"\xff" * 1_000 + b"\xff\0" * 1_000 + b"\xff\xd0"),
        gif(b"!\xfe\1A\0" * 1_000),
        gif(b"!\xff\x0bXMP DataXMP" + b"<x>" * 5_000 + bytes(range(255, -1, -1)) + b"\0"),
        tiff(2),
        tiff(2, ">"),
        tiff(2, big=True),
        tiff(2, tags=1_000),
        tiff(60_000),
    ],
)
def test_a_file_of_many_parts_is_decoded(data: bytes) -> None:
    assert decode_image(data, ImageLimits()).ndim == 3

"""What a picture file is made of, counted before a decoder goes over it.

Decoders take time, or memory, for each part of a file, and some of them the square of that: a file
of 10 MiB can hold millions of empty comments, or a table of millions of places. No encoder writes
such files. A picture compressed by BMP's run lengths is decoded byte for byte in Python, and 3 kB
can stand for all the pixels that there may be: it has a limit of its own.

A count stops at its limit, and steps over what a part holds: it takes milliseconds at most.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from PIL import JpegImagePlugin

from hivlp.models.errors import ImageError

# More than any encoder writes; each scan of a picture of 40 million pixels takes some 30 ms.
_MAX_SCANS = 128
_START_OF_SCAN = b"\xff\xda"
_MAX_CHUNKS = 20_000
# Before the first scan. A profile or a note of 10 MiB is in 160 of them.
_MAX_SEGMENTS = 1_000
# Between them, of what is skipped byte for byte.
_MAX_STRAY_BYTES = 64 << 10
_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_BARE = frozenset(code for code, (*_, read) in JpegImagePlugin.MARKER.items() if read is None)
_MAX_BLOCKS = 65_536
_MAX_RUN_PIXELS = 1_000_000
_RUN_LENGTHS = (1, 2)
_MAX_STRIPS = 65_536
_STRIP_TAGS = frozenset({273, 279, 324, 325})  # where strips and tiles are, and how long
# Numbers of any other tag: a table of colours has three of 65,536 values.
_MAX_NUMBERS = 3 * 65_536
_MAX_TAGS = 4_096
_BYTE_TYPES = frozenset({1, 2, 6, 7})


def check_parts(data: bytes, kind: str, param: str) -> None:
    """Raise ImageError for more parts than a picture has."""
    limit, what = 0, None
    if kind == "JPEG":
        limit, what = _jpeg_excess(data)
    elif kind in _CHECKS:
        limit, parts, excessive = _CHECKS[kind]
        what = parts if excessive(data) else None
    if what is not None:
        message = f"the {kind} picture has more than {limit} {what}"
        raise ImageError("broken_image", message, param=param, limit=limit)


def _jpeg_excess(data: bytes) -> tuple[int, str | None]:
    # Between scans 0xff is always followed by something else.
    if data.count(_START_OF_SCAN) > _MAX_SCANS:
        return _MAX_SCANS, "scans"
    return _MAX_SEGMENTS, "segments before its first scan" if _has_more_segments(data) else None


def _has_more_segments(data: bytes) -> bool:
    """Whether a JPEG file has too many segments before its first scan, or too much between them.

    As Pillow reads it: a marker, and after most of them a length and so many bytes.
    """
    place, stray = 2, _MAX_STRAY_BYTES
    for _ in range(_MAX_SEGMENTS):
        end = place + stray + 2
        found = _MARKER.search(data, place, end)
        if found is None:
            return end < len(data)
        stray -= found.start() - place
        if found.group() == _START_OF_SCAN:
            return False
        place = found.end()
        if int.from_bytes(found.group()) not in _BARE:
            place += max(2, int.from_bytes(data[place : place + 2]))
    return place < len(data)


def _has_more_chunks(data: bytes) -> bool:
    """Whether a PNG file has too many chunks. Each is length, type, data, checksum."""
    place = 8
    for _ in range(_MAX_CHUNKS):
        if place >= len(data):
            return False
        place += 12 + int.from_bytes(data[place : place + 4])
    return place < len(data)


def _has_more_blocks(data: bytes) -> bool:
    """Whether a GIF file has too many blocks in the extensions before its first picture.

    An extension is `!`, a label and blocks, each behind its length, up to one of none.
    """
    place = 13 + (3 << (data[10] % 8 + 1) if len(data) > 10 and data[10] & 0x80 else 0)
    left = _MAX_BLOCKS
    while left > 0:
        left -= 1
        sign = data[place : place + 1]
        if sign in (b"", b";", b","):
            return False
        place += 1
        if sign != b"!":
            continue
        # Pillow looks at the first of them, or two, and where those are empty it still reads on.
        label, place = data[place : place + 1], place + 1
        looped = label == b"\xff" and data[place + 1 : place + 12] == b"NETSCAPE2.0"
        first = 0 if label == b"\xfe" else 2 if looped else 1
        size = 1
        while left > 0 and (size or first >= 0):
            size = int.from_bytes(data[place : place + 1])
            place, left, first = place + 1 + size, left - 1, first - 1
    return True


def _is_long_run(data: bytes) -> bool:
    """Whether a BMP file is compressed by run lengths, and of many pixels."""
    if len(data) < 34 or int.from_bytes(data[14:18], "little") < 40:
        return False
    width, height = struct.unpack_from("<ii", data, 18)
    (method,) = struct.unpack_from("<I", data, 30)
    return method in _RUN_LENGTHS and abs(width) * abs(height) > _MAX_RUN_PIXELS


def _has_more_numbers(data: bytes) -> bool:
    """Whether a tag of a TIFF file's first picture has too many numbers, or there are too many."""
    order = "<" if data.startswith(b"II") else ">"
    big = data[2] == 43  # as Pillow tells
    head, first, entry = (
        (struct.Struct(f"{order}Q"), 8, struct.Struct(f"{order}HHQ8x"))
        if big
        else (struct.Struct(f"{order}I"), 4, struct.Struct(f"{order}HHI4x"))
    )
    many = struct.Struct(f"{order}{'Q' if big else 'H'}")
    try:
        (place,) = head.unpack_from(data, first)
        (tags,) = many.unpack_from(data, place)
        place += many.size
        for _ in range(min(tags, _MAX_TAGS)):
            tag, kind, count = entry.unpack_from(data, place)
            most = _MAX_STRIPS if tag in _STRIP_TAGS else _MAX_NUMBERS
            if kind not in _BYTE_TYPES and count > most:
                return True
            place += entry.size
    except (struct.error, OverflowError):  # it ends before: the reader says so
        return False
    return bool(tags > _MAX_TAGS)


_CHECKS: dict[str, tuple[int, str, Callable[[bytes], bool]]] = {
    "PNG": (_MAX_CHUNKS, "chunks", _has_more_chunks),
    "GIF": (_MAX_BLOCKS, "blocks before its first frame", _has_more_blocks),
    "BMP": (_MAX_RUN_PIXELS, "pixels for one that is compressed by run lengths", _is_long_run),
    "TIFF": (_MAX_STRIPS, "strips, tiles or numbers of a kind", _has_more_numbers),
}

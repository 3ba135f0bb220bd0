"""Which picture format some bytes are in, told by their content and never by a name.

Six formats are decoded; the rest are recognised only to say something useful when refusing them.
"""

from __future__ import annotations

SUPPORTED_FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
)
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"8BPS", "Photoshop (PSD)"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"qoif", "QOI"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"RIFF", "audio or video"),
)
# ISO media files name their kind in the brand after `ftyp`.
_BRANDS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"avif", b"avis"), "AVIF"),
    ((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    ((b"crx ",), "a camera's raw file"),
)
_HEAD_BYTES = 1024


def supported_format(data: bytes) -> str | None:
    """The name in SUPPORTED_FORMATS of the format that `data` begins like, or None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for start, name in _SIGNATURES if data.startswith(start)), None)


def guess_foreign(data: bytes) -> str | None:
    """What bytes in none of the supported formats seem to be, in words, or None."""
    if data[4:8] == b"ftyp":
        return _guess_media(data)
    for start, name in _FOREIGN:
        if data.startswith(start):
            return name
    return _guess_text(data[:_HEAD_BYTES])


def _guess_media(data: bytes) -> str:
    brands = data[8:12], data[16:20], data[20:24]
    for brand in brands:
        for known, name in _BRANDS:
            if brand in known and not (brand in (b"mif1", b"msf1") and b"avif" in brands):
                return name
    return "a video"


def _guess_text(head: bytes) -> str | None:
    lowered = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if lowered.startswith((b"<?xml", b"<svg", b"<!doctype svg", b"<!--")) and b"<svg" in lowered:
        return "SVG"
    if lowered.startswith((b"<!doctype html", b"<html")):
        return "a web page (HTML)"
    if head.startswith(b"data:"):
        return "a data URI, not yet decoded"
    printable = all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in head)
    return "text" if head and printable and _decodes(head) else None


def _decodes(head: bytes) -> bool:
    try:
        # A multi-byte character may be cut at the end of the head.
        head[: max(1, len(head) - 3)].decode("utf-8") if len(head) == _HEAD_BYTES else head.decode()
    except UnicodeDecodeError as error:
        return error.start >= _HEAD_BYTES - 7
    return True

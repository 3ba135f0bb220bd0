"""Pictures of items, as they lie below the corpus root and as thumbnails.

A reference comes from a corpus that anyone may have written: whatever it says, only a regular file
below the root is ever read, links resolved first, and only what its content shows to be a picture
is sent, as the type that the content has.
"""

from __future__ import annotations

import hashlib
import io
import stat
import threading
import zlib
from dataclasses import dataclass

from cachetools import LRUCache
from PIL import Image

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import (
    MAX_PICTURE_BYTES,
    Root,
    Within,
    read_picture,
    remote_stamp,
    split_ref,
)
from hivlp.models.errors import HivlpError, ImageError
from hivlp.models.runtime.formats import supported_format
from hivlp.models.runtime.images import ImageLimits, decode_image

THUMBNAIL_CACHE_BYTES = 32 << 20
MIN_THUMBNAIL_PX = 16
# What every browser shows; the rest is always converted.
WEB_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp", "GIF": "image/gif"}
# The most that a WebP picture can measure; what is larger becomes a PNG.
MAX_WEBP_PX = 16_383


class NoPicture(HivlpError):
    """The item has no picture that can be shown."""

    def __init__(self, item_id: str, reason: str) -> None:
        super().__init__(f"item {item_id!r} has no picture that can be shown: {reason}")
        self.item_id = item_id


@dataclass(frozen=True, slots=True)
class Picture:
    """Bytes that a browser shows as `media_type`."""

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Found:
    """A picture that lies below the root; `tag` changes whenever its file or its reference does."""

    item_id: str
    root: Root
    reference: str
    tag: str


def locate(root: Root | None, reference: str | None, item_id: str) -> Found:
    """Where a reference leads. Raises NoPicture for nowhere, or out of the root."""
    if root is None or reference is None:
        raise NoPicture(item_id, "it was indexed without one")
    file, within = split_ref(reference)
    if isinstance(root, str):
        return _locate_remote(root, reference, within, item_id)
    try:
        base = root.resolve(strict=True)
        path = (base / file).resolve(strict=True)
        found = path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise NoPicture(item_id, "its file is gone") from error
    if not path.is_relative_to(base) or not stat.S_ISREG(found.st_mode):
        raise NoPicture(item_id, "its reference leaves the corpus")
    if within is None and found.st_size > MAX_PICTURE_BYTES:
        raise NoPicture(item_id, "its file is too large")
    tag = f"{found.st_mtime_ns:x}-{found.st_size:x}-{_named(reference)}"
    return Found(item_id, base, reference, tag)


def _locate_remote(root: str, reference: str, within: Within | None, item_id: str) -> Found:
    try:
        size, stamp = remote_stamp(root, reference)
    except CorpusError as error:
        raise NoPicture(item_id, "its file is gone") from error
    if within is None and size > MAX_PICTURE_BYTES:
        raise NoPicture(item_id, "its file is too large")
    tag = f"{zlib.crc32(stamp.encode()):x}-{size:x}-{_named(reference)}"
    return Found(item_id, root, reference, tag)


def _named(reference: str) -> str:
    """Tells pictures apart that were written in one tick of the clock and are of one size.

    An uploaded picture is named by the hash of its content.
    """
    return hashlib.sha256(reference.encode()).hexdigest()[:16]


class Pictures:
    """Reads and shrinks pictures; keeps the most recently used thumbnails. Thread-safe."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._kept: LRUCache[tuple[Root, str, str, int], Picture] = LRUCache(
            THUMBNAIL_CACHE_BYTES, getsizeof=lambda picture: len(picture.data)
        )

    def original(self, found: Found) -> Picture:
        """The file itself, or its conversion where browsers don't show its format."""
        data, kind = _read(found)
        if kind in WEB_TYPES:
            return Picture(data, WEB_TYPES[kind])
        return self._shrunk(found, data, kind, None)

    def thumbnail(self, found: Found, size: int) -> Picture:
        """At most `size` pixels wide and high; a picture that is already small stays as it is."""
        key = (found.root, found.reference, found.tag, size)
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            data, kind = _read(found)
            kept = self._shrunk(found, data, kind, size)
            if len(kept.data) <= THUMBNAIL_CACHE_BYTES:
                with self._lock:
                    self._kept[key] = kept
        return kept

    def _shrunk(self, found: Found, data: bytes, kind: str, size: int | None) -> Picture:
        try:
            pixels = decode_image(data, self._limits)
        except ImageError as error:
            raise NoPicture(found.item_id, error.message) from error
        if size is not None and max(pixels.shape[:2]) <= size and kind in WEB_TYPES:
            return Picture(data, WEB_TYPES[kind])
        image = Image.fromarray(pixels)
        if size is not None:
            image.thumbnail((size, size), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        if max(image.size) > MAX_WEBP_PX:
            image.save(stream, "PNG", compress_level=1)
            return Picture(stream.getvalue(), WEB_TYPES["PNG"])
        image.save(stream, "WEBP", quality=85)
        return Picture(stream.getvalue(), WEB_TYPES["WebP"])


def _read(found: Found) -> tuple[bytes, str]:
    try:
        data = read_picture(found.root, found.reference)
    except CorpusError as error:
        raise NoPicture(found.item_id, "its file can't be read") from error
    kind = supported_format(data)
    if kind is None or len(data) > MAX_PICTURE_BYTES:
        raise NoPicture(found.item_id, "its file is no supported picture")
    return data, kind

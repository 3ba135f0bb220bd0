"""Pictures to send: good ones, and each kind of bad one."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image


def picture(
    colour: tuple[int, int, int] = (255, 0, 0),
    size: tuple[int, int] = (20, 20),
    kind: str = "PNG",
) -> bytes:
    """The bytes of a picture of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def noisy_jpeg() -> bytes:
    """A JPEG with enough content that half of it is missing when it is cut."""
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(stream, "JPEG")
    return stream.getvalue()


def write(folder: Path, name: str, data: bytes) -> Path:
    """A file below a folder."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target

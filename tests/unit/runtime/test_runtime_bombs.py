"""Small files that would cost much: refused before they do, or decoded within bounds."""

from __future__ import annotations

import io
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from hivlp.models.errors import ImageError
from hivlp.models.runtime import colours
from hivlp.models.runtime.colours import to_rgb
from hivlp.models.runtime.images import ImageLimits, PixelRoom, decode_image
from tests.unit.runtime.pictures import chunk, png, refused


def black(extra: bytes = b"", size: tuple[int, int] = (2, 2)) -> bytes:
    """A black PNG with chunks of one's own before its pixels."""
    return png(*size, 8, 2, (b"\0" * (1 + 3 * size[0])) * size[1], extra)


def deflated(mebibytes: int) -> bytes:
    return zlib.compress(b"\0" * (mebibytes << 20), 9)


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan is there so many times more."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 60)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:]


def test_a_jpeg_of_endless_scans_is_refused_and_one_of_some_is_not() -> None:
    assert decode_image(progressive(50), ImageLimits()).shape == (64, 64, 3)
    error = refused(progressive(200_000), "broken_image")
    assert "more than 128 scans" in error.message


def test_a_png_of_endless_chunks_is_refused_and_one_of_many_is_not() -> None:
    assert decode_image(black(chunk(b"abCd", b"") * 10_000), ImageLimits()).shape == (2, 2, 3)
    for extra in (chunk(b"abCd", b""), chunk(b"tEXt", b"k\0a"), chunk(b"IDAT", b"")):
        error = refused(black(extra * 100_000), "broken_image")
        assert "more than 20000 chunks" in error.message


def test_chunks_that_claim_to_be_longer_than_the_file_are_just_broken() -> None:
    for length in (2**31, 2**32 - 1, 2**32 - 12):
        refused(black(struct.pack(">I", length) + b"tEXtk\0a"), "broken_image")


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"iCCP", b"x\0\0" + deflated(64)),
        chunk(b"zTXt", b"x\0\0" + deflated(64)),
        chunk(b"iTXt", b"x\0\1\0\0\0" + deflated(64)),
        chunk(b"zTXt", b"x\0\0" + deflated(1)) * 100,
    ],
)
def test_what_inflates_beside_the_pixels_is_bounded(extra: bytes) -> None:
    error = refused(black(extra), "broken_image")
    assert "large" in error.message or "memory" in error.message


def test_a_profile_and_exif_as_large_as_the_file_change_nothing() -> None:
    stream = io.BytesIO()
    picture = Image.new("RGB", (8, 8), (255, 0, 0))
    picture.save(
        stream, "JPEG", icc_profile=b"\0" * 5_000_000, exif=b"Exif\0\0" + b"II*\0" * 15_000
    )
    assert decode_image(stream.getvalue(), ImageLimits()).shape == (8, 8, 3)


def test_a_picture_that_is_one_endless_line_is_too_large() -> None:
    for size in ((65_536, 1), (1, 65_536)):
        error = refused(black(size=size), "image_too_large")
        assert error.limit == 65_535
    assert decode_image(black(size=(65_535, 1)), ImageLimits()).shape == (1, 65_535, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_only_the_first_frame_of_very_many_is_decoded(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), (255 if i == 0 else i % 200, 0, 0)) for i in range(400)]
    stream = io.BytesIO()
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
    pixels = decode_image(stream.getvalue(), ImageLimits())
    assert pixels.shape == (16, 16, 3)
    assert abs(int(pixels[0, 0, 0]) - 255) < 4


def test_all_threads_together_decode_so_many_pixels_at_once() -> None:
    room, most, now, lock = PixelRoom(100), [0], [0], threading.Lock()

    def decode(pixels: int) -> None:
        with room.take(pixels):
            with lock:
                now[0] += min(pixels, 100)
                most[0] = max(most[0], now[0])
            with lock:
                now[0] -= min(pixels, 100)

    threads = [threading.Thread(target=decode, args=(10 + 7 * i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert 0 < most[0] <= 100


def test_a_picture_waits_for_room_and_one_that_fails_gives_it_back() -> None:
    limits = ImageLimits(room=PixelRoom(4))
    with pytest.raises(ImageError):
        decode_image(black()[:45], limits)
    done = threading.Event()

    def decode() -> None:
        decode_image(black(), limits)
        done.set()

    with limits.take(4):
        waiting = threading.Thread(target=decode)
        waiting.start()
        assert not done.wait(0.1)
    assert done.wait(20)
    waiting.join()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_deep_greys_are_scaled_in_blocks_as_they_are_at_once(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    values = np.random.default_rng(3).integers(0, 65_536, (61, 17))
    kinds = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    image = Image.fromarray(values.astype(kinds[mode]))
    assert image.mode == mode
    whole = to_rgb(image)
    monkeypatch.setattr(colours, "_BLOCK_PIXELS", 40)
    assert np.array_equal(to_rgb(image), whole)

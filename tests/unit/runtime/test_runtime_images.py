"""Decoding gives upright RGB pixels, whatever the mode, the orientation or the format."""

from __future__ import annotations

import io
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hivlp.models.runtime.colours import to_rgb
from tests.unit.runtime.pictures import FORMATS, chunk, decode, noise, png, saved

COLOUR = (200, 100, 50)

# Formats


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_decodes_to_the_colour_it_was_saved_with(kind: str) -> None:
    pixels = decode(saved(Image.new("RGB", (31, 17), COLOUR), kind))
    assert pixels.shape == (17, 31, 3)
    np.testing.assert_allclose(pixels, np.broadcast_to(COLOUR, pixels.shape), atol=3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (3, 3), (1, 500)])
def test_smallest_pictures_keep_their_shape(kind: str, size: tuple[int, int]) -> None:
    assert decode(saved(Image.new("RGB", size, COLOUR), kind)).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("kind", ["GIF", "WebP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "green", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == 3
    np.testing.assert_allclose(decode(data)[5, 5], (255, 0, 0), atol=3)


# Colours


@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [("RGB", 0), ("RGBA", 0), ("RGBX", 0), ("CMYK", 1), ("YCbCr", 2), ("LAB", 4), ("HSV", 4)],
)
def test_colour_modes_come_out_as_the_same_colour(mode: str, tolerance: int) -> None:
    image = Image.new("RGB", (8, 8), COLOUR)
    converted = _to_lab(image) if mode == "LAB" else image.convert(mode)
    np.testing.assert_allclose(to_rgb(converted), np.asarray(image), atol=tolerance)


def test_palette_picture_comes_out_as_its_colours() -> None:
    image = Image.fromarray(noise(4, 4)).quantize(16)
    assert np.array_equal(decode(saved(image)), np.asarray(image.convert("RGB")))


def _to_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    transform = ImageCms.buildTransform(
        ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
    )
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None
    return converted


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "I", "I;16", "F"]
)
def test_every_mode_that_tiff_holds_decodes(mode: str) -> None:
    image = Image.new("LAB", (9, 7), (120, 130, 140)) if mode == "LAB" else _grey(mode)
    assert decode(saved(image, "TIFF")).shape == (7, 9, 3)


def _grey(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.full((7, 9), 30000, dtype=np.uint16))
    return Image.new("L", (9, 7), 128).convert(mode)


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_alpha_modes_are_composited_over_white(mode: str) -> None:
    image = Image.new("LA", (2, 1), (100, 255))
    image.putpixel((1, 0), (100, 0))
    if mode in ("RGBA", "RGBa", "PA"):
        image = image.convert("RGBA").convert(mode)
    elif mode == "La":
        image = image.convert("La")
    pixels = to_rgb(image)
    np.testing.assert_allclose(pixels[0, 0], (100, 100, 100), atol=3)
    assert pixels[0, 1].tolist() == [255, 255, 255]


def test_colours_hidden_under_transparency_change_nothing() -> None:
    red = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    blue = Image.new("RGBA", (4, 4), (0, 0, 255, 0))
    assert np.array_equal(decode(saved(red)), decode(saved(blue)))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    np.testing.assert_allclose(decode(saved(half)), 127, atol=1)


@pytest.mark.parametrize("transparency", [1, b"\xff\x00\xff"])
def test_palette_with_transparency_is_composited(transparency: int | bytes) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    pixels = decode(saved(image, transparency=transparency))
    assert pixels[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]


def test_gif_with_transparency_is_composited() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1])
    pixels = decode(saved(image, "GIF", transparency=1, optimize=False))
    assert pixels[0].tolist() == [[255, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize(
    ("depth", "row", "key"),
    [
        (1, b"\x40", 1),
        (2, b"\x10", 1),
        (4, b"\x05", 5),
        (8, b"\x00\x07", 7),
        (16, b"\x00\x00\x12\x34", 0x1234),
    ],
)
def test_transparent_grey_is_read_in_the_scale_of_the_file(
    depth: int, row: bytes, key: int
) -> None:
    data = png(2, 1, depth, 0, b"\x00" + row, chunk(b"tRNS", struct.pack(">H", key)))
    assert decode(data)[0].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_transparent_colour_of_a_16_bit_png_is_found() -> None:
    row = struct.pack(">6H", 0, 0, 0, 0xFFFF, 0x8000, 0x4000)
    key = chunk(b"tRNS", struct.pack(">3H", 0xFFFF, 0x8000, 0x4000))
    assert decode(png(2, 1, 16, 2, b"\x00" + row, key))[0].tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_to_8(kind: str) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert decode(saved(Image.fromarray(values), kind))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_floats_are_scaled_by_their_range() -> None:
    values = np.array([[-1e30, 0.0, 1e30, np.nan]], dtype=np.float32)
    assert decode(saved(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 128, 255, 0]


def test_integers_are_scaled_by_their_range() -> None:
    values = np.array([[-10, 0, 10]], dtype=np.int32)
    assert decode(saved(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("value", [0.0, 3.5, np.inf, np.nan])
def test_flat_or_infinite_floats_are_black(value: float) -> None:
    values = np.full((2, 2), value, dtype=np.float32)
    assert not to_rgb(Image.fromarray(values)).any()


def test_cmyk_jpeg_is_not_inverted() -> None:
    image = Image.new("RGB", (16, 16), COLOUR)
    np.testing.assert_allclose(
        decode(saved(image.convert("CMYK"), "JPEG")), np.asarray(image), atol=6
    )


# Orientation

SHOWN: dict[int, Any] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("kind", ["PNG", "WebP", "TIFF"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    stored = noise()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True, "exact": True} if kind == "WebP" else {}
    data = saved(Image.fromarray(stored), kind, exif=exif, **options)
    assert np.array_equal(decode(data), SHOWN[orientation](stored))


@pytest.mark.parametrize("orientation", SHOWN)
def test_exif_orientation_of_a_jpeg_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(noise())
    plain = decode(saved(image, "JPEG"))
    assert np.array_equal(decode(saved(image, "JPEG", exif=exif)), SHOWN[orientation](plain))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_unknown_orientation_counts_as_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = noise()
    assert np.array_equal(decode(saved(Image.fromarray(stored), exif=exif)), stored)


@pytest.mark.parametrize("exif", [b"Exif\x00\x00II*\x00\xff\xff\xff\xff", b"Exif\x00\x00nonsense!"])
def test_unreadable_exif_does_not_spoil_the_picture(exif: bytes) -> None:
    image = Image.fromarray(noise())
    assert np.array_equal(decode(saved(image, "JPEG", exif=exif)), decode(saved(image, "JPEG")))


def test_unreadable_exif_chunk_does_not_spoil_a_png() -> None:
    data = png(1, 1, 8, 0, b"\x00\x64", chunk(b"eXIf", b"II*\x00\x08\x00\x00\x00\xff"))
    assert decode(data)[0, 0].tolist() == [100, 100, 100]
    data = png(1, 1, 8, 0, b"\x00\x64", chunk(b"eXIf", b"nonsense"))
    assert decode(data)[0, 0].tolist() == [100, 100, 100]


def test_threads_decode_side_by_side() -> None:
    files = [saved(Image.fromarray(noise(20, 20 + i)), kind) for i in range(8) for kind in FORMATS]
    expected = [decode(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(decode, files), expected, strict=True):
            assert np.array_equal(found, alone)


def test_exif_that_ends_early_warns_nobody() -> None:
    entry = struct.pack("<HHII", 0x010E, 2, 4000, 26)  # a description longer than the file
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00" + struct.pack("<H", 1) + entry + b"\x00" * 4
    image = Image.fromarray(noise())
    assert decode(saved(image, "JPEG", exif=exif)).shape == (40, 60, 3)


def test_invalid_animation_control_warns_nobody() -> None:
    data = png(1, 1, 8, 0, b"\x00\x64", chunk(b"acTL", struct.pack(">II", 0, 0)))
    assert decode(data)[0, 0].tolist() == [100, 100, 100]

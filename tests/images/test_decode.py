"""Decoding: formats, modes, rotation, limits, and files that are broken."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from slipstream.base.errors import InvalidImage
from slipstream.images.decode import decode, to_rgb
from tiny_vision import picture

LARGE = 64_000_000
EXACT = ("PNG", "BMP", "TIFF", "GIF", "WEBP")


def saved(image: Image.Image, kind: str, **fields: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}) | fields)
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, LARGE))


@pytest.mark.parametrize("kind", [*EXACT, "JPEG"])
def test_each_format_is_what_pillow_reads(kind: str) -> None:
    image = picture(33, 47)
    data = saved(image, kind)
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    if kind in EXACT and kind != "GIF":
        assert np.array_equal(pixels(data), np.asarray(image))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF"])
def test_of_several_pictures_the_first_is_read(kind: str) -> None:
    first, second = picture(20, 30), picture(20, 30, seed=1)
    data = saved(first, kind, save_all=True, append_images=[second], **({"duration": 100} if kind == "PNG" else {}))
    assert np.array_equal(pixels(data), pixels(saved(first, kind)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotation_is_that_of_exif(kind: str, orientation: int) -> None:
    """As transformers' load_image does it, for all formats that have it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(24, 40)
    data = saved(image, kind, exif=exif)
    stored = Image.open(io.BytesIO(data))
    expected = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    assert np.array_equal(pixels(data), expected)
    assert pixels(data).shape == ((24, 40, 3) if orientation < 5 else (40, 24, 3))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_other_colours_are_converted_as_the_library_does(mode: str) -> None:
    data = saved(picture(20, 30).convert(mode), "TIFF" if mode != "YCbCr" else "JPEG")
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_opaque_pictures_are_converted_as_the_library_does(mode: str) -> None:
    image = picture(20, 30).convert("RGBA").convert(mode)
    assert np.array_equal(np.asarray(to_rgb(image.copy(), LARGE)), np.asarray(image.convert("RGB")))


def test_what_is_transparent_shows_the_background() -> None:
    hidden = np.zeros((4, 4, 4), np.uint8)
    hidden[0, 0] = (10, 20, 30, 255)
    hidden[1, 1] = (200, 100, 0, 128)
    data = saved(Image.fromarray(hidden), "PNG")
    made = pixels(data)
    assert made[0, 0].tolist() == [10, 20, 30] and made[3, 3].tolist() == [255, 255, 255]
    assert np.abs(made[1, 1].astype(int) - [227, 177, 127]).max() <= 1
    assert np.asarray(decode(data, LARGE, (0, 0, 9)))[3, 3].tolist() == [0, 0, 9]


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_of_png_shows_the_background(mode: str) -> None:
    image = Image.fromarray(np.array([[0, 255]], np.uint8)).convert(mode)
    key = image.getpixel((0, 0))
    assert pixels(saved(image, "PNG", transparency=key)).tolist() == [[[255] * 3, [255] * 3]]


def test_the_transparent_colour_of_a_gif_shows_the_background() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert pixels(saved(image, "GIF", transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_upper_half(kind: str) -> None:
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    made = pixels(saved(Image.fromarray(values), kind))
    assert np.array_equal(made, np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_without_a_fixed_white_are_refused(dtype: type) -> None:
    data = saved(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")
    with pytest.raises(InvalidImage, match="32-bit values"):
        decode(data, LARGE)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_narrow_pictures_are_read(size: tuple[int, int]) -> None:
    assert decode(saved(Image.new("RGB", size, (1, 2, 3)), "PNG"), LARGE).size == size


@pytest.mark.parametrize("kind", [*EXACT, "JPEG"])
def test_pixels_over_the_limit_are_refused_by_the_header(kind: str) -> None:
    data = saved(picture(40, 50), kind)
    assert decode(data, 2000).size == (50, 40)
    with pytest.raises(InvalidImage, match="50 x 40 pixels, and at most 1999 are accepted"):
        decode(data, 1999)
    if kind != "TIFF":  # whose header is behind its pixels
        with pytest.raises(InvalidImage, match="50 x 40 pixels|cannot be read|cannot be decoded"):
            decode(data[: len(data) // 2], 1999)


def test_bombs_are_refused_before_they_are_decoded() -> None:
    """Small files with headers of pictures of gigabytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 6, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )
    gif = bytearray(saved(Image.new("P", (8, 8)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    webp = bytearray(saved(Image.new("RGBA", (8, 8), (1, 2, 3, 4)), "WEBP", lossless=False))
    webp[24:30] = b"\xff\x3f\x00\xff\x3f\x00"
    bmp = bytearray(saved(Image.new("RGB", (8, 8)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    for data in (png, gif, webp, bmp):
        with pytest.raises(InvalidImage, match="pixels, and at most 64000000|more than 64000000 pixels"):
            decode(bytes(data), LARGE)


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"", "empty"), (b"<svg xmlns=''></svg>", "text"), (b"%!PS-Adobe-3.0 EPSF", "text"), (b"\0\1\2" * 30, "unknown")],
)
def test_other_formats_are_refused(data: bytes, found: str) -> None:
    with pytest.raises(InvalidImage, match=rf"no accepted format \({found}\); send one of PNG, JPEG, GIF, BMP, TIFF"):
        decode(data, LARGE)


def test_formats_that_pillow_knows_and_we_do_not_are_refused() -> None:
    for kind in ("PPM", "ICO", "TGA", "PCX", "DDS"):
        with pytest.raises(InvalidImage, match="no accepted format"):
            decode(saved(picture(16, 16), kind), LARGE)


FILES = {kind: saved(picture(23, 31), kind) for kind in (*EXACT, "JPEG")} | {
    "progressive": saved(picture(23, 31), "JPEG", progressive=True),
    "palette": saved(picture(23, 31).convert("P"), "PNG"),
    "packed": saved(picture(23, 31), "TIFF", compression="tiff_lzw"),
    "lossy": saved(picture(23, 31), "WEBP", lossless=False),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_truncated_file_is_read_or_refused(name: str) -> None:
    data = FILES[name]
    refused = 0
    for size in range(0, len(data), max(1, len(data) // 60)):
        try:
            assert decode(data[:size], LARGE).size == (31, 23)
        except InvalidImage as error:
            refused += 1
            assert str(error)
    assert refused > 40


@settings(max_examples=120)
@given(st.data())
def test_changed_files_are_read_or_refused(data: st.DataObject) -> None:
    """No other error, whatever the bytes. The child process has limits besides."""
    file = bytearray(FILES[data.draw(st.sampled_from(sorted(FILES)))])
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    try:
        made = decode(bytes(file), 10**6)
        assert made.mode == "RGB" and made.width * made.height <= 10**6
    except InvalidImage as error:
        assert str(error)


def test_no_more_decoders_are_loaded(tmp_path: Path) -> None:
    """In a process of its own: Pillow loads all of its plugins at a file that it does not know."""
    import subprocess
    import sys

    from child import child_env

    script = (
        "import sys; from slipstream.images.decode import decode\n"
        "for data in (b'\\x89PNG\\r\\n\\x1a\\n', b'II*\\0', b'RIFF0000WEBPVP8 '):\n"
        "    try: decode(data, 10)\n    except Exception: pass\n"
        "print(sorted(n for n in sys.modules if n.startswith('PIL.') and n.endswith('ImagePlugin')))"
    )
    ended = subprocess.run([sys.executable, "-c", script], env=child_env(), capture_output=True, text=True, check=True)
    kinds = ["Bmp", "Gif", "Jpeg", "Png", "Ppm", "Tiff", "WebP"]
    assert ended.stdout.strip() == str([f"PIL.{kind}ImagePlugin" for kind in kinds])

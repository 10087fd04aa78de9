"""Decodes the bytes of an image file to an RGB picture, within limits.

The format is found by the content and must be one of a few, the size is checked before any pixel is decoded, and
rotation by EXIF comes first. Decoders are C libraries that read hostile files: for files of requests this runs in a
child process (`worker.py`).

What is transparent shows the background, white unless a caller says otherwise, as viewers of pages show it. The
library of the models drops the transparency instead, which shows colours that the picture hides, often black on black.
Grey of 16 bits keeps its upper 8, as Pillow does for colours of 16 bits; the library would clip it to white.
"""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from slipstream.base.errors import InvalidImage

# the other formats are registered by Image.open itself; for one it does not know it would load all plugins
Image.preinit()
assert TiffImagePlugin and WebPImagePlugin

_FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF", "WEBP": "WebP"}
_GREY_16 = {"I;16": 1, "I;16L": 1, "I;16B": 0, "I;16N": 1}  # offset of the upper byte
_WHITE = (255, 255, 255)


def decode(data: bytes, max_pixels: int, background: tuple[int, int, int] = _WHITE) -> Image.Image:
    """The first picture of a file, as RGB. Raises InvalidImage."""
    kind = _kind(data)
    if kind == "WEBP":
        check_size(*_webp_size(data), max_pixels)  # its decoder allocates all pixels when a file is opened
    try:
        with warnings.catch_warnings(action="ignore"):
            picture = Image.open(io.BytesIO(data), formats=(kind,))
            check_size(picture.width, picture.height, max_pixels)
            picture.load()
            return to_rgb(picture, max_pixels, background)
    except InvalidImage:
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, in `Image.open`
        raise InvalidImage(f"the image has more than {max_pixels} pixels, the limit; make it smaller") from None
    except UnidentifiedImageError:
        raise InvalidImage(f"the image's {_FORMATS[kind]} data cannot be read; send a complete file") from None
    except MemoryError:
        raise InvalidImage("the image needs too much memory to be decoded; make it smaller") from None
    except Exception as error:  # decoders raise errors of all kinds for broken files
        text = str(error) or type(error).__name__
        raise InvalidImage(f"the image's {_FORMATS[kind]} data cannot be decoded: {text[:200]}; repair it") from None


def to_rgb(picture: Image.Image, max_pixels: int, background: tuple[int, int, int] = _WHITE) -> Image.Image:
    """The picture as it is seen: turned, opaque, with 8 bits a colour. Changes the picture, which may be large."""
    check_size(picture.width, picture.height, max_pixels)
    ImageOps.exif_transpose(picture, in_place=True)
    mode = picture.mode
    if mode in _GREY_16:
        upper = picture.tobytes()[_GREY_16[mode] :: 2]
        return Image.frombytes("L", picture.size, upper).convert("RGB")
    if mode in ("I", "F"):
        raise InvalidImage(f"the image has 32-bit values (mode {mode}), which have no fixed white; save it with 8 bits")
    if mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info:
        return picture if mode == "RGB" else picture.convert("RGB")
    layered = picture if mode == "RGBA" else picture.convert("RGBA")
    alpha = layered.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return layered.convert("RGB")
    below = Image.new("RGB", layered.size, background)
    below.paste(layered, mask=alpha)
    return below


def check_size(width: int, height: int, max_pixels: int) -> None:
    if not (width and height):
        raise InvalidImage("the image has no pixels")
    if width * height > max_pixels:
        raise InvalidImage(
            f"the image has {width} x {height} pixels, and at most {max_pixels} are accepted; make it smaller"
        )


def _kind(data: bytes) -> str:
    """The format by the first bytes, whatever a header or a file name says."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    if data.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    names = ", ".join(_FORMATS.values())
    found = "empty" if not data else "text" if data[:64].isascii() and data[:64].decode().isprintable() else "unknown"
    raise InvalidImage(f"the image's data are of no accepted format ({found}); send one of {names}")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height by the header; (0, 0) if it is broken."""
    kind, start = data[12:16], data[20:30]
    if len(start) < 10:
        return 0, 0
    if kind == b"VP8X":
        return 1 + int.from_bytes(start[4:7], "little"), 1 + int.from_bytes(start[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(start[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(start[6:8], "little") & 0x3FFF, int.from_bytes(start[8:10], "little") & 0x3FFF

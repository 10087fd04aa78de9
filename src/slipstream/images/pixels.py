"""CallerTurns a picture into the patches that a tower reads: uint8, in the tower's order, with the grid of each view.

Normalisation is left to the device: a patch crosses as a quarter of its bytes in float32.

A picture is resized in two calls, its width first. Pillow up to version 12 passes in this order, newer versions choose
by the sizes, with differences of up to 50 levels; the two calls give the same bits in all versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from PIL import Image

from slipstream.base.errors import InvalidImage
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.images.sizes import ImageLayout, Sides, View, lay_out

_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS, "bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC,
}  # fmt: skip


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image, or a video, as a tower and a prompt need it."""

    key: bytes  # equal keys: equal patches at equal places
    patches: np.ndarray  # uint8 [patches of all views, values of a patch]
    grids: tuple[tuple[int, int, int], ...]  # of each view: frames, rows and columns of patches
    height: int  # of the picture
    width: int
    tiles: tuple[int, int]  # rows and columns; (0, 0): none
    num_tokens: int  # rows of the tower's output
    times: tuple[float, ...] = ()  # of a video: seconds of each pair of frames
    seconds: float = 0.0  # of a video: between two pairs of frames


def prepare(picture: Image.Image, info: ImageInfo, num_images: int, max_pixels: int) -> PreparedImage:
    """`picture`: RGB. `num_images`: of the prompt. `max_pixels`: of any step. Raises InvalidImage."""
    layout = lay_out(info, picture.height, picture.width, num_images)
    for view in layout.views:
        _check_steps(view, picture, max_pixels)
    done: dict[tuple[object, ...], Image.Image] = {}  # steps that several views share
    parts = [patchify([tile], info) for view in layout.views for tile in _tiles(picture, view, info, done)]
    grids = tuple((1, rows, cols) for rows, cols in layout.grids(info.patch))
    patches = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return with_key(patches, grids, picture.size[::-1], layout)


def with_key(
    patches: np.ndarray,
    grids: tuple[tuple[int, int, int], ...],
    size: Sides,
    layout: ImageLayout,
    times: tuple[float, ...] = (),
    seconds: float = 0.0,
) -> PreparedImage:
    """The key is made of all that the model gets, rather than of the picture as it was decoded: this is as exact, and
    a photograph has a tenth of its pixels left."""
    fields = repr((grids, size, layout.tiles, layout.num_tokens, times, seconds, patches.shape))
    digest = hashlib.sha256(fields.encode())
    digest.update(np.ascontiguousarray(patches).data)
    return PreparedImage(
        key=digest.digest(),
        patches=patches,
        grids=grids,
        height=size[0],
        width=size[1],
        tiles=layout.tiles,
        num_tokens=layout.num_tokens,
        times=times,
        seconds=seconds,
    )


def resize(picture: Image.Image, size: Sides, info: ImageInfo) -> Image.Image:
    height, width = size
    resample = _FILTERS[info.filter]
    return picture.resize((width, picture.height), resample).resize((width, height), resample)


def patchify(frames: Sequence[Image.Image], info: ImageInfo) -> np.ndarray:
    """[patches, values] of one patch in time, whose frames are of one size."""
    side = info.patch
    rows, cols = frames[0].height // side, frames[0].width // side
    # [frame, y, x, channel]
    pixels = np.stack([np.asarray(frame)[: rows * side, : cols * side] for frame in frames])
    merge = info.merge if info.in_blocks else 1
    split = pixels.reshape(len(frames), rows // merge, merge, side, cols // merge, merge, side, 3)
    # [block row, block column, row, column, then the values of a patch]
    values = (3, 6, 7) if info.channels_last else (7, 0, 3, 6)
    order = (1, 4, 2, 5, *values) if not info.channels_last else (0, 1, 4, 2, 5, *values)
    return split.transpose(order).reshape(rows * cols, -1)


def _check_steps(view: View, picture: Image.Image, max_pixels: int) -> None:
    """Narrow pictures become large where a model wants a fixed shorter side or a square."""
    longest = max(picture.size)
    steps = [(longest, longest)] if view.square is not None else []
    before = picture.height
    for height, width in view.sizes:
        steps += [(before, width), (height, width)]
        before = height
    for height, width in steps:
        if height * width > max_pixels:
            raise InvalidImage(
                f"an image of {picture.width} x {picture.height} pixels has {width} x {height} when it is resized for "
                f"this model, more than {max_pixels} pixels; cut it into parts"
            )


def _tiles(
    picture: Image.Image, view: View, info: ImageInfo, done: dict[tuple[object, ...], Image.Image]
) -> list[Image.Image]:
    if view.box is not None:
        picture = picture.crop(view.box)
    if view.square is not None and picture.width != picture.height:
        side = max(picture.size)
        picture = _on_canvas(
            picture, (side, side), ((side - picture.height) // 2, (side - picture.width) // 2), view.square
        )
    for step in range(len(view.sizes)):
        key = (view.box, view.square, view.sizes[: step + 1])
        if key not in done:
            done[key] = resize(picture, view.sizes[step], info)
        picture = done[key]
    if view.canvas is not None and (view.canvas, view.offset) != ((picture.height, picture.width), (0, 0)):
        picture = _on_canvas(picture, view.canvas, view.offset, view.fill)
    if view.tile is None:
        return [picture]
    high, wide = view.tile
    return [
        picture.crop((left, top, left + wide, top + high))
        for top in range(0, picture.height - high + 1, high)
        for left in range(0, picture.width - wide + 1, wide)
    ]


def _on_canvas(picture: Image.Image, size: Sides, offset: Sides, fill: tuple[int, int, int]) -> Image.Image:
    canvas = Image.new("RGB", size[::-1], fill)
    canvas.paste(picture, offset[::-1])
    return canvas

"""The views of an image that a model sees, by the size of the picture: resized, padded, cut into tiles.

Formulas are in Python's floats and in the order of the models' own processors: a size that differs by one pixel is
another number of tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from slipstream.base.errors import InvalidImage
from slipstream.checkpoint.image_info import (
    BudgetSize,
    CroppedSize,
    FittedSize,
    ImageInfo,
    PaddedSize,
    PanAndScan,
    PatchesSize,
    PinpointSize,
    SmartSize,
    SmartTiledSize,
    SplitSize,
    StretchedSize,
    TiledSize,
)

Sides = tuple[int, int]  # height and width, in pixels unless it says otherwise
Colour = tuple[int, int, int]
_MAX_ASPECT = 200
_MAX_SPLIT = 4096  # longest side of pictures that are split


class View(NamedTuple):
    sizes: tuple[Sides, ...]  # the picture is resized to each of these in turn
    canvas: Sides | None = None  # the result is put on a canvas of this size, or cut to it
    offset: Sides = (0, 0)  # of the result on the canvas; negative: so much is cut off
    fill: Colour = (0, 0, 0)  # of the canvas
    tile: Sides | None = None  # the canvas is cut into tiles of this size, row by row
    box: tuple[int, int, int, int] | None = None  # only this part of the picture: left, top, right, bottom
    square: Colour | None = None  # the picture is first put in the middle of a square of this colour

    @property
    def final(self) -> Sides:
        return self.canvas or self.sizes[-1]

    def parts(self) -> int:
        """How many tiles it is cut into."""
        return 1 if self.tile is None else (self.final[0] // self.tile[0]) * (self.final[1] // self.tile[1])


class ImageLayout(NamedTuple):
    views: tuple[View, ...]
    tiles: Sides  # rows and columns of tiles; (0, 0): none
    num_tokens: int  # rows of the tower's output

    def grids(self, patch: int) -> tuple[Sides, ...]:
        """Rows and columns of patches of each picture that the tower sees. Pixels of an incomplete patch are left
        out."""
        sides = [(view.tile or view.final, view.parts()) for view in self.views]
        return tuple((height // patch, width // patch) for (height, width), count in sides for _ in range(count))


def lay_out(info: ImageInfo, height: int, width: int, num_images: int = 1) -> ImageLayout:
    """The views of a picture of this size. `num_images`: of the prompt. Raises InvalidImage for a shape that the model
    does not take."""
    tiles = (0, 0)
    extra = 0  # tokens besides those of patches
    match info.size:
        case StretchedSize(to_height, to_width, crops):
            boxes = _crops(height, width, crops) if crops else []
            views = [View(((to_height, to_width),), box=box) for box in (None, *boxes)]
        case CroppedSize(shortest, to_height, to_width):
            size = _with_shortest(height, width, shortest)
            offset = (-((size[0] - to_height) // 2), -((size[1] - to_width) // 2))
            views = [View((size,), (to_height, to_width), offset)]
        case SmartSize() as smart:
            views = [View((smart_size(smart, height, width),))]
        case BudgetSize() as budget:
            views = [View((_budget_size(budget, height, width),))]
        case FittedSize(longest, factor):
            ratio = max(height, width) / longest
            fitted = (math.floor(height / ratio), math.floor(width / ratio)) if ratio > 1 else (height, width)
            rows, cols = ((max(side, 1) - 1) // factor + 1 for side in fitted)
            views = [View(((rows * factor, cols * factor),))]
        case SplitSize() as split:
            views, tiles = _split(split, height, width)
        case TiledSize(to_height, to_width, least, most):
            rows, cols = _grid(height, width, least, most, (to_height, to_width)) if most > 1 else (1, 1)
            tile = (to_height, to_width)
            views = [View(((to_height * rows, to_width * cols),), tile=tile)]
            if rows * cols > 1:
                tiles = (rows, cols)
                views.append(View((tile,)))
        case PinpointSize() as pinpoint:
            views, extra = _pinpoint(pinpoint, height, width, num_images, info.patch)
            if len(views) > 1:
                tiles = (views[1].final[0] // pinpoint.tile, views[1].final[1] // pinpoint.tile)
        case SmartTiledSize(side, least, most, has_whole, area, smart):
            views = [View((smart_size(smart, height, width),))]
            bars = [max(info.patch, round(each / smart.factor) * smart.factor) for each in (height, width)]
            if bars[0] * bars[1] > area and (least, most) != (1, 1):
                tiles = rows, cols = _grid(height, width, least, most, (side, side))
                cut = View(((side * rows, side * cols),), tile=(side, side))
                views = [cut, *views] if has_whole and rows * cols > 1 else [cut]
        case PaddedSize(side, tile_side, least, most, fill):
            views, extra = [], 1
            if most and max(height, width) > tile_side:
                rows, cols = _grid(height, width, least, most, (tile_side, tile_side))
                views.append(View(((rows * tile_side, cols * tile_side),), tile=(tile_side, tile_side)))
            scale = side / max(height, width)
            inner = (max(round(height * scale), 1), max(round(width * scale), 1))
            offset = ((side - inner[0]) // 2, (side - inner[1]) // 2)
            views.append(View((inner,), (side, side), offset, fill))
        case PatchesSize(patch, most):
            views = [View((_patches_size(patch, most, height, width),))]
    layout = ImageLayout(tuple(views), tiles, 0)
    merged = sum((rows // info.merge) * (cols // info.merge) for rows, cols in layout.grids(info.patch))
    return layout._replace(num_tokens=extra if isinstance(info.size, PinpointSize) else merged + extra)


def smart_size(size: SmartSize, height: int, width: int, num_frames: int = 0) -> Sides:
    """`num_frames`: of a video whose frames share the area."""
    factor, least, most = size.factor, size.least, size.most
    frames = num_frames or size.frames  # that share the area
    if size.small == "scale" and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if size.small == "round":
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
    aspect = max(height, width) / min(height, width)
    # of pictures that are longer than this, LFM2-VL's processor would make more patches than the model takes
    longest = min(_MAX_ASPECT, most // factor**2) if size.small == "clamp" else _MAX_ASPECT
    if aspect > longest:
        raise InvalidImage(
            f"an image of {width} x {height} pixels is longer than {longest} times its shorter side, which this model "
            "does not take; cut it into parts"
        )
    smallest = factor if size.small == "clamp" else 0
    to_height, to_width = (max(smallest, round(side / factor) * factor) for side in (height, width))
    area = to_height * to_width * (round(frames / size.frames) * size.frames)
    if area > most:
        beta = math.sqrt(frames * height * width / most)
        to_height, to_width = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif area < least:
        beta = math.sqrt(least / (frames * height * width))
        to_height, to_width = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return to_height, to_width


def _with_shortest(height: int, width: int, shortest: int) -> Sides:
    if width <= height:
        return int(shortest * height / width), shortest
    return shortest, int(shortest * width / height)


def _budget_size(size: BudgetSize, height: int, width: int) -> Sides:
    side = size.side
    scale = math.sqrt(size.tokens * side**2 / (height * width))
    to_height, to_width = (math.floor(scale * each / side) * side for each in (height, width))
    if to_height == 0:
        to_height, to_width = side, min(width // height, size.tokens) * side
    elif to_width == 0:
        to_height, to_width = min(height // width, size.tokens) * side, side
    return to_height, to_width


def _split(size: SplitSize, height: int, width: int) -> tuple[list[View], Sides]:
    tile = size.tile
    aspect = width / height
    if width >= height:
        to_width, to_height = size.longest, int(size.longest / aspect)
        to_height += to_height % 2
    else:
        to_height, to_width = size.longest, int(size.longest * aspect)
        to_width += to_width % 2
    to_height, to_width = max(to_height, 1), max(to_width, 1)
    aspect = to_width / to_height
    if to_width >= to_height and to_width > _MAX_SPLIT:
        to_width, to_height = _MAX_SPLIT, max(int(_MAX_SPLIT / aspect), 1)
    elif to_height > to_width and to_height > _MAX_SPLIT:
        to_height, to_width = _MAX_SPLIT, max(int(_MAX_SPLIT * aspect), 1)
    first = (to_height, to_width)
    if not size.has_tiles:
        return [View((first, (tile, tile)))], (0, 0)
    aspect = to_width / to_height
    if to_width >= to_height:
        to_width = math.ceil(to_width / tile) * tile
        to_height = math.ceil(int(to_width / aspect) / tile) * tile
    else:
        to_height = math.ceil(to_height / tile) * tile
        to_width = math.ceil(int(to_height * aspect) / tile) * tile
    second = (max(to_height, tile), max(to_width, tile))
    if second == (tile, tile):
        return [View((first, second))], (0, 0)
    whole = View((first, second, (tile, tile)))
    return [View((first, second), tile=(tile, tile)), whole], (second[0] // tile, second[1] // tile)


def _grid(height: int, width: int, least: int, most: int, tile: Sides) -> Sides:
    """Rows and columns of tiles whose shape is nearest to the picture's. Of equal ones the larger, if the picture has
    more than half its pixels."""
    aspect = width / height
    sides = range(1, most + 1)
    grids = sorted(
        ((cols, rows) for cols in sides for rows in sides if least <= cols * rows <= most),
        key=lambda grid: grid[0] * grid[1],
    )
    best, nearest = (1, 1), math.inf
    for cols, rows in grids:
        distance = abs(aspect - cols / rows)
        is_large = height * width > 0.5 * tile[0] * tile[1] * cols * rows
        if distance < nearest or (distance == nearest and is_large):
            best, nearest = (cols, rows), distance
    return best[1], best[0]


def _pinpoint(size: PinpointSize, height: int, width: int, num_images: int, patch: int) -> tuple[list[View], int]:
    """The views, and the number of tokens: of borders there are none, and each row of tokens has one more."""
    tile = (size.tile, size.tile)
    side = size.tile // patch  # tokens
    if num_images > 1:
        return [View((tile,), square=size.fill)], side**2 + 1
    best = max(size.sizes, key=lambda each: _use(each, height, width))
    scale_width, scale_height = best[1] / width, best[0] / height
    if scale_width < scale_height:
        inner = (min(math.ceil(height * scale_width), best[0]), best[1])
    else:
        inner = (best[0], min(math.ceil(width * scale_height), best[1]))
    offset = ((best[0] - inner[0]) // 2, (best[1] - inner[1]) // 2)
    views = [View((tile,)), View((inner,), best, offset, tile=tile)]
    rows, cols = side * (best[0] // size.tile), side * (best[1] // size.tile)
    if width / height > cols / rows:
        rows -= (rows - int(round(height * (cols / width), 7))) // 2 * 2
    else:
        cols -= (cols - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * cols / (size.most * side**2))
    if ratio > 1.1:
        rows, cols = int(rows // ratio), int(cols // ratio)
    return views, side**2 + rows * cols + rows


def _use(size: Sides, height: int, width: int) -> tuple[int, int]:
    """How many pixels of the picture remain at this size, then how few of the size are wasted."""
    scale = min(size[1] / width, size[0] / height)
    pixels = min(int(width * scale) * int(height * scale), width * height)
    return pixels, pixels - size[0] * size[1]


def _patches_size(patch: int, most: int, height: int, width: int) -> Sides:
    def scaled(scale: float) -> Sides:
        to_height, to_width = (max(patch, math.ceil(side * scale / patch) * patch) for side in (height, width))
        return to_height, to_width

    low, high = 1e-6, 100.0  # scales, by bisection with the bounds and the precision of the processor
    while high - low >= 1e-5:
        middle = (low + high) / 2
        fits = math.prod(scaled(middle)) // patch**2 <= most
        low, high = (middle, high) if fits else (low, middle)
    return scaled(low)


def _crops(height: int, width: int, rule: PanAndScan) -> list[tuple[int, int, int, int]]:
    """Boxes along the longer side; none if the picture is not long, or the crops would be small."""
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < rule.ratio:
        return []
    count = min(longer // rule.smallest, math.floor(longer / shorter + 0.5))
    count = min(rule.most, max(2, count))
    step = math.ceil(longer / count)
    if min(step, shorter) < rule.smallest:
        return []
    starts = range(0, count * step, step)
    if width >= height:
        return [(start, 0, min(start + step, width), height) for start in starts]
    return [(0, start, width, min(start + step, height)) for start in starts]

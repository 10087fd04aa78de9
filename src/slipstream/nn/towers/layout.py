"""lay_out: the arrays that a tower needs beside the patches of a call, made on the host of the pictures' grids.

Patches are sorted before the first layer, so that those of one row of the output are neighbours, and those of one
window too. Attention does not depend on the order, and each later step is a view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.nn.towers.shapes import JoinedTiles, PositionTable, TowerShape

Grid = tuple[int, int, int]  # frames, rows and columns of patches of one view


class ImageViews(NamedTuple):
    """A picture or a video as it was prepared (`PreparedImage` of `images/pixels.py`)."""

    grids: tuple[Grid, ...]  # of each view, in the order of its patches
    tiles: tuple[int, int] = (0, 0)  # rows and columns of tiles among the views
    height: int = 0  # of the picture, in pixels
    width: int = 0


@dataclass(frozen=True, slots=True)
class TowerLayout:
    """Pictures of one call of a tower. `arrays` are to be uploaded; the rest stays on the host."""

    grids: tuple[Grid, ...]  # of all views
    num_patches: int
    num_rows: tuple[int, ...]  # of the output, for each picture
    segments: NDArray[np.int32]  # patches that see each other: those of a frame
    windows: NDArray[np.int32]  # in layers with a window; empty: none has one
    arrays: dict[str, NDArray[np.generic]]  # see `lay_out`


def lay_out(shape: TowerShape, images: Sequence[ImageViews]) -> TowerLayout:
    """Arrays, N patches and M rows of the output:

    order [N] int64: where each patch was before they were sorted; absent: they come as they are
    cells [2, N] int64: row and column of each patch, for a rope; absent without
    table_rows [taps, N] int64, table_weights [taps, N] float32: of a position table; absent if it is resized
    with_class [N + views] int64: which patch each hidden state of the layers is, or N for a class token; patches [N]
        int64: where each patch is among them; absent without class tokens
    starts [segments + 1] int32; window_starts likewise, absent without windows
    outputs [M] int64: where each row of the output is among those computed; absent: they are in order
    joined_rows [4, M] int64, joined_weights [4, M] float32: of which computed rows, or of the learned one behind them,
        each row of the output is a sum; absent unless tiles are joined
    """
    views = [grid for image in images for grid in image.grids]
    parts = [_lay_out_view(shape, grid) for grid in views]
    num_patches = sum(len(part.order) for part in parts)
    segments = np.array([rows * cols for frames, rows, cols in views for _ in range(frames)], np.int32)
    windows = np.concatenate([part.windows for part in parts])
    arrays: dict[str, NDArray[np.generic]] = {}
    if shape.class_token:
        firsts = _starts(segments)[:-1].astype(np.int64)
        arrays["with_class"] = np.insert(np.arange(num_patches), firsts, num_patches)
        arrays["patches"] = np.arange(num_patches) + np.repeat(np.arange(len(segments)) + 1, segments)
        segments = segments + np.int32(1)
    arrays["starts"] = _starts(segments)
    if len(windows):
        arrays["window_starts"] = _starts(windows)
        arrays["outputs"] = _joined([part.outputs for part in parts])
    if not shape.in_blocks or len(windows):
        arrays["order"] = _joined([part.order for part in parts])
    if shape.rope is not None:
        arrays["cells"] = np.concatenate([part.cells for part in parts], 1)
    if shape.table is not None and shape.table.kind != "resized":
        arrays["table_rows"] = np.concatenate([part.table_rows for part in parts], 1)
        arrays["table_weights"] = np.concatenate([part.table_weights for part in parts], 1)
    unit = shape.merge**2
    num_rows = tuple(sum(frames * rows * cols // unit for frames, rows, cols in image.grids) for image in images)
    if shape.tiles is not None:
        joined = [_join_tiles(shape.tiles, shape, image) for image in images]
        *before, learned = accumulate((0, *num_rows))
        shifted = [np.where(rows < 0, learned, rows + first) for (rows, _), first in zip(joined, before, strict=True)]
        arrays["joined_rows"] = np.concatenate(shifted, 1)
        arrays["joined_weights"] = np.concatenate([weights for _, weights in joined], 1)
        num_rows = tuple(rows.shape[1] for rows, _ in joined)
    return TowerLayout(tuple(views), num_patches, num_rows, segments, windows, arrays)


class _ViewLayout(NamedTuple):
    order: NDArray[np.int64]  # [n]
    cells: NDArray[np.int64]  # [2, n]
    windows: NDArray[np.int32]
    outputs: NDArray[np.int64]  # [rows of the output]
    table_rows: NDArray[np.int64]  # [taps, n]
    table_weights: NDArray[np.float32]


@lru_cache(maxsize=64)
def _lay_out_view(shape: TowerShape, grid: Grid) -> _ViewLayout:
    frames, rows, cols = grid
    merge = shape.merge
    assert frames > 0 and rows > 0 and cols > 0 and rows % merge == cols % merge == 0, f"{grid} for merge {merge}"
    # [frame, block row, block column, row, column]: the number of each patch when they are row by row
    raster = np.arange(frames * rows * cols).reshape(frames, rows // merge, merge, cols // merge, merge)
    blocks = raster.transpose(0, 1, 3, 2, 4).reshape(-1, merge * merge)
    windows, sorting = np.empty(0, np.int32), np.arange(len(blocks))
    if shape.window:
        number = _window_numbers(frames, rows // merge, cols // merge, shape.window)
        sorting = np.argsort(number, kind="stable")
        windows = (np.bincount(number) * merge * merge).astype(np.int32)
    cells = blocks[sorting].reshape(-1)
    order = cells
    if shape.in_blocks:
        order = (sorting[:, None] * merge * merge + np.arange(merge * merge)).reshape(-1)
    row_col = np.stack([cells // cols % rows, cells % cols])
    table_rows, table_weights = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
    if shape.table is not None and shape.table.kind != "resized":
        table_rows, table_weights = _table_taps(shape.table, row_col, rows, cols)
        table_rows = table_rows + int(shape.class_token)
    return _ViewLayout(order, row_col, windows, np.argsort(sorting), table_rows, table_weights)


def _window_numbers(frames: int, rows: int, cols: int, side: int) -> NDArray[np.int64]:
    """The number of the window of each block, frames and blocks row by row. Windows at the right and at the bottom may
    be smaller."""
    down, across = -(-rows // side), -(-cols // side)
    one = (np.arange(rows) // side)[:, None] * across + np.arange(cols) // side
    return (np.arange(frames)[:, None] * down * across + one.reshape(-1)).reshape(-1)


def _table_taps(
    table: PositionTable, cells: NDArray[np.int64], rows: int, cols: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of the table for each patch, and their weights, each [taps, n]."""
    if table.kind == "fixed":
        assert rows == cols == table.side, f"{rows} x {cols} patches for a table of {table.side} x {table.side}"
        return (cells[:1] * table.side + cells[1:]), np.ones((1, cells.shape[1]), np.float32)
    down, down_weights = _axis_taps(table, cells[0], rows)
    across, across_weights = _axis_taps(table, cells[1], cols)
    indices = down[:, None] * table.side + across
    weights = down_weights[:, None] * across_weights
    return indices.reshape(-1, cells.shape[1]), weights.reshape(-1, cells.shape[1])


def _axis_taps(
    table: PositionTable, index: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Computed in float32, as in training."""
    at = index.astype(np.float32) * np.float32(table.side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at)
    taps = np.stack([low, low + 1]).astype(np.int64).clip(0, table.side - 1)
    return taps, np.stack([low + 1 - at, at - low])


def _join_tiles(
    tiles: JoinedTiles, shape: TowerShape, image: ImageViews
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Of each row of a picture's output: the rows of its views of which it is a sum, -1: the learned one; and their
    weights, each [4, rows]. Sizes as in `images/sizes.py`."""
    _, high, wide = image.grids[0]
    side = high // shape.merge
    assert high == wide and shape.merge == 1, f"views of {high} x {wide} patches"
    whole = np.zeros((4, side * side), np.int64)
    whole[0] = np.arange(side * side)
    found = [(whole, np.eye(4, 1, dtype=np.float32) * np.ones(side * side, np.float32))]
    end = (np.full((4, 1), -1), np.eye(4, 1, dtype=np.float32))
    if len(image.grids) == 1:
        found.append(end)
    else:
        down, across = image.tiles
        grid = np.arange(1, down * across + 1).reshape(down, 1, across, 1) * side * side
        grid = (grid + np.arange(side)[:, None, None] * side + np.arange(side)).reshape(down * side, across * side)
        rows, cols = grid.shape
        if image.width / image.height > cols / rows:
            padding = (rows - int(round(image.height * (cols / image.width), 7))) // 2
            grid = grid[padding : rows - padding]
        else:
            padding = (cols - int(round(image.width * (rows / image.height), 7))) // 2
            grid = grid[:, padding : cols - padding]
        ratio = math.sqrt(grid.size / (tiles.most * side * side))
        sizes = (int(grid.shape[0] // ratio), int(grid.shape[1] // ratio)) if ratio > 1.1 else grid.shape
        (below, below_weights), (right, right_weights) = map(_shrunk_taps, grid.shape, sizes)
        inner = grid[below[:, None, :, None], right[None, :, None, :]].reshape(4, *sizes)
        weights = (below_weights[:, None, :, None] * right_weights[None, :, None, :]).reshape(4, *sizes)
        ends = [np.broadcast_to(each[:, None], (4, sizes[0], 1)) for each in end]
        ended = (np.concatenate(pair, 2).reshape(4, -1) for pair in zip((inner, weights), ends, strict=True))
        found.append((next(ended), next(ended)))
    return np.concatenate([rows for rows, _ in found], 1), np.concatenate([weights for _, weights in found], 1)


def _shrunk_taps(size: int, shrunk: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Two taps for each index of an axis that is resized without antialiasing, computed in float32."""
    at = (np.arange(shrunk, dtype=np.float32) + np.float32(0.5)) * np.float32(size / shrunk) - np.float32(0.5)
    at = at.clip(0)
    low = np.floor(at)
    taps = np.stack([low, low + 1]).astype(np.int64).clip(0, size - 1)
    return taps, np.stack([low + 1 - at, at - low])


def _starts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Indices into each part become indices into all of them."""
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return np.concatenate([part + first for part, first in zip(parts, firsts, strict=True)])

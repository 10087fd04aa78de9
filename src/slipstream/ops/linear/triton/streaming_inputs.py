"""The FP8 input of the streaming kernel, if it is a single row of bfloat16: a program quantises it at its start.

Meanwhile the producer warp loads weights. The scale is that of the whole row, its largest absolute value / 448, as in
`ops/quantized/triton/quantize.py`; a program that has a part of the inputs reads the whole row too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_FP8 = gl.constexpr(448.0)
CHUNK = gl.constexpr(16)  # tiles of 128 inputs per load


@gluon.jit
def quantize_row(
    x, tiles, first, num_in, ALL: gl.constexpr, OWN: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
):
    """Writes the tiles from `first` on as FP8 to the first rows of `tiles` [OWN * CHUNK, ROWS, 128], and returns the
    scale. Other rows are not written: they are columns of the MMA that nothing reads. ALL: chunks of the row."""
    BY_TILE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    tile = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, BY_TILE)), 1)
    offset = tile * 128 + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BY_TILE)), 0)
    largest = gl.zeros([CHUNK, 128], gl.float32, BY_TILE)
    for chunk in gl.static_range(ALL):
        at = chunk * (CHUNK * 128) + offset
        largest = gl.maximum(largest, gl.abs(gl.load(x + at, mask=at < num_in, other=0.0).to(gl.float32)))
    scale = gl.maximum(gl.max(gl.max(largest, 1), 0) / MAX_FP8, 1e-12)
    # without the swizzle of 128 bytes, which leaves the first of eight rows as it is
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = tiles._reinterpret(gl.float8e4nv, [OWN, CHUNK, ROWS * 128], PLAIN)
    for chunk in gl.static_range(OWN):
        at = (first + chunk * CHUNK) * 128 + offset
        value = gl.load(x + at, mask=at < num_in, other=0.0).to(gl.float32) * (1 / scale)
        rows.index(chunk).slice(0, 128, 1).store(value.to(gl.float8e4nv))
    return scale

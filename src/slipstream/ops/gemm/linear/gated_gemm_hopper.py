"""GEMM of 1024 and more rows on Hopper with a fused activation: gated (gate and up projection), or elementwise gelu or
relu2.

With cuBLAS a second kernel would read the GEMM's output again; a gate and up projection has twice as many columns as
the network needs, and the GPU runs at its power limit. A program computes tiles of 128 rows x twice 128 outputs (gate
and up, or columns of the left and the right half): one producer warp, two consumer warpgroups with 64 rows each. Where
sums are long the second warpgroup runs some steps behind the first, so that the epilogue of one overlaps the MMAs of
the other. Written in Gluon, as `streaming_hopper.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.linear.epilogue import GATES
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.platform.pdl import ROWS, SIZE, STAGES, WIDTH, halves, multiply_tile

# SIZE is the number of gate columns per tile, and of up columns; or the columns of each half
GROUP = gl.constexpr(16)  # row blocks whose tiles are computed together, so that the weight stays in the L2 cache
LONG = 2048  # inputs from which the stagger of the warpgroups pays
# One program per multiprocessor. An even split of the registers gives 168 per thread; the producer warp gives most of
# its registers to the consumers.
EVEN_REGISTERS = 168
COMPUTE_REGISTERS = gl.constexpr(240)
FETCH_REGISTERS = gl.constexpr(24)
GELU, RELU2 = gl.constexpr(3), gl.constexpr(4)  # values of GATE besides those of GATES


def gated_gemm(x: torch.Tensor, weight: torch.Tensor, gate: str) -> torch.Tensor:
    """x [rows, in] times gate rows then up rows [2 * out, in], and the gated activation: [rows, out]."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, GATES[gate], 2 if x.shape[1] >= LONG else 0)
    return out


def can_fuse_elementwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether each half of the outputs is a multiple of the tile size, and all operands have one 16-bit dtype."""
    has_one_dtype = x.dtype == weight.dtype and (bias is None or x.dtype == bias.dtype)
    return len(weight) % (2 * SIZE.value) == 0 and has_one_dtype and x.element_size() == 2


def gelu_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x [rows, in] times the transpose of weight [out, in] + bias [out])."""
    assert can_fuse_elementwise(x, weight, bias), f"{weight.shape} in {x.dtype}"
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, bias, GELU.value, 0)
    return out


def relu2_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The squared ReLU of x [rows, in] times the transpose of weight [out, in]."""
    assert can_fuse_elementwise(x, weight, None), f"{weight.shape} in {x.dtype}"
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, RELU2.value, 2 if x.shape[1] >= LONG else 0)
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, gate: int, ahead: int
) -> None:
    (rows, num_in), half = x.shape, len(weight) // 2
    row_blocks, blocks = triton.cdiv(rows, 2 * ROWS.value), triton.cdiv(half, SIZE.value)
    _gate_kernel[(min(multiprocessors(x.device), row_blocks * blocks),)](
        _describe(x, [2 * ROWS.value, WIDTH.value]),
        _describe(weight, [SIZE.value, WIDTH.value]),
        _describe(out, [ROWS.value, SIZE.value]),
        bias,
        half,
        triton.cdiv(num_in, WIDTH.value),
        row_blocks,
        blocks,
        GATE=gate,
        AHEAD=ahead,
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
    )


def _describe(matrix: torch.Tensor, box: list[int]) -> Any:
    # the layout is the same for both 16-bit dtypes
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


# grid: (multiprocessors,), persistent over (group of row blocks, block of outputs, row block)
@gluon.jit(do_not_specialize=["row_blocks"])
def _gate_kernel(x, weight, out, bias, half, num_steps, row_blocks, blocks, GATE: gl.constexpr, AHEAD: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * SIZE, WIDTH], x.dtype)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SIZE], x.dtype)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * SIZE, WIDTH], TILE)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * ROWS, WIDTH], TILE)
    results = gl.allocate_shared_memory(x.dtype, [2, ROWS, SIZE], RESULT)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(used.index(stage), count=2)
    mbarrier.init(ahead, count=1)
    fence_async_shared()
    tiles = (ws, xs, there, used)
    shape = (half, num_steps, row_blocks, blocks)
    gl.warp_specialize(
        [
            (_compute, (tiles, ahead, results.index(0), out, bias, shape, 0, GATE, AHEAD)),
            (_compute, (tiles, ahead, results.index(1), out, bias, shape, 1, GATE, AHEAD)),
            (_fetch, (tiles, x, weight, shape)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(tiles, x, weight, shape):
    """The producer warp: loads all tiles of this program, as far ahead as the pipeline has stages."""
    ws, xs, there, used = tiles
    half, num_steps, row_blocks, blocks = shape
    done = 0
    for tile in range(gl.program_id(0), row_blocks * blocks, gl.num_programs(0)):
        row, block = _tile_blocks(tile, row_blocks, blocks)
        for step in range(num_steps):
            stage = done % STAGES
            k = step * WIDTH
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * (SIZE + ROWS) * WIDTH * 2)
            tma.async_copy_global_to_shared(x, [row * (2 * ROWS), k], bar, xs.index(stage))
            # gate rows, and below them the up rows of the same outputs
            halves = ws.index(stage)
            tma.async_copy_global_to_shared(weight, [block * SIZE, k], bar, halves.slice(0, SIZE))
            tma.async_copy_global_to_shared(weight, [half + block * SIZE, k], bar, halves.slice(SIZE, SIZE))
            done += 1


@gluon.jit
def _compute(
    tiles,
    ahead,
    result,
    out,
    bias,
    shape,
    HALF: gl.constexpr,
    GATE: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """A consumer warpgroup: MMA and epilogue of one half of the rows of each tile."""
    half, num_steps, row_blocks, blocks = shape
    KEPT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    if AHEAD > 0 and HALF == 1:
        mbarrier.wait(ahead, 0)
    done = 0
    for tile in range(gl.program_id(0), row_blocks * blocks, gl.num_programs(0)):
        row, block = _tile_blocks(tile, row_blocks, blocks)
        acc, done = multiply_tile(tiles, ahead, done, num_steps, HALF, AHEAD)
        gate, up = halves(acc, SIZE)
        own_rows, column = (row * 2 + HALF) * ROWS, block * SIZE
        if GATE == GELU:
            _store_tile(_gelu(_biased(gate, bias, column, KEPT)), own_rows, column, result, out, KEPT)
            _store_tile(_gelu(_biased(up, bias, half + column, KEPT)), own_rows, half + column, result, out, KEPT)
        elif GATE == RELU2:
            _store_tile(_relu2(gate), own_rows, column, result, out, KEPT)
            _store_tile(_relu2(up), own_rows, half + column, result, out, KEPT)
        else:
            slope = gate
            if GATE == 2:
                # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
                slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            _store_tile(gate / (1.0 + gl.exp(-slope)) * up, own_rows, column, result, out, KEPT)
    tma.store_wait(0)


@gluon.jit
def _biased(sums, bias, column, KEPT: gl.constexpr):
    own = gl.load(bias + column + gl.arange(0, SIZE, gl.SliceLayout(0, KEPT)))
    return gl.convert_layout(sums, KEPT) + gl.expand_dims(own.to(gl.float32), 0)


@gluon.jit
def _store_tile(value, row, column, result, out, KEPT: gl.constexpr):
    value = value.to(out.dtype)
    tma.store_wait(0)  # the previous result has been copied from shared memory
    result.store(gl.convert_layout(value, KEPT))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], result)


@gluon.jit
def _relu2(x):
    return gl.where(x < 0.0, 0.0, x * x)  # NaN stays


@gluon.jit
def _gelu(x):
    """erf by Abramowitz and Stegun 7.1.26: an error of at most 1.5e-7, a third of the instructions of erf."""
    size = gl.abs(x)
    t = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [1.0 + (0.3275911 * 0.7071067811865476) * size],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    # (1 - erf(size / sqrt(2))) / 2
    tail = 0.5 * 1.421413741 + t * (0.5 * -1.453152027 + t * (0.5 * 1.061405429))
    tail = t * (0.5 * 0.254829592 + t * (0.5 * -0.284496736 + t * tail))
    tail *= gl.exp2(x * x * (-0.5 * 1.4426950408889634))
    return gl.maximum(x, 0.0) - size * tail


@gluon.jit
def _tile_blocks(tile, row_blocks, blocks):
    """The row block and the output block of a tile: GROUP row blocks for each output block in turn."""
    first = tile // (GROUP * blocks) * GROUP
    size = gl.minimum(row_blocks - first, GROUP)
    inside = tile % (GROUP * blocks)
    return first + inside % size, inside // size

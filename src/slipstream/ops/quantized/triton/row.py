"""GEMM of a single row with 4-bit weights on Hopper: TMA streams the weights, integer MMAs multiply.

`stream.py` calls this for one row. The kernel rounds x to integers of 16 bits with a scale for 64 inputs, which adds
less error than rounding to bfloat16 does unless one of the 64 is hundreds of times larger than the others. The shape
alone fixes the order of every sum. Written in Gluon, which has no interpreter: `tests/ops/test_kernels_compile.py`
compiles it on any machine, `pytest -m cuda` runs it, `../reference.py` has its arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.linear.capability import MULTIPROCESSORS
from slipstream.ops.linear.triton.epilogue import GATES, split_memory
from slipstream.ops.linear.unnormalized import StreamedRows, Unnormalized
from slipstream.ops.pdl import dependent
from slipstream.ops.quantized.matrix import QuantizedMatrix
from slipstream.ops.quantized.triton import row_kernel
from slipstream.ops.quantized.triton.row_kernel import SLICE

MEMORY = 222 << 10  # bytes of shared memory for all programs on a multiprocessor
INPUT_BYTES = 8 * SLICE.value + 48  # of x, per slice: 4 columns of both halves, scale and sums
MAX_STEPS = 16  # whose x leaves room for weights; the loop over them is unrolled
MAX_SPLITS = 6


class RowTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per program, gate and up rows together; 32 if there is no gate
    slices: int = 4  # of 128 inputs per step, one for each warp
    programs: int = 3  # per multiprocessor
    groups: int = 1  # as in `SliceTile`


def takes_row(weight: QuantizedMatrix, rows: int, is_gated: bool) -> bool:
    """Whether `launch_row` takes a weight with slices: blocks of outputs and pairs of slices are whole."""
    words = weight.words
    if rows != 1 or not weight.is_4_bit or words is None:
        return False
    is_aligned = words.stride(1) == 1 and words.stride(0) % 4 == 0 and words.data_ptr() % 16 == 0
    return is_aligned and weight.num_columns % 256 == 0 and len(weight.values) % (64 if is_gated else 32) == 0


def row_tile(weight: QuantizedMatrix, is_gated: bool = False) -> RowTile:
    """Measured on an H200 at the shapes of Qwen3-8B: 8 warps per program and no split-k if a program can have the whole
    row of x. Else programs of 4 warps, three on a multiprocessor, and split-k if that is not one wave of them."""
    num_out, num_in = len(weight.values), weight.num_columns
    if not is_gated and num_in <= 8192 and num_out <= 64 * MULTIPROCESSORS:
        return RowTile(1, 32, 8, programs=1 if num_out <= 32 * MULTIPROCESSORS else 2)
    if is_gated and num_in <= 8192 and num_out <= 64 * MULTIPROCESSORS:
        return RowTile(1, 64, 8, programs=1)
    steps = triton.cdiv(num_in, 512)
    wanted = min(MAX_SPLITS, 3 * MULTIPROCESSORS // triton.cdiv(num_out, 64))
    return RowTile(max(1, wanted, triton.cdiv(steps, MAX_STEPS)))


def row_stages(tile: RowTile, steps: int) -> int:
    """As many stages as fit beside x; no more than there are steps."""
    inputs = tile.slices * INPUT_BYTES * triton.next_power_of_2(steps)
    room = MEMORY // tile.programs - inputs - 2048  # barriers, sums of the warps
    return max(1, min(steps, room // (tile.slices * tile.outputs * (SLICE.value + 4))))


def row_registers(tile: RowTile) -> int:
    """Per thread at the launch, of which the producer warp gives most to the others. No more than they need: with the
    rest the next kernel starts, and loads its weights."""
    return min(96, 65536 // (tile.programs * (tile.slices + 4) * 32) // 8 * 8)


def launch_row(
    inputs: torch.Tensor | Unnormalized,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    tile: RowTile,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
) -> None:
    given = StreamedRows.of(inputs)
    x, squares = given.x, given.squares
    num_in = x.shape[1]
    blocks = triton.cdiv(len(weight.values), tile.outputs)
    steps = triton.cdiv(num_in, 2 * SLICE.value * tile.slices)
    split_steps = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, split_steps)
    memory = split_memory(weight.values, splits, blocks, tile.outputs)
    row_kernel.row_kernel[(1, blocks, splits)](
        x,
        _describe_weight(weight, bool(gate), tile),
        _describe_words(weight, bool(gate), tile),
        *given.arguments(bias, residual, out, made),
        *memory,
        out.shape[1],
        num_in,
        PARTS=0 if squares is None else squares.shape[1],
        GATE=GATES[gate],
        SPLITS=splits,
        OUTPUTS=tile.outputs,
        WARPS=tile.slices,
        STEPS=split_steps,
        STAGES=row_stages(tile, split_steps),
        num_warps=tile.slices,
        maxnreg=row_registers(tile),
        **dependent(x.device, 1),
    )


def _describe_weight(weight: QuantizedMatrix, is_gated: bool, tile: RowTile) -> Any:
    """[pairs of slices, halves of 32 outputs, 4, 8, 128 bytes]; gated: [pairs of slices, gate and up, 4, outputs / 4,
    128 bytes]. An output is 4 * r + j of its half: copies have j before r, so that a thread has four adjacent ones."""
    values = weight.values
    rows, num_bytes = values.shape
    shape = [num_bytes // 128, 2 if is_gated else rows // 32, 4, rows // 8 if is_gated else 8, 128]
    strides = [128, (rows // 2 if is_gated else 32) * num_bytes, num_bytes, 4 * num_bytes, 1]
    box = [tile.slices // 2, tile.outputs // 32, 4, 8, 128]
    return TensorDescriptor(values, shape, strides, box, gl.NVMMASharedLayout(128, 8, 5))


def _describe_words(weight: QuantizedMatrix, is_gated: bool, tile: RowTile) -> Any:
    """[groups, halves of 32 outputs, 32]; gated: [groups, gate and up, outputs]"""
    words = weight.words
    assert words is not None
    groups, rows = words.shape
    parts = 2 if is_gated else rows // 32
    shape, strides = [groups, parts, rows // parts], [words.stride(0), rows // parts, 1]
    box = [tile.slices, tile.outputs // 32, 32]
    return TensorDescriptor(words, shape, strides, box, gl.NVMMASharedLayout(0, 32, 3))

"""GEMM of up to 16 rows with 4-bit or FP8 weights on Hopper: TMA streams the weights, x stays bfloat16.

As `ops/gemm/linear/streaming_hopper.py`, with weights that become bfloat16 in registers; a single row with 4-bit
weights has a kernel of its own (`row.py`). The shape alone fixes the order of every sum. Written in Gluon, which has no
interpreter: `tests/ops/test_kernels_compile.py` compiles it on any machine, `pytest -m cuda` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.chains import StreamingRows, Unnormalized
from slipstream.ops.gemm.linear.epilogue import GATES, split_memory
from slipstream.ops.gemm.linear.tiles import keeps_wide_programs_busy
from slipstream.ops.gemm.quantized import streaming_kernel
from slipstream.ops.gemm.quantized.gemm import PROGRAMS
from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix
from slipstream.ops.gemm.quantized.row import RowTile, launch_row, row_tile, takes_row
from slipstream.ops.gemm.quantized.streaming_kernel import SLICE
from slipstream.ops.platform.pdl import dependent

MEMORY = 195 << 10  # bytes of shared memory for the pipelines of all programs on a multiprocessor


class SliceTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per program, gate and up rows together; a warp multiplies 64
    slices: int = 4  # of 64 bytes of a weight row per step
    programs: int = 2  # per multiprocessor
    groups: int = 1  # blocks of `outputs` outputs per program, 1 or 3

    @property
    def warps(self) -> int:
        return self.slices * self.outputs // 64


def streaming_gemm_low_bit(
    x: torch.Tensor | Unnormalized,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: SliceTile | RowTile | None = None,
) -> torch.Tensor:
    """The GEMM of x, or of the norm of an `Unnormalized` x."""
    rows = len(x) if isinstance(x, torch.Tensor) else len(x.total)
    num_out = len(weight.values) // 2 if gate else len(weight.values)
    out = torch.empty((rows, num_out), dtype=torch.bfloat16, device=weight.values.device)
    _launch(x, weight, bias, gate, out, tile or _choose_tile(weight, rows, bool(gate)))
    return out


def streaming_gemm_low_bit_add(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]
    residual: torch.Tensor,  # [rows, out]
    norm: torch.Tensor,  # [out]
    eps: float,
    tile: SliceTile | RowTile | None = None,
) -> Unnormalized:
    """residual + the GEMM, with what the next GEMM needs to finish the norm of the sum."""
    tile = tile or _choose_tile(weight, len(x))
    num_out = len(weight.values)
    assert residual.is_contiguous() and residual.shape == (len(x), num_out), f"{residual.shape}"
    total, weighted = (torch.empty(residual.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    num_blocks = triton.cdiv(num_out, tile.outputs * tile.groups) * tile.groups
    squares = torch.empty(len(x), num_blocks, dtype=torch.float32, device=x.device)
    made = Unnormalized(total, norm, eps, weighted, squares)
    _launch(x, weight, None, "", total, tile, residual, made)
    return made


def _choose_tile(weight: QuantizedMatrix, rows: int, is_gated: bool = False) -> SliceTile | RowTile:
    return row_tile(weight, is_gated) if takes_row(weight, rows, is_gated) else slice_tile(weight, rows, is_gated)


def _launch(
    inputs: torch.Tensor | Unnormalized,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    tile: SliceTile | RowTile,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
) -> None:
    if isinstance(tile, RowTile):
        return launch_row(inputs, weight, bias, gate, out, tile, residual, made)
    given = StreamingRows.of(inputs)
    x, squares = given.x, given.squares
    rows, num_in = x.shape
    outputs, slices = tile.outputs, tile.slices
    padded = 8 if rows <= 8 else 16
    blocks, row_blocks = triton.cdiv(len(weight.values), outputs * tile.groups), triton.cdiv(rows, padded)
    columns = SLICE.value * (2 if weight.is_4_bit else 1)  # of a slice
    steps = triton.cdiv(num_in // columns, slices)
    split_steps = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, split_steps)
    memory = split_memory(weight.values, splits, blocks * tile.groups * row_blocks, outputs * padded)
    words = weight.words
    streaming_kernel.streaming_kernel[(row_blocks, blocks, splits)](
        _describe_inputs(x, columns, slices, padded),
        _describe_inputs(x[:, SLICE.value :], columns, slices, padded) if weight.is_4_bit else None,
        _describe_weight(weight, 2 if gate else 1, outputs, slices),
        weight.scale if words is None else words,
        *given.arguments(bias, residual, out, made),
        *memory,
        rows,
        out.shape[1],
        num_in,
        steps,
        split_steps,
        0 if words is None else len(words),
        0 if words is None else words.stride(0),
        PARTS=0 if squares is None else squares.shape[1],
        GATE=GATES[gate],
        SPLITS=splits,
        OUTPUTS=outputs,
        ROWS=padded,
        WARPS=slices,
        STAGES=slice_stages(tile, padded, weight.is_4_bit),
        GROUPS=tile.groups,
        num_warps=tile.warps,
        maxnreg=slice_registers(tile),
        **dependent(x.device, rows),
    )


def slice_tile(weight: QuantizedMatrix, rows: int, is_gated: bool = False) -> SliceTile:
    """Measured on an H200 at the shapes of Qwen3-8B with 1 and 16 rows (`benchmarks/ops/quantized.py`): two programs on
    a multiprocessor, and split-k up to about 264 programs. Three programs on a multiprocessor where this makes one wave
    of two, if their registers suffice; else one program of three blocks, which also loads a third of the x bytes."""
    if rows > 8 and weight.is_4_bit and is_gated and keeps_wide_programs_busy(len(weight.values)):
        return SliceTile(1, programs=1, groups=3)
    blocks = triton.cdiv(len(weight.values), 64)
    programs = 3 if PROGRAMS < blocks <= PROGRAMS * 3 // 2 and rows <= 8 and weight.is_4_bit else 2
    return SliceTile(max(1, min(4, PROGRAMS // blocks)), programs=programs)


def slice_stages(tile: SliceTile, rows: int, is_4_bit: bool) -> int:
    stage = tile.slices * (tile.groups * tile.outputs * SLICE.value + rows * 128 * (2 if is_4_bit else 1))
    return max(1, MEMORY // tile.programs // stage)


def slice_registers(tile: SliceTile) -> int:
    """Per thread at the launch. The producer warp counts as four, and gives most of its registers to the others."""
    return min(240, 65536 // (tile.programs * (tile.groups * tile.warps + 4) * 32) // 8 * 8)


def _describe_inputs(x: torch.Tensor, columns: int, slices: int, rows: int) -> Any:
    """64 inputs of each slice: [slices, rows, 64]."""
    num_slices = triton.cdiv(x.shape[1], columns)
    shape, strides = [num_slices, len(x), 64], [columns, x.stride(0), 1]
    return TensorDescriptor(x, shape, strides, [slices, rows, 64], gl.NVMMASharedLayout(128, 16, 3))


def _describe_weight(weight: QuantizedMatrix, parts: int, outputs: int, slices: int) -> Any:
    """[slices, gate and up, outputs of each, 64 bytes]"""
    values = weight.values.view(torch.uint8)
    rows, num_bytes = values.shape
    shape, strides = [num_bytes // SLICE.value, parts, rows // parts, SLICE.value], [SLICE.value, 0, num_bytes, 1]
    strides[1] = rows // parts * num_bytes
    box = [slices, parts, outputs // parts, SLICE.value]
    return TensorDescriptor(values, shape, strides, box, gl.NVMMASharedLayout(64, 8, 4))

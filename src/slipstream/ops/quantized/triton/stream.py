"""GEMM of up to 16 rows with 4-bit or FP8 weights on Hopper: TMA streams the weights, x stays bfloat16.

As `ops/linear/triton/streaming_hopper.py`, with weights that become bfloat16 in registers. The shape alone fixes the
order of every sum. Written in Gluon, which has no interpreter: `tests/ops/test_kernels_compile.py` compiles it on any
machine, `pytest -m cuda` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.linear.triton.epilogue import GATES, counters
from slipstream.ops.pdl import dependent
from slipstream.ops.quantized.matrix import QuantizedMatrix
from slipstream.ops.quantized.triton import stream_kernel
from slipstream.ops.quantized.triton.gemm import PROGRAMS
from slipstream.ops.quantized.triton.stream_kernel import SLICE

MEMORY = 195 << 10  # bytes of shared memory for the pipelines of all programs on a multiprocessor


class SliceTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per program, gate and up rows together
    warps: int = 4  # each multiplies a slice of 64 bytes of all weight rows
    programs: int = 2  # per multiprocessor


def stream_gemm(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedMatrix,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None = None,
    gate: str = "",
    tile: SliceTile | None = None,
) -> torch.Tensor:
    rows, num_in = x.shape
    num_out = len(weight.values) // 2 if gate else len(weight.values)
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    tile = tile or slice_tile(weight)
    outputs, warps = tile.outputs, tile.warps
    padded = 8 if rows <= 8 else 16
    blocks, row_blocks = triton.cdiv(len(weight.values), outputs), triton.cdiv(rows, padded)
    columns = SLICE.value * (2 if weight.is_4_bit else 1)  # of a slice
    steps = triton.cdiv(num_in // columns, warps)
    split_steps = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, split_steps)
    partials = arrived = None
    if splits > 1:
        num_blocks = blocks * row_blocks
        partials = torch.empty((splits, num_blocks, outputs * padded), dtype=torch.float32, device=x.device)
        arrived = counters(weight.values)
        assert num_blocks <= len(arrived), f"{num_blocks} blocks, but {len(arrived)} counters"
    words = weight.words
    stream_kernel.stream_kernel[(row_blocks, blocks, splits)](
        _describe_inputs(x, columns, warps, padded),
        _describe_inputs(x[:, SLICE.value :], columns, warps, padded) if weight.is_4_bit else None,
        _describe_weight(weight, 2 if gate else 1, outputs, warps),
        weight.scale if words is None else words,
        bias,
        out,
        partials,
        arrived,
        rows,
        num_out,
        steps,
        split_steps,
        0 if words is None else len(words),
        0 if words is None else words.stride(0),
        GATE=GATES[gate],
        SPLITS=splits,
        OUTPUTS=outputs,
        ROWS=padded,
        WARPS=warps,
        STAGES=slice_stages(tile, padded, weight.is_4_bit),
        num_warps=warps,
        maxnreg=slice_registers(tile),
        **dependent(x.device, rows),
    )
    return out


def slice_tile(weight: QuantizedMatrix) -> SliceTile:
    """Measured on an H200 at the shapes of Qwen3-8B with 1 and 16 rows (`benchmarks/ops/quantized.py`): two programs on
    a multiprocessor, and split-k up to about 264 programs."""
    blocks = triton.cdiv(len(weight.values), 64)
    return SliceTile(max(1, min(4, PROGRAMS // blocks)))


def slice_stages(tile: SliceTile, rows: int, is_4_bit: bool) -> int:
    stage = tile.warps * (tile.outputs * SLICE.value + rows * 128 * (2 if is_4_bit else 1))
    return max(1, MEMORY // tile.programs // stage)


def slice_registers(tile: SliceTile) -> int:
    """Per thread. The producer warp counts as four."""
    return min(240, 65536 // (tile.programs * (tile.warps + 4) * 32) // 8 * 8)


def _describe_inputs(x: torch.Tensor, columns: int, warps: int, rows: int) -> Any:
    """64 inputs of each slice: [slices, rows, 64]."""
    num_slices = triton.cdiv(x.shape[1], columns)
    shape, strides = [num_slices, len(x), 64], [columns, x.stride(0), 1]
    return TensorDescriptor(x, shape, strides, [warps, rows, 64], gl.NVMMASharedLayout(128, 16, 3))


def _describe_weight(weight: QuantizedMatrix, parts: int, outputs: int, warps: int) -> Any:
    """[slices, gate and up, outputs of each, 64 bytes]"""
    values = weight.values.view(torch.uint8)
    rows, num_bytes = values.shape
    shape, strides = [num_bytes // SLICE.value, parts, rows // parts, SLICE.value], [SLICE.value, 0, num_bytes, 1]
    strides[1] = rows // parts * num_bytes
    box = [warps, parts, outputs // parts, SLICE.value]
    return TensorDescriptor(values, shape, strides, box, gl.NVMMASharedLayout(64, 8, 4))

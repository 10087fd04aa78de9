"""GEMM with quantised weights: x [rows, in] times the transpose of a `QuantizedMatrix` [out, in].

On a GPU FP8 weights are multiplied by FP8 units with inputs quantised per row, if the checkpoint's method quantises
inputs; other weights are expanded in registers, or in memory for many rows. With few rows Hopper streams them
(`streaming.py`, one row with 4 bits `row.py`; FP8 inputs: `ops/gemm/linear/streaming_hopper.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slipstream.config.memory import MAX_DEQUANTIZED
from slipstream.ops.gemm.linear import gated_linear
from slipstream.ops.gemm.linear.cublaslt import add_fp8_to, adds_fp8
from slipstream.ops.gemm.linear.dispatch import FUSED_ACTIVATIONS, HAS_TRITON, Activation
from slipstream.ops.gemm.linear.tiles import MULTIPROCESSORS, Unnormalized, keeps_wide_programs_busy
from slipstream.ops.gemm.quantized import matrix
from slipstream.ops.gemm.quantized.matrix import (
    MAX_FP8,
    QuantizedExperts,
    QuantizedMatrix,
    dequantize,
    half_of,
    pack_4_bit,
    unpack_4_bit,
    words_of,
)
from slipstream.ops.platform.dispatch import has_hopper_kernels

if TYPE_CHECKING:
    from slipstream.ops.gemm.linear.streaming_hopper import StreamingTile

__all__ = [
    "MAX_FP8",
    "QuantizedExperts",
    "QuantizedMatrix",
    "chains_fp8",
    "chains_parts",
    "dequantize",
    "fp8_linear_add",
    "fp8_linear_quantized",
    "fp8_linear_unnormalized",
    "fp8_parts_add",
    "gated_quantized_linear",
    "half_of",
    "norm_quantized_linear",
    "pack_4_bit",
    "quantizes_gated",
    "quantized_linear",
    "quantized_linear_add",
    "quantized_linear_unnormalized",
    "takes_streaming",
    "supports_kernels",
    "unpack_4_bit",
    "words_of",
]

MAX_STREAMING_ROWS = 16
MAX_FUSED_ROWS = 64  # with more rows torch's FP8 GEMM is faster for most weights, and activations are not fused
MAX_SPLIT_ROWS, MIN_SPLIT_INPUTS = 256, 8192  # of FP8 GEMMs with few outputs, which split-k makes faster than torch's
MAX_FEW_ROWS, MIN_MEDIUM_ROWS = 16, 65  # of chains whose norms add partial sums; in between they were not measured
MAX_GATED_ROWS = 192  # of wide programs with a gated activation; with more rows the pass that quantises computes it
MIN_DEQUANTIZED_ROWS = 65  # from here on a GEMM has no split-k, and takes longer than writing and reading the weight


def supports_kernels(device: torch.device, kind: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether quantised weights of this storage dtype can stay quantised, for activations of `dtype`."""
    if device.type != "cuda" or not HAS_TRITON or dtype not in (torch.bfloat16, torch.float16):
        return False
    needed = (8, 9) if kind is torch.float8_e4m3fn else (8, 0)
    return torch.cuda.get_device_capability(device) >= needed


def takes_streaming(x: torch.Tensor, weight: QuantizedMatrix) -> bool:
    """Whether the kernel that streams weights takes x and the weight."""
    if not (x.is_cuda and x.dtype is torch.bfloat16 and 0 < len(x) <= MAX_STREAMING_ROWS and weight.has_slices):
        return False
    is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and (x.data_ptr() | weight.values.data_ptr()) % 16 == 0
    return is_aligned and weight.values.is_contiguous() and HAS_TRITON and has_hopper_kernels(x.device)


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    input_scale: torch.Tensor | None = None,
    quantizes_inputs: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """activation(x @ weight.T + bias). `quantizes_inputs`: allows GEMMs in FP8; `input_scale`: scale
    of the inputs then, else each row has its own; `batch_invariant`: one kernel for any number of rows."""
    if not x.is_cuda or x.dtype is torch.float64:
        return _activate(matrix.quantized_linear(x, weight, bias), activation)
    from slipstream.ops.gemm.quantized.gemm import BATCH_INVARIANT, quantized_gemm

    if batch_invariant:
        return _activate(quantized_gemm(x, weight, bias, tile=BATCH_INVARIANT), activation)
    if quantizes_inputs and weight.takes_fp8_inputs:
        from slipstream.ops.gemm.quantized.gemm import quantize_rows

        return fp8_linear_quantized(*quantize_rows(x, input_scale), x.dtype, weight, bias, activation)
    if takes_streaming(x, weight):
        from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit

        out = streaming_gemm_low_bit(x, weight, bias, FUSED_ACTIVATIONS.get(activation, ""))
        return out if activation in FUSED_ACTIVATIONS else _activate(out, activation)
    if len(x) >= MIN_DEQUANTIZED_ROWS:
        return _multiply_dequantized(x, weight, bias, activation)
    is_fused = activation in FUSED_ACTIVATIONS and len(x) <= MAX_FUSED_ROWS
    out = quantized_gemm(x, weight, bias, FUSED_ACTIVATIONS[activation] if is_fused else "")
    return out if is_fused else _activate(out, activation)


def _multiply_dequantized(
    x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """The product with the weight in the dtype of x; of a large weight with some rows at a time."""
    from slipstream.ops.gemm.quantized.expand import dequantize as dequantize_on_gpu

    num_out, size = len(weight.values), max(1, MAX_DEQUANTIZED // weight.num_columns)
    if num_out <= size:
        return _multiply_dense(x, dequantize_on_gpu(weight, x.dtype), bias, activation)
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    for first in range(0, num_out, size):
        rows = slice(first, first + size)
        dense = dequantize_on_gpu(weight.rows(first, size), x.dtype)
        out[:, rows] = _multiply_dense(x, dense, None if bias is None else bias[rows], None)
    return _activate(out, activation)


def _multiply_dense(
    x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """The product with a weight that the kernel before has written. GEMMs with PDL may load their weight before that
    kernel is complete, so cuBLAS computes those of few rows."""
    from slipstream.ops.platform.pdl import MAX_TOKENS

    if len(x) <= MAX_TOKENS:
        return _activate(F.linear(x, dense, bias), activation)
    if activation in FUSED_ACTIVATIONS:
        return gated_linear(x, dense, bias, activation)
    return _activate(gated_linear(x, dense, bias, None), activation)


def quantized_linear_add(
    x: torch.Tensor, weight: QuantizedMatrix, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> Unnormalized:
    """residual + x @ weight.T before its RMS norm, for an x that `takes_streaming` accepts."""
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit_add

    return streaming_gemm_low_bit_add(x, weight, residual, norm, eps)


def quantized_linear_unnormalized(
    x: Unnormalized, weight: QuantizedMatrix, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """activation(norm of x @ weight.T + bias), for an x that `takes_streaming` accepts."""
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit

    out = streaming_gemm_low_bit(x, weight, bias, FUSED_ACTIVATIONS.get(activation, ""))
    return out if activation in FUSED_ACTIVATIONS else _activate(out, activation)


def chains_fp8(x: torch.Tensor, weight: QuantizedMatrix) -> bool:
    """Whether `fp8_linear_add` and `fp8_linear_unnormalized` take x and the weight: a single row, which every program
    of the GEMM quantises."""
    return x.is_cuda and len(x) == 1 and x.stride(1) == 1 and _accepts_streaming(x, x.dtype, weight)


def fp8_linear_add(
    x: torch.Tensor, weight: QuantizedMatrix, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> Unnormalized:
    """residual + x @ weight.T with x quantised to FP8, before its RMS norm, for an x that `chains_fp8` accepts."""
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, streaming_gemm_add

    return streaming_gemm_add(x, weight.values, residual, norm, eps, scales=Scales(weight.scale))


def fp8_linear_unnormalized(
    x: Unnormalized, weight: QuantizedMatrix, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """activation(norm of x @ weight.T + bias) with x quantised to FP8, for an x of `fp8_linear_add`."""
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, streaming_gemm

    gate = FUSED_ACTIVATIONS.get(activation, "")
    out = streaming_gemm(x, weight.values, bias, gate, scales=Scales(weight.scale))
    return out if activation in FUSED_ACTIVATIONS else _activate(out, activation)


def chains_parts(x: torch.Tensor, weight: QuantizedMatrix) -> bool:
    """Whether `fp8_parts_add` and `fp8_linear_quantized` are faster than single GEMMs: numbers of rows at which GEMMs
    with few outputs are split, or cuBLASLt adds to the residual."""
    rows = len(x)
    is_split = x.is_cuda and (1 < rows <= MAX_FEW_ROWS or MIN_MEDIUM_ROWS <= rows <= MAX_SPLIT_ROWS)
    is_added = rows > MAX_SPLIT_ROWS and adds_fp8(x, *weight.values.shape)
    return (is_split or is_added) and _accepts_streaming(x, x.dtype, weight) and _accepts_scaled_mm(x.dtype, weight)


def fp8_parts_add(
    x: torch.Tensor,
    activation: Activation | None,
    weight: QuantizedMatrix,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> Unnormalized:
    """residual + x @ weight.T, or of a gated activation of x, and its RMS norm in FP8, for an x that `chains_parts`
    accepts; the sum may be in the memory of the residual. The pass of the norm adds the partial sums of the GEMM; with
    many rows the GEMM adds to the residual itself."""
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, parts_tile, streaming_gemm_parts
    from slipstream.ops.gemm.quantized.gemm import quantize_gated_rows, quantize_normed_rows, quantize_rows

    q, scales = quantize_rows(x) if activation is None else quantize_gated_rows(x, FUSED_ACTIVATIONS[activation])
    if add_fp8_to(residual, q, scales, weight.values, weight.scale):
        return Unnormalized(residual, norm, eps, quantized=quantize_normed_rows(residual, None, norm, eps)[:2])
    tile = parts_tile(len(q), weight.values)
    if tile is None:
        sums = fp8_linear_quantized(q, scales, x.dtype, weight, None, None)
    else:
        sums = streaming_gemm_parts(q, weight.values, tile, Scales(weight.scale, scales))
    quantized, of_quantized, total = quantize_normed_rows(sums, residual, norm, eps)
    return Unnormalized(total, norm, eps, quantized=(quantized, of_quantized))


def norm_quantized_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU, for weights that take FP8 inputs: `quantized_linear` of the RMS norm of x + residual, which one pass
    computes and quantises; and the sum."""
    from slipstream.ops.gemm.quantized.gemm import quantize_normed_rows

    q, scales, total = quantize_normed_rows(x, residual, norm, eps, input_scale)
    return fp8_linear_quantized(q, scales, x.dtype, weight, bias, activation), total


def quantizes_gated(x: torch.Tensor, activation: Activation, weight: QuantizedMatrix) -> bool:
    """Whether `gated_quantized_linear` takes x and is faster than an activation in the GEMM before: with more rows than
    that GEMM fuses one."""
    if not (FUSED_ACTIVATIONS.get(activation) and x.is_cuda and len(x) > MAX_FUSED_ROWS):
        return False
    is_fused = (
        len(x) <= MAX_GATED_ROWS and _is_wide(len(x), 2 * weight.num_columns) and _accepts_streaming(x, x.dtype, weight)
    )
    return not is_fused and x.dtype is not torch.float64 and weight.takes_fp8_inputs


def gated_quantized_linear(
    gate_up: torch.Tensor,
    activation: Activation,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """On a GPU, for weights that take FP8 inputs: `quantized_linear` of the gated activation, which one pass computes
    and quantises."""
    from slipstream.ops.gemm.quantized.gemm import quantize_gated_rows

    q, scales = quantize_gated_rows(gate_up, FUSED_ACTIVATIONS[activation], input_scale)
    return fp8_linear_quantized(q, scales, gate_up.dtype, weight, bias, None)


def fp8_linear_quantized(
    q: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None,
    activation: Activation | None,
) -> torch.Tensor:
    """activation(x @ weight.T + bias) of FP8 rows x, for FP8 weights."""
    if 0 < len(q) <= MAX_FUSED_ROWS and _accepts_streaming(q, dtype, weight):
        from slipstream.ops.gemm.linear.streaming_hopper import Scales, streaming_gemm

        gate = FUSED_ACTIVATIONS.get(activation, "")
        out = streaming_gemm(q, weight.values, bias, gate, scales=Scales(weight.scale, scales))
        return out if activation in FUSED_ACTIVATIONS else _activate(out, activation)
    tile = _medium_tile(len(q), weight) if _accepts_streaming(q, dtype, weight) else None
    if tile is not None:
        from slipstream.ops.gemm.linear.streaming_hopper import WIDE_TILE, Scales, streaming_gemm

        gate = FUSED_ACTIVATIONS.get(activation, "") if tile is WIDE_TILE else ""
        out = streaming_gemm(q, weight.values, bias, gate, tile, Scales(weight.scale, scales))
        return out if gate else _activate(out, activation)
    from slipstream.ops.gemm.quantized.gemm import quantized_gemm

    if len(q) > MAX_FUSED_ROWS and _accepts_scaled_mm(dtype, weight):
        out = torch._scaled_mm(q, weight.values.t(), scales, weight.scale.t(), None, None, dtype, True)
        return _activate(out if bias is None else out.add_(bias), activation)
    is_fused = activation in FUSED_ACTIVATIONS and len(q) <= MAX_FUSED_ROWS
    gate = FUSED_ACTIVATIONS[activation] if is_fused else ""
    out = quantized_gemm(q, weight, bias, gate, x_scale=scales, dtype=dtype)
    return out if is_fused else _activate(out, activation)


def _medium_tile(rows: int, weight: QuantizedMatrix) -> StreamingTile | None:
    """The tile of a GEMM of 65 to 256 rows that is faster than torch's: tiles of 128 x 128 results leave half of the
    multiprocessors idle and sums are long enough to divide, or one wave of tiles keeps most of them busy."""
    from slipstream.ops.gemm.linear.streaming_hopper import MEDIUM_TILE, NARROW_TILE, SPLIT_TILE, WIDE_TILE

    if not MAX_FUSED_ROWS < rows <= MAX_SPLIT_ROWS:
        return None
    if _is_wide(rows, len(weight.values)):
        return WIDE_TILE
    tiles = -(-len(weight.values) // 128) * -(-rows // 128)
    if weight.num_columns >= MIN_SPLIT_INPUTS and 2 * tiles <= MULTIPROCESSORS:
        return SPLIT_TILE
    tile = MEDIUM_TILE if rows > NARROW_TILE.rows else NARROW_TILE
    programs = -(-len(weight.values) // (tile.outputs * tile.groups)) * -(-rows // tile.rows)
    is_busy = 2 * MULTIPROCESSORS < 3 * programs <= 3 * MULTIPROCESSORS
    return tile if rows >= MIN_MEDIUM_ROWS and is_busy else None


def _is_wide(rows: int, num_out: int) -> bool:
    """Whether programs of 192 outputs and all rows are faster than torch's, which read x from the L2 cache more often;
    they fuse a gated activation too."""
    return MIN_MEDIUM_ROWS <= rows <= MAX_SPLIT_ROWS and keeps_wide_programs_busy(num_out)


def _accepts_streaming(q: torch.Tensor, dtype: torch.dtype, weight: QuantizedMatrix) -> bool:
    """Whether Hopper streams FP8 weights with a scale per row: TMA loads rows of a multiple of 16 bytes."""
    return (
        dtype is torch.bfloat16
        and weight.scale.shape[1] == 1
        and weight.scale.is_contiguous()
        and weight.num_columns % 16 == 0
        and weight.values.is_contiguous()
        and (q.data_ptr() | weight.values.data_ptr()) % 16 == 0
        and has_hopper_kernels(q.device)
    )


def _accepts_scaled_mm(dtype: torch.dtype, weight: QuantizedMatrix) -> bool:
    values = weight.values
    return (
        weight.scale.shape[1] == 1
        and dtype is torch.bfloat16  # the only output dtype of scales per row
        and values.shape[0] % 16 == 0
        and values.shape[1] % 16 == 0
    )


def _activate(out: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    return out if activation is None else activation(out)

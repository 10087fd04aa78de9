"""The kernels of a `QuantizedMatrix` in order of preference: rows of the table of GEMMs (`ops/gemm/table.py`).

On a GPU FP8 weights are multiplied by FP8 units with inputs quantised per row, if the checkpoint's method quantises
inputs; other weights are expanded in registers, or in memory for many rows. With few rows Hopper streams them
(`streaming.py`, one row with 4 bits `row.py`; FP8 inputs: `ops/gemm/linear/streaming_hopper.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slipstream.config.memory import MAX_DEQUANTIZED
from slipstream.ops.gemm.chains import Chain, Fp8Rows, Unnormalized
from slipstream.ops.gemm.description import (
    FUSED_ACTIVATIONS,
    Activation,
    Gemm,
    GemmKernel,
    Normed,
    activated,
    choose,
    given,
)
from slipstream.ops.gemm.linear.cublaslt import add_fp8_to, adds_fp8
from slipstream.ops.gemm.linear.dispatch import CUDA_KERNELS, HAS_TRITON, finishes_norm
from slipstream.ops.gemm.linear.tiles import MULTIPROCESSORS, keeps_wide_programs_busy
from slipstream.ops.gemm.quantized import matrix
from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix
from slipstream.ops.platform.dispatch import has_hopper_kernels

if TYPE_CHECKING:
    from slipstream.ops.gemm.linear.streaming_hopper import StreamingTile

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


def takes_gate(x: torch.Tensor, activation: Activation, weight: QuantizedMatrix) -> bool:
    """Whether a gated activation is faster before this GEMM, in the pass that quantises, than in the GEMM before, whose
    input is x: with more rows than that GEMM fuses one."""
    if not (FUSED_ACTIVATIONS.get(activation) and x.is_cuda and len(x) > MAX_FUSED_ROWS):
        return False
    is_fused = (
        len(x) <= MAX_GATED_ROWS
        and _is_wide(len(x), 2 * weight.num_columns)
        and accepts_streaming_fp8(x, x.dtype, weight)
    )
    return not is_fused and x.dtype is not torch.float64 and weight.has_fp8_gemm


def chains_of(x: torch.Tensor, weight: QuantizedMatrix) -> tuple[Chain, ...]:
    """The kinds of chain that are faster than single GEMMs for this number of rows. A chain of several FP8 rows cannot
    be streamed."""
    if not weight.can_chain:
        return ()
    if not weight.chains_fp8:
        return ("streaming",) if accepts_streaming(x, weight) else ()
    if _chains_parts(x, weight):
        return ("library",)
    # a single row, which every program quantises
    is_row = x.is_cuda and len(x) == 1 and x.stride(1) == 1 and accepts_streaming_fp8(x, x.dtype, weight)
    return ("streaming",) if is_row else ()


def _chains_parts(x: torch.Tensor, weight: QuantizedMatrix) -> bool:
    """Whether `_add_fp8_parts` is faster than single GEMMs: numbers of rows at which GEMMs with few outputs are split,
    or cuBLASLt adds to the residual."""
    rows = len(x)
    is_split = x.is_cuda and (1 < rows <= MAX_FEW_ROWS or MIN_MEDIUM_ROWS <= rows <= MAX_SPLIT_ROWS)
    is_added = rows > MAX_SPLIT_ROWS and adds_fp8(x, *weight.values.shape)
    return (is_split or is_added) and accepts_streaming_fp8(x, x.dtype, weight) and _accepts_scaled_mm(x.dtype, weight)


def accepts_streaming(x: torch.Tensor, weight: QuantizedMatrix) -> bool:
    """Whether the kernel that streams weights and expands them takes x and the weight."""
    if not (x.is_cuda and x.dtype is torch.bfloat16 and 0 < len(x) <= MAX_STREAMING_ROWS and weight.has_slices):
        return False
    is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and (x.data_ptr() | weight.values.data_ptr()) % 16 == 0
    return is_aligned and weight.values.is_contiguous() and HAS_TRITON and has_hopper_kernels(x.device)


def accepts_streaming_fp8(q: torch.Tensor, dtype: torch.dtype, weight: QuantizedMatrix) -> bool:
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


# Inputs in FP8.


def _quantized(x: torch.Tensor, gate: Activation | None, weight: QuantizedMatrix) -> Fp8Rows:
    """x, or its gated activation, by one pass."""
    from slipstream.ops.gemm.quantized.gemm import quantize_gated_rows, quantize_rows

    if gate is None:
        return Fp8Rows(*quantize_rows(x, weight.input_scale), x.dtype)
    return Fp8Rows(*quantize_gated_rows(x, FUSED_ACTIVATIONS[gate], weight.input_scale), x.dtype)


def _quantized_norm(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[Fp8Rows, torch.Tensor]:
    """The RMS norm of x + residual by one pass, and that sum. x may be partial sums."""
    from slipstream.ops.gemm.quantized.gemm import quantize_normed_rows

    q, scales, total = quantize_normed_rows(x, residual, norm, eps, scale)
    return Fp8Rows(q, scales, total.dtype), total


def multiply_fp8(gemm: Gemm) -> torch.Tensor:
    """Of an x that is quantised."""
    if gemm.activation not in FUSED_ACTIVATIONS:
        return activated(multiply_fp8(gemm._replace(activation=None)), gemm.activation)
    return choose(FP8_KERNELS, gemm).launch(gemm)  # type: ignore[no-any-return]


def _streaming_fp8(gemm: Gemm) -> torch.Tensor:
    """x may be one row that is not quantised."""
    from slipstream.ops.gemm.linear.streaming_hopper import WIDE_TILE, Scales, streaming_gemm

    x, weight, tile = gemm.x, gemm.weight, None
    scales = Scales(weight.scale)
    if isinstance(x, Fp8Rows):
        x, scales, tile = x.values, Scales(weight.scale, x.scales), _medium_tile(len(x.values), weight)
    is_fused = tile is None or tile is WIDE_TILE
    gate = FUSED_ACTIVATIONS[gemm.activation] if is_fused else ""
    out = streaming_gemm(x, weight.values, gemm.bias, gate, tile, scales)
    return out if is_fused else activated(out, gemm.activation)


def _multiply_scaled(gemm: Gemm) -> torch.Tensor:
    (q, scales, dtype), weight, bias = gemm[:3]
    out = torch._scaled_mm(q, weight.values.t(), scales, weight.scale.t(), None, None, dtype, True)
    return activated(out if bias is None else out.add_(bias), gemm.activation)


def _multiply(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.quantized.gemm import quantized_gemm

    x, scales, dtype = gemm.x if isinstance(gemm.x, Fp8Rows) else (gemm.x, None, None)
    gate = FUSED_ACTIVATIONS[gemm.activation] if len(x) <= MAX_FUSED_ROWS else ""
    out = quantized_gemm(x, gemm.weight, gemm.bias, gate, x_scale=scales, dtype=dtype)
    return out if gate else activated(out, gemm.activation)


def _takes_fp8_rows(gemm: Gemm) -> bool:
    q, weight = gemm.x.values, gemm.weight
    if not len(q) or not accepts_streaming_fp8(q, gemm.x.dtype, weight):
        return False
    return len(q) <= MAX_FUSED_ROWS or _medium_tile(len(q), weight) is not None


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


FP8_KERNELS = (
    GemmKernel("streaming_hopper", _takes_fp8_rows, _streaming_fp8),
    GemmKernel(
        "scaled_mm",
        lambda gemm: len(gemm.x.values) > MAX_FUSED_ROWS and _accepts_scaled_mm(gemm.x.dtype, gemm.weight),
        _multiply_scaled,
    ),
    GemmKernel("quantized_gemm", lambda gemm: True, _multiply),
)


# Other inputs.


def _multiply_invariant(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.quantized.gemm import BATCH_INVARIANT, quantized_gemm

    return activated(quantized_gemm(gemm.x, gemm.weight, gemm.bias, tile=BATCH_INVARIANT), gemm.activation)


def _streaming_low_bit(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit

    return streaming_gemm_low_bit(gemm.x, gemm.weight, gemm.bias, FUSED_ACTIVATIONS[gemm.activation])


def _multiply_dequantized(gemm: Gemm) -> torch.Tensor:
    """The product with the weight in the dtype of x; of a large weight with some rows at a time."""
    from slipstream.ops.gemm.quantized.expand import dequantize

    x, weight, bias = gemm[:3]
    num_out, size = len(weight.values), max(1, MAX_DEQUANTIZED // weight.num_columns)
    if num_out <= size:
        return _multiply_dense(gemm._replace(weight=dequantize(weight, x.dtype)))
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    for first in range(0, num_out, size):
        rows = slice(first, first + size)
        dense = dequantize(weight.rows(first, size), x.dtype)
        out[:, rows] = _multiply_dense(Gemm(x, dense, None if bias is None else bias[rows]))
    return activated(out, gemm.activation)


def _multiply_dense(gemm: Gemm) -> torch.Tensor:
    """The product with a weight that the kernel before has written. GEMMs with PDL may load their weight before that
    kernel is complete, so cuBLAS computes those of few rows."""
    from slipstream.ops.platform.pdl import MAX_TOKENS

    if len(gemm.x) <= MAX_TOKENS:
        return activated(F.linear(*gemm[:3]), gemm.activation)
    return choose(CUDA_KERNELS, gemm).launch(gemm)  # type: ignore[no-any-return]


KERNELS = (
    GemmKernel(
        "reference",
        lambda gemm: not gemm.x.is_cuda or gemm.x.dtype is torch.float64,
        lambda gemm: activated(matrix.quantized_linear(*gemm[:3]), gemm.activation),
    ),
    GemmKernel("batch invariant", lambda gemm: gemm.weight.batch_invariant, _multiply_invariant),
    GemmKernel(
        "FP8 inputs",
        lambda gemm: gemm.weight.has_fp8_gemm,
        lambda gemm: multiply_fp8(gemm._replace(x=_quantized(gemm.x, None, gemm.weight))),
    ),
    GemmKernel("streaming_hopper", lambda gemm: accepts_streaming(gemm.x, gemm.weight), _streaming_low_bit),
    GemmKernel("dequantised", lambda gemm: len(gemm.x) >= MIN_DEQUANTIZED_ROWS, _multiply_dequantized),
    GemmKernel("quantized_gemm", lambda gemm: True, _multiply),
)


# With a norm or a gate before, and in chains.


def _multiply_norm(gemm: Gemm) -> Normed:
    norm, weight = given(gemm.norm), gemm.weight
    q, total = _quantized_norm(gemm.x, norm.residual, norm.weight, norm.eps, weight.input_scale)
    return Normed(multiply_fp8(gemm._replace(x=q, norm=None)), total)


def _multiply_gated(gemm: Gemm) -> torch.Tensor:
    return multiply_fp8(gemm._replace(x=_quantized(gemm.x, gemm.gate, gemm.weight), gate=None))


def _add_low_bit(gemm: Gemm) -> Unnormalized:
    from slipstream.ops.gemm.quantized.streaming import streaming_gemm_low_bit_add

    residual, norm, eps, _ = given(gemm.add)
    return streaming_gemm_low_bit_add(gemm.x, gemm.weight, residual, norm, eps)


def _add_fp8_row(gemm: Gemm) -> Unnormalized:
    """x is quantised by the kernel."""
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, streaming_gemm_add

    residual, norm, eps, _ = given(gemm.add)
    return streaming_gemm_add(gemm.x, gemm.weight.values, residual, norm, eps, scales=Scales(gemm.weight.scale))


def _add_fp8_parts(gemm: Gemm) -> Unnormalized:
    """With the RMS norm of the sum in FP8. The pass of the norm adds the partial sums of the GEMM; with many rows the
    GEMM adds to the residual itself."""
    from slipstream.ops.gemm.linear.streaming_hopper import Scales, parts_tile, streaming_gemm_parts

    weight, (residual, norm, eps, _) = gemm.weight, given(gemm.add)
    x = _quantized(gemm.x, gemm.gate, weight)
    if add_fp8_to(residual, x.values, x.scales, weight.values, weight.scale):
        return Unnormalized(residual, norm, eps, quantized=_quantized_norm(residual, None, norm, eps)[0])
    tile = parts_tile(len(x.values), weight.values)
    if tile is None:
        sums = multiply_fp8(Gemm(x, weight))
    else:
        sums = streaming_gemm_parts(x.values, weight.values, tile, Scales(weight.scale, x.scales))
    quantized, total = _quantized_norm(sums, residual, norm, eps)
    return Unnormalized(total, norm, eps, quantized=quantized)


NORM_KERNELS = (
    GemmKernel(
        "FP8 inputs",
        lambda gemm: gemm.x.is_cuda and gemm.weight.has_fp8_gemm and not given(gemm.norm).is_kept,
        _multiply_norm,
    ),
)
GATE_KERNELS = (
    GemmKernel(
        "FP8 inputs",
        lambda gemm: gemm.x.is_cuda and gemm.weight.has_fp8_gemm and bool(FUSED_ACTIVATIONS.get(gemm.gate)),
        _multiply_gated,
    ),
)
ADD_KERNELS = (
    GemmKernel("FP8 row", lambda gemm: given(gemm.add).chain == "streaming" and gemm.weight.chains_fp8, _add_fp8_row),
    GemmKernel("streaming_hopper", lambda gemm: given(gemm.add).chain == "streaming", _add_low_bit),
    GemmKernel("FP8 inputs", lambda gemm: gemm.x.is_cuda and gemm.weight.chains_fp8, _add_fp8_parts),
)
UNFINISHED_KERNELS = (
    GemmKernel("FP8 row", lambda gemm: finishes_norm(gemm) and gemm.weight.chains_fp8, _streaming_fp8),
    GemmKernel("streaming_hopper", finishes_norm, _streaming_low_bit),
    GemmKernel("FP8 inputs", lambda gemm: isinstance(gemm.x, Fp8Rows), multiply_fp8),
    GemmKernel(
        "FP8 norm",
        lambda gemm: isinstance(gemm.x, Unnormalized) and gemm.x.quantized is not None,
        lambda gemm: multiply_fp8(gemm._replace(x=gemm.x.quantized)),
    ),
)

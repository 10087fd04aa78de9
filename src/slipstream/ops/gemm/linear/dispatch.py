"""The kernels of float weights in order of preference: rows of the table of GEMMs (`ops/gemm/table.py`).

With few rows a GEMM is limited by the time to read the weight. Our kernels read the weight faster than cuBLAS at the
sizes below; cuBLAS computes the others. The limits were measured on an H200 with `benchmarks/ops/linear.py` (single
GEMMs) and `benchmarks/ops/layer.py` (chains). The condition of a kernel reads sizes, strides and addresses, never a
value on the device. The first launch of a Triton kernel imports triton.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import relu2, sum_rms_norm
from slipstream.ops.gemm.chains import Chain, Unnormalized
from slipstream.ops.gemm.description import FUSED_ACTIVATIONS, Gemm, GemmKernel, Normed, activated, choose, given
from slipstream.ops.gemm.linear import cublaslt, tiles
from slipstream.ops.gemm.linear.tiles import (
    MAX_WIDE_PLAIN_ROWS,
    SMALL_WEIGHT,
    fills_wide_programs,
    narrow_splits,
    supports_tma,
)
from slipstream.ops.gemm.lora import finish_lora, finish_lora_add
from slipstream.ops.gemm.lora.reference import has_paired_blocks

MAX_GEMV_ROWS = 2  # more rows need the tensor cores
MIN_STREAMING_PAIR_INPUTS = 4096  # from which two rows of a large weight need them too
MAX_GEMV_NORM_INPUTS = 2048  # each program normalizes the rows again, which costs too much for longer rows
MAX_KEPT_ROWS = 16
MAX_KEPT_OUTPUTS = 256
MAX_SKINNY_ROWS = 16
MAX_STREAMING_ROWS = 64
MAX_STREAMING_ROWS_OF_LARGE_WEIGHT = 32  # with more rows a program reads as many bytes of x as of the weight
MAX_CHAINED_ROWS = 256  # a chain also saves the norms and the reads and writes between GEMMs
MAX_CHAINED_ROWS_OF_LARGE_WEIGHT = 64
MIN_ROWS_PER_ADAPTER_ROW = 8  # of a weight; with fewer, products with A apart read less
MAX_UNSPLIT_ROWS = 48  # with more, partial sums that the norm adds are faster than a norm fused into the GEMMs

HAS_TRITON = importlib.util.find_spec("triton") is not None


def chains_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[Chain, ...]:
    """The kinds of chain for an x of this many rows, the fastest first; none if single GEMMs are faster."""
    if not x.is_cuda or x.element_size() != 2:
        return ()
    rows = len(x)
    if _chains_streaming(x, weight):
        has_kernels = narrow_splits(rows, *weight.shape) > 0 or fills_wide_programs(rows, *weight.shape)
        return ("library", "streaming") if rows > MAX_UNSPLIT_ROWS and has_kernels else ("streaming",)
    return ("library",) if rows > MAX_STREAMING_ROWS else ()


def _chains_streaming(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the weight may be part of a streamed chain for an x of this many rows on CUDA. A single GEMM of two rows
    of a small weight is a GEMV, which may compute the norm; a chain of them is faster with the norms inside."""
    is_small = weight.shape[0] * weight.shape[1] <= SMALL_WEIGHT
    return (
        HAS_TRITON
        and x.dtype is torch.bfloat16
        and (1 if is_small else _max_gemv_rows(x, weight)) < len(x) <= MAX_CHAINED_ROWS
        and _streaming_is_faster(x, weight, MAX_CHAINED_ROWS_OF_LARGE_WEIGHT)
    )


def _accepts_gemv(gemm: Gemm) -> bool:
    return 0 < len(gemm.x) <= _max_gemv_rows(gemm.x, gemm.weight) and _has_fused_epilogue(gemm)


def _max_gemv_rows(x: torch.Tensor, weight: torch.Tensor) -> int:
    is_large = weight.shape[0] * weight.shape[1] > SMALL_WEIGHT and weight.shape[1] >= MIN_STREAMING_PAIR_INPUTS
    return 1 if is_large and x.element_size() == 2 and HAS_TRITON and supports_tma(x, weight) else MAX_GEMV_ROWS


def _accepts_norm(gemm: Gemm) -> bool:
    """Whether gemv computes the RMS norm of x too. If it stores the norm of several rows, each has programs of its own,
    which all read the weight, so it must be small: the router of experts."""
    if not gemm.x.is_cuda or gemm.x.shape[1] > MAX_GEMV_NORM_INPUTS:
        return False
    is_small = 0 < len(gemm.x) <= MAX_KEPT_ROWS and len(gemm.weight) <= MAX_KEPT_OUTPUTS
    return (given(gemm.norm).is_kept and is_small and _has_fused_epilogue(gemm)) or _accepts_gemv(gemm)


def _accepts_streaming_hopper(gemm: Gemm) -> bool:
    rows, shape = len(gemm.x), gemm.weight.shape
    is_wide = fills_wide_programs(rows, *shape) and (gemm.activation is not None or rows <= MAX_WIDE_PLAIN_ROWS)
    if is_wide or (gemm.activation is None and narrow_splits(rows, *shape) == 1):
        return _has_fused_epilogue(gemm) and supports_tma(gemm.x, gemm.weight)
    return (
        0 < len(gemm.x) <= MAX_STREAMING_ROWS
        and _has_fused_epilogue(gemm)
        and _streaming_is_faster(gemm.x, gemm.weight, MAX_STREAMING_ROWS_OF_LARGE_WEIGHT)
    )


def _accepts_skinny_mma(gemm: Gemm) -> bool:
    return (
        0 < len(gemm.x) <= MAX_SKINNY_ROWS
        and gemm.weight.shape[0] * gemm.weight.shape[1] <= SMALL_WEIGHT
        and _has_fused_epilogue(gemm)
    )


def _accepts_gated_gemm_hopper(gemm: Gemm) -> bool:
    return (
        len(gemm.x) >= cublaslt.MIN_ROWS
        and gemm.bias is None
        and bool(FUSED_ACTIVATIONS.get(gemm.activation))
        and gemm.x.dtype is torch.bfloat16
        and HAS_TRITON
        and len(gemm.weight) % 16 == 0  # TMA stores the output: rows of a multiple of 16 bytes
        and supports_tma(gemm.x, gemm.weight)
    )


def _accepts_elementwise_hopper(gemm: Gemm) -> bool:
    """gelu with a bias, or relu2 without."""
    is_fused = gemm.bias is not None if gemm.activation is F.gelu else gemm.activation is relu2 and gemm.bias is None
    if (
        not is_fused
        or len(gemm.x) < cublaslt.MIN_ROWS
        or not (gemm.x.is_cuda and HAS_TRITON and supports_tma(gemm.x, gemm.weight))
    ):
        return False
    from slipstream.ops.gemm.linear.gated_gemm_hopper import can_fuse_elementwise

    return can_fuse_elementwise(gemm.x, gemm.weight, gemm.bias)


def _accepts_cublaslt_tuned(gemm: Gemm) -> bool:
    return gemm.bias is None and cublaslt.is_tuned(gemm.x, gemm.weight)


def _has_fused_epilogue(gemm: Gemm) -> bool:
    return gemm.x.element_size() == 2 and HAS_TRITON and gemm.activation in FUSED_ACTIVATIONS


def _streaming_is_faster(x: torch.Tensor, weight: torch.Tensor, max_rows_of_large_weight: int) -> bool:
    """Whether the Hopper kernel for few rows can take the operands and is faster than cuBLAS."""
    if not supports_tma(x, weight):
        return False
    if len(x) > max_rows_of_large_weight:
        return weight.shape[0] * weight.shape[1] <= SMALL_WEIGHT
    # a short sum for very many outputs (an LM head of a small model) leaves too little work per program
    return len(weight) < 32768 or weight.shape[1] >= 2048


def _gemv(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.linear.triton import gemv

    return gemv(gemm.x, gemm.weight, gemm.bias, gate=FUSED_ACTIVATIONS[gemm.activation])


def _streaming_hopper(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm

    return streaming_gemm(gemm.x, gemm.weight, gemm.bias, FUSED_ACTIVATIONS[gemm.activation], added=gemm.added)


def _skinny_mma(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.linear.triton import skinny_mma

    return skinny_mma(gemm.x, gemm.weight, gemm.bias, FUSED_ACTIVATIONS[gemm.activation])


def _gated_gemm_hopper(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gated_gemm

    return gated_gemm(gemm.x, gemm.weight, FUSED_ACTIVATIONS[gemm.activation])


def _elementwise_hopper(gemm: Gemm) -> torch.Tensor:
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gelu_gemm, relu2_gemm

    return relu2_gemm(gemm.x, gemm.weight) if gemm.bias is None else gelu_gemm(gemm.x, gemm.weight, gemm.bias)


def _cublaslt_tuned(gemm: Gemm) -> torch.Tensor:
    out = cublaslt.multiply(gemm.x, gemm.weight)
    assert out is not None, "multiply returned None for a call that is_tuned accepted"
    return activated(out, gemm.activation)


ELEMENTWISE_HOPPER = GemmKernel("elementwise_hopper", _accepts_elementwise_hopper, _elementwise_hopper)
LIBRARY = GemmKernel("library", lambda gemm: True, lambda gemm: activated(F.linear(*gemm[:3]), gemm.activation))

CUDA_KERNELS = (  # of what `FUSED_ACTIVATIONS` has
    GemmKernel("gemv", _accepts_gemv, _gemv),
    GemmKernel("streaming_hopper", _accepts_streaming_hopper, _streaming_hopper),
    GemmKernel("skinny_mma", _accepts_skinny_mma, _skinny_mma),
    GemmKernel("gated_gemm_hopper", _accepts_gated_gemm_hopper, _gated_gemm_hopper),
    GemmKernel("cublaslt_tuned", _accepts_cublaslt_tuned, _cublaslt_tuned),
    LIBRARY,
)
CPU_KERNELS = (  # without an activation
    GemmKernel(
        "native", lambda gemm: tiles.native_accepts(gemm.x, gemm.weight), lambda gemm: tiles.skinny_gemm(*gemm[:3])
    ),
    GemmKernel("tiles", lambda gemm: tiles.accepts(gemm.x, gemm.weight), lambda gemm: tiles.tile_gemm(*gemm[:3])),
    GemmKernel("widened", lambda gemm: gemm.weight.dtype is not gemm.x.dtype, lambda gemm: tiles.widened(*gemm[:3])),
    LIBRARY,
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    gemm = Gemm(x, weight, bias)
    return choose(CUDA_KERNELS if x.is_cuda else CPU_KERNELS, gemm).launch(gemm)


def _gemv_of_norm(gemm: Gemm) -> Normed:
    from slipstream.ops.gemm.linear.triton import Norm, gemv

    x, norm = gemm.x, given(gemm.norm)
    total = None if norm.residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm.is_kept else None
    rows = Norm(norm.weight, norm.eps, norm.residual, total, normed)
    out = gemv(x, gemm.weight, gemm.bias, rows, FUSED_ACTIVATIONS[gemm.activation])
    return Normed(out, x if total is None else total, normed)


NORM_KERNELS = (GemmKernel("gemv", _accepts_norm, _gemv_of_norm),)


# GEMMs of chains.


def _accepts_parts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a GEMM that adds to a residual leaves partial sums to the norm after it."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and narrow_splits(len(x), *weight.shape) > 1
        and supports_tma(x, weight)
    )


def finishes_norm(gemm: Gemm) -> bool:
    """Whether the GEMM before left the norm of x to this one."""
    return isinstance(gemm.x, Unnormalized) and gemm.x.squares is not None


def _add_streaming(gemm: Gemm) -> Unnormalized:
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm_add

    residual, norm, eps, _ = given(gemm.add)
    return streaming_gemm_add(gemm.x, gemm.weight, residual, norm, eps)


def _add_parts(gemm: Gemm) -> Unnormalized:
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm_parts

    residual, norm, eps, _ = given(gemm.add)
    normed, total = sum_rms_norm(streaming_gemm_parts(gemm.x, gemm.weight), residual, norm, eps)
    return Unnormalized(total, norm, eps, normed=normed)


def _add_in_place(gemm: Gemm) -> Unnormalized:
    residual, norm, eps, _ = given(gemm.add)
    if not cublaslt.add_to(residual, gemm.x, gemm.weight):
        residual.addmm_(gemm.x, gemm.weight.t())
    return Unnormalized(residual, norm, eps)


ADD_KERNELS = (
    GemmKernel("streaming_hopper", lambda gemm: given(gemm.add).chain == "streaming", _add_streaming),
    GemmKernel("partial sums", lambda gemm: _accepts_parts(gemm.x, gemm.weight), _add_parts),
    GemmKernel("library", lambda gemm: True, _add_in_place),
)
UNFINISHED_KERNELS = (GemmKernel("streaming_hopper", finishes_norm, _streaming_hopper),)


# A streamed GEMM with adapters: the matrices A of all slots count as rows of the weight.


def _appends(gemm: Gemm) -> bool:
    """Whether one GEMM multiplies an x of a streamed chain, or its norm, with the weight and with all matrices A, of
    which there may be few."""
    if gemm.norm is not None or gemm.gate is not None:
        return False
    if gemm.add is not None:
        rows = gemm.x if gemm.add.chain == "streaming" else None
    else:
        rows = gemm.x.weighted if finishes_norm(gemm) and _finishes(gemm) else None
    if rows is None:
        return False
    weight, adapters = gemm.weight, given(gemm.adapters).weights.a
    if MIN_ROWS_PER_ADAPTER_ROW * adapters.shape[0] * adapters.shape[1] > len(weight):
        return False
    if not rows.is_cuda or not _chains_streaming(rows, weight):
        return False
    from slipstream.ops.gemm.linear.streaming_hopper import can_append, streaming_tile

    num_out, num_in = weight.shape
    return can_append(streaming_tile(len(rows), num_out, num_in, ""), weight, adapters)


def _finishes(gemm: Gemm) -> bool:
    """Whether `finish_lora` computes what follows the product."""
    is_plain = gemm.bias is None and gemm.activation in FUSED_ACTIVATIONS
    return is_plain and (gemm.activation is None or has_paired_blocks(given(gemm.adapters).weights.runs))


def multiply_appended(x: torch.Tensor | Unnormalized, weight: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
    """[rows, out + slots * rows of a slot]: the GEMM of x, or of its RMS norm, then the products with all adapters."""
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm

    return streaming_gemm(x, weight, None, "", adapters=adapters)


def _append(gemm: Gemm) -> torch.Tensor | Unnormalized:
    lora, tiles = given(gemm.adapters)
    sums = multiply_appended(gemm.x, gemm.weight, lora.a)
    if gemm.add is not None:
        return finish_lora_add(sums, lora, tiles, *gemm.add[:3])
    return finish_lora(sums, lora, tiles, FUSED_ACTIVATIONS[gemm.activation])


ADAPTER_KERNELS = (GemmKernel("streaming_hopper", _appends, _append),)


def reserve_counters(device: torch.device) -> None:
    """Allocates the split-k counters of all weights on a CUDA device, for kernels that need them."""
    if device.type == "cuda" and HAS_TRITON:
        from slipstream.ops.gemm.linear import epilogue

        epilogue.reserve_counters(device)

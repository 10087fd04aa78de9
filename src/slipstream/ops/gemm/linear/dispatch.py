"""Dispatch table of `linear`: the kernels in order of preference. The first kernel that accepts a call runs it.

With few rows a GEMM is limited by the time to read the weight. Our kernels read the weight faster than cuBLAS at the
sizes below; cuBLAS computes the others. The limits were measured on an H200 with `benchmarks/ops/linear.py` (single
GEMMs) and `benchmarks/ops/layer.py` (chains). The condition of a kernel reads sizes, strides and addresses, never a
value on the device. The first launch of a Triton kernel imports triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import gelu_tanh_and_mul, relu2, silu_and_mul
from slipstream.ops.gemm.linear import cublaslt, tiles
from slipstream.ops.gemm.linear import tiles as native
from slipstream.ops.gemm.linear import tiles as reference
from slipstream.ops.gemm.linear.tiles import (
    MAX_WIDE_PLAIN_ROWS,
    SMALL_WEIGHT,
    Chain,
    fills_wide_programs,
    narrow_splits,
    supports_tma,
)

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise, [rows, out] to [rows, out]; or gated, [rows, gate columns then up columns] to half as many columns."""

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
MAX_UNSPLIT_ROWS = 48  # with more, partial sums that the norm adds are faster than a norm fused into the GEMMs

FUSED_ACTIVATIONS: dict[Activation | None, str] = {None: "", silu_and_mul: "silu", gelu_tanh_and_mul: "gelu_tanh"}
"""What the epilogues of gemv, skinny_mma and streaming_hopper compute, by the name that the kernels know."""

HAS_TRITON = importlib.util.find_spec("triton") is not None


class GemmCall(NamedTuple):
    """activation(x @ weight.T + bias)"""

    x: torch.Tensor  # [rows, in]
    weight: torch.Tensor  # [out, in]; for a gated activation the gate rows, then the up rows
    bias: torch.Tensor | None  # [out]
    activation: Activation | None


class GemmKernel(NamedTuple):
    name: str
    accepts: Callable[[GemmCall], bool]
    launch: Callable[[GemmCall], torch.Tensor]


def choose(call: GemmCall) -> GemmKernel:
    """The kernel for a call without an activation or with a gated one."""
    for kernel in CUDA_KERNELS if call.x.is_cuda else CPU_KERNELS:
        if kernel.accepts(call):
            return kernel
    raise AssertionError("the last kernel of a table accepts every call")


def accepts_norm(call: GemmCall) -> bool:
    """Whether gemv computes the RMS norm of x too."""
    return call.x.is_cuda and _accepts_gemv(call) and call.x.shape[1] <= MAX_GEMV_NORM_INPUTS


def accepts_kept_norm(call: GemmCall) -> bool:
    """Whether gemv computes the RMS norm of x too and stores it. With several rows each has programs of its own, which
    all read the weight, so it must be small: the router of experts."""
    if not call.x.is_cuda or call.x.shape[1] > MAX_GEMV_NORM_INPUTS or not _has_fused_epilogue(call):
        return False
    is_small = 0 < len(call.x) <= MAX_KEPT_ROWS and len(call.weight) <= MAX_KEPT_OUTPUTS
    return is_small or _accepts_gemv(call)


def choose_chain(x: torch.Tensor, weight: torch.Tensor) -> Chain:
    """The fastest kind of chain for a weight and an x of this many rows; "" if single GEMMs are faster."""
    if not x.is_cuda or x.element_size() != 2:
        return ""
    rows = len(x)
    if takes_streaming(x, weight):
        has_kernels = narrow_splits(rows, *weight.shape) > 0 or fills_wide_programs(rows, *weight.shape)
        return "library" if rows > MAX_UNSPLIT_ROWS and has_kernels else "streaming"
    return "library" if rows > MAX_STREAMING_ROWS else ""


def takes_streaming(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the weight may be part of a streamed chain for an x of this many rows on CUDA. A single GEMM of two rows
    of a small weight is a GEMV, which may compute the norm; a chain of them is faster with the norms inside."""
    is_small = weight.shape[0] * weight.shape[1] <= SMALL_WEIGHT
    return (
        HAS_TRITON
        and x.dtype is torch.bfloat16
        and (1 if is_small else _max_gemv_rows(x, weight)) < len(x) <= MAX_CHAINED_ROWS
        and _streaming_is_faster(x, weight, MAX_CHAINED_ROWS_OF_LARGE_WEIGHT)
    )


def accepts_parts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a GEMM that adds to a residual leaves partial sums to the norm after it."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and narrow_splits(len(x), *weight.shape) > 1
        and supports_tma(x, weight)
    )


def _accepts_gemv(call: GemmCall) -> bool:
    return 0 < len(call.x) <= _max_gemv_rows(call.x, call.weight) and _has_fused_epilogue(call)


def _max_gemv_rows(x: torch.Tensor, weight: torch.Tensor) -> int:
    is_large = weight.shape[0] * weight.shape[1] > SMALL_WEIGHT and weight.shape[1] >= MIN_STREAMING_PAIR_INPUTS
    return 1 if is_large and x.element_size() == 2 and HAS_TRITON and supports_tma(x, weight) else MAX_GEMV_ROWS


def _accepts_streaming_hopper(call: GemmCall) -> bool:
    rows, shape = len(call.x), call.weight.shape
    is_wide = fills_wide_programs(rows, *shape) and (call.activation is not None or rows <= MAX_WIDE_PLAIN_ROWS)
    if is_wide or (call.activation is None and narrow_splits(rows, *shape) == 1):
        return _has_fused_epilogue(call) and supports_tma(call.x, call.weight)
    return (
        0 < len(call.x) <= MAX_STREAMING_ROWS
        and _has_fused_epilogue(call)
        and _streaming_is_faster(call.x, call.weight, MAX_STREAMING_ROWS_OF_LARGE_WEIGHT)
    )


def _accepts_skinny_mma(call: GemmCall) -> bool:
    return (
        0 < len(call.x) <= MAX_SKINNY_ROWS
        and call.weight.shape[0] * call.weight.shape[1] <= SMALL_WEIGHT
        and _has_fused_epilogue(call)
    )


def _accepts_gated_gemm_hopper(call: GemmCall) -> bool:
    return (
        len(call.x) >= cublaslt.MIN_ROWS
        and call.bias is None
        and bool(FUSED_ACTIVATIONS.get(call.activation))
        and call.x.dtype is torch.bfloat16
        and HAS_TRITON
        and len(call.weight) % 16 == 0  # TMA stores the output: rows of a multiple of 16 bytes
        and supports_tma(call.x, call.weight)
    )


def _accepts_gelu_gemm_hopper(call: GemmCall) -> bool:
    if (
        call.activation is not F.gelu
        or call.bias is None
        or len(call.x) < cublaslt.MIN_ROWS
        or not (call.x.is_cuda and HAS_TRITON and supports_tma(call.x, call.weight))
    ):
        return False
    from slipstream.ops.gemm.linear.gated_gemm_hopper import can_fuse_elementwise

    return can_fuse_elementwise(call.x, call.weight, call.bias)


def _accepts_relu2_gemm_hopper(call: GemmCall) -> bool:
    if (
        call.activation is not relu2
        or call.bias is not None
        or len(call.x) < cublaslt.MIN_ROWS
        or not (call.x.is_cuda and HAS_TRITON and supports_tma(call.x, call.weight))
    ):
        return False
    from slipstream.ops.gemm.linear.gated_gemm_hopper import can_fuse_elementwise

    return can_fuse_elementwise(call.x, call.weight, None)


def _accepts_cublaslt_tuned(call: GemmCall) -> bool:
    return call.bias is None and cublaslt.is_tuned(call.x, call.weight)


def _has_fused_epilogue(call: GemmCall) -> bool:
    return call.x.element_size() == 2 and HAS_TRITON and call.activation in FUSED_ACTIVATIONS


def _streaming_is_faster(x: torch.Tensor, weight: torch.Tensor, max_rows_of_large_weight: int) -> bool:
    """Whether the Hopper kernel for few rows can take the operands and is faster than cuBLAS."""
    if not supports_tma(x, weight):
        return False
    if len(x) > max_rows_of_large_weight:
        return weight.shape[0] * weight.shape[1] <= SMALL_WEIGHT
    # a short sum for very many outputs (an LM head of a small model) leaves too little work per program
    return len(weight) < 32768 or weight.shape[1] >= 2048


def _gemv(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.triton import gemv

    return gemv(call.x, call.weight, call.bias, gate=FUSED_ACTIVATIONS[call.activation])


def _streaming_hopper(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.streaming_hopper import streaming_gemm

    return streaming_gemm(call.x, call.weight, call.bias, FUSED_ACTIVATIONS[call.activation])


def _skinny_mma(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.triton import skinny_mma

    return skinny_mma(call.x, call.weight, call.bias, FUSED_ACTIVATIONS[call.activation])


def _gated_gemm_hopper(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gated_gemm

    return gated_gemm(call.x, call.weight, FUSED_ACTIVATIONS[call.activation])


def _gelu_gemm_hopper(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.gated_gemm_hopper import gelu_gemm

    assert call.bias is not None
    return gelu_gemm(call.x, call.weight, call.bias)


def _relu2_gemm_hopper(call: GemmCall) -> torch.Tensor:
    from slipstream.ops.gemm.linear.gated_gemm_hopper import relu2_gemm

    return relu2_gemm(call.x, call.weight)


def _cublaslt_tuned(call: GemmCall) -> torch.Tensor:
    out = cublaslt.multiply(call.x, call.weight)
    assert out is not None, "multiply returned None for a call that is_tuned accepted"
    return _activate(out, call.activation)


def _native(call: GemmCall) -> torch.Tensor:
    return _activate(native.skinny_gemm(call.x, call.weight, call.bias), call.activation)


def _tiles(call: GemmCall) -> torch.Tensor:
    return _activate(tiles.tile_gemm(call.x, call.weight, call.bias), call.activation)


def _library(call: GemmCall) -> torch.Tensor:
    return _activate(reference.linear(call.x, call.weight, call.bias), call.activation)


def _activate(out: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    return out if activation is None else activation(out)


LIBRARY = GemmKernel("library", lambda call: True, _library)
GELU_GEMM_HOPPER = GemmKernel("gelu_gemm_hopper", _accepts_gelu_gemm_hopper, _gelu_gemm_hopper)
RELU2_GEMM_HOPPER = GemmKernel("relu2_gemm_hopper", _accepts_relu2_gemm_hopper, _relu2_gemm_hopper)
ELEMENTWISE_KERNELS = (GELU_GEMM_HOPPER, RELU2_GEMM_HOPPER)
"""The kernels with an elementwise activation; other elementwise activations run after `linear`."""

CUDA_KERNELS = (
    GemmKernel("gemv", _accepts_gemv, _gemv),
    GemmKernel("streaming_hopper", _accepts_streaming_hopper, _streaming_hopper),
    GemmKernel("skinny_mma", _accepts_skinny_mma, _skinny_mma),
    GemmKernel("gated_gemm_hopper", _accepts_gated_gemm_hopper, _gated_gemm_hopper),
    RELU2_GEMM_HOPPER,
    GemmKernel("cublaslt_tuned", _accepts_cublaslt_tuned, _cublaslt_tuned),
    LIBRARY,
)
CPU_KERNELS = (
    GemmKernel("native", lambda call: native.native_accepts(call.x, call.weight), _native),
    GemmKernel("tiles", lambda call: tiles.accepts(call.x, call.weight), _tiles),
    LIBRARY,
)

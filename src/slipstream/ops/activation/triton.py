"""Activations on CUDA, computed in float32 and rounded once. The input of gated ones ends with [gate, up]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.activation import reference
from slipstream.ops.pdl import dependent, release_next, wait_for_previous

_BLOCK = 1024
_WIDE_BLOCK = 4096  # of inputs that occupy all multiprocessors: fewer programs, each with four 16-byte loads per thread

_MAX_SPARSE = 32768  # gates of a row, which one program keeps in registers

_SILU, _GELU_TANH, _GELU, _QUICK_GELU, _RELU = (tl.constexpr(kind) for kind in range(5))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, _SILU)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, tanh approximation."""
    return _launch(gate_up, _GELU_TANH)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, exact (erf)."""
    return _launch(gate_up, _GELU)


def quick_gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, sigmoid approximation: gate * sigmoid(1.702 gate)."""
    return _launch(gate_up, _QUICK_GELU)


def relu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, _RELU)


def _launch(gate_up: torch.Tensor, kind: tl.constexpr) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    merged = gate_up.reshape(-1, 2 * size)
    if merged.stride(1) != 1:
        merged = merged.contiguous()
    if len(merged):
        grid = (triton.cdiv(size, _BLOCK), len(merged))
        constants = {"KIND": kind.value, "BLOCK": _BLOCK, **dependent(out.device, len(merged))}
        _gate_kernel[grid](merged, out, merged.stride(0), size, **constants, num_warps=4)
    return out


# grid: (blocks, rows)
@triton.jit
def _gate_kernel(gate_up, out, stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == _GELU:
        value = gate * (0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)))
    elif KIND == _GELU_TANH:
        value = _gelu_tanh(gate)
    elif KIND == _QUICK_GELU:
        value = gate * tl.sigmoid(1.702 * gate)
    elif KIND == _RELU:
        value = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        value = gate * tl.sigmoid(gate)
    tl.store(out + row * size + column, (value * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_tanh(x):
    # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def sparse_gelu_tanh_and_mul(gate_up: torch.Tensor, deviations: float) -> torch.Tensor:
    """Gelu, tanh approximation, of the amount by which a gate exceeds the cutoff of its row."""
    size = gate_up.shape[-1] // 2
    if size > _MAX_SPARSE:
        return reference.sparse_gelu_tanh_and_mul(gate_up, deviations)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    merged = gate_up.reshape(-1, 2 * size)
    if merged.stride(1) != 1:
        merged = merged.contiguous()
    if len(merged):
        block = triton.next_power_of_2(size)
        _sparse_kernel[(len(merged),)](
            merged,
            out,
            merged.stride(0),
            size,
            deviations,
            BLOCK=block,
            **dependent(out.device, len(merged)),
            num_warps=min(16, max(4, block // 1024)),
        )
    return out


# grid: (rows,)
@triton.jit
def _sparse_kernel(gate_up, out, stride, size, deviations, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=mask, other=0.0)
    gate -= tl.sum(gate, 0) / size
    spread = tl.sum(tl.where(mask, gate * gate, 0.0), 0) / size
    gate = tl.maximum(gate - tl.sqrt(spread) * deviations, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * size + column, (_gelu_tanh(gate) * up.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU, of each number by itself."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.numel()
    if size:
        block = _BLOCK if size <= 512 * _BLOCK else _WIDE_BLOCK
        rows = size // x.shape[-1]
        _relu2_kernel[(triton.cdiv(size, block),)](
            x, out, size, BLOCK=block, **dependent(out.device, rows), num_warps=4
        )
    return out


# grid: (blocks,)
@triton.jit
def _relu2_kernel(x, out, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + offset, (value * value).to(out.dtype.element_ty), mask=mask)


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times sigmoid(gate), in place, both [rows, size]."""
    assert x.is_contiguous() and gate.stride(1) == 1
    num_rows, size = x.shape
    if num_rows:
        block = min(_WIDE_BLOCK, triton.next_power_of_2(size))
        _sigmoid_kernel[(triton.cdiv(size, block), num_rows)](
            x, gate, gate.stride(0), size, BLOCK=block, **dependent(x.device, num_rows), num_warps=4
        )
    return x


# grid: (blocks, rows)
@triton.jit
def _sigmoid_kernel(x, gate, stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    value = tl.load(x + row * size + column, mask=mask, other=0.0).to(tl.float32)
    value *= tl.sigmoid(tl.load(gate + row * stride + column, mask=mask, other=0.0).to(tl.float32))
    tl.store(x + row * size + column, value.to(x.dtype.element_ty), mask=mask)

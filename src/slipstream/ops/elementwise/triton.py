"""Activations on CUDA, computed in float32 and rounded once. The input of gated ones ends with [gate, up]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.elementwise import reference
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

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


# Both lookups on CUDA, in one launch.

_LOOKUP_BLOCK = 2048  # elements per program


def lookup_embedding_and_rope(
    embedding: torch.Tensor, ids: torch.Tensor, scale: float, angles: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and result as the reference."""
    assert embedding.is_contiguous() and angles.is_contiguous() and len(ids) == len(positions)
    (num_tokens,), size, angle_size = ids.shape, embedding.shape[1], angles[0].numel()
    x = torch.empty((num_tokens, size), dtype=embedding.dtype, device=embedding.device)
    rotary = torch.empty((num_tokens, *angles.shape[1:]), dtype=angles.dtype, device=angles.device)
    if num_tokens:
        _look_up_kernel[(num_tokens, triton.cdiv(size, _LOOKUP_BLOCK) + triton.cdiv(angle_size, _LOOKUP_BLOCK))](
            embedding,
            ids,
            angles,
            positions,
            x,
            rotary,
            scale,
            SIZE=size,
            ANGLE_SIZE=angle_size,
            SCALED=scale != 1.0,
            BLOCK=_LOOKUP_BLOCK,
            num_warps=4,
            **dependent(x.device, num_tokens),
        )
    return x, rotary


# grid: (tokens, blocks of the embedding, then of the RoPE row)
@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["ids", "positions"])
def _look_up_kernel(
    embedding,
    ids,
    angles,
    positions,
    x,
    rotary,
    scale,
    SIZE: tl.constexpr,
    ANGLE_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    release_next(DEPENDENT)  # after the wait: later kernels read tile lists and page tables early (ops/platform/pdl.py)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < BLOCKS:
        column = part * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(embedding + tl.load(ids + token) * SIZE + column, mask=column < SIZE, other=0.0)
        if SCALED:
            value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(x + token * SIZE + column, value, mask=column < SIZE)
    else:
        column = (part - BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(angles + tl.load(positions + token) * ANGLE_SIZE + column, mask=column < ANGLE_SIZE, other=0.0)
        tl.store(rotary + token * ANGLE_SIZE + column, value, mask=column < ANGLE_SIZE)


# Segment maximum and sum on CUDA: one program per row and block of columns.

_SEGMENT_MAX_BLOCK = 512


def segment_max_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None = None
) -> None:
    assert begins is None or begins.is_contiguous()
    _reduce_into(out, x, starts, first, begins, adds=False)


def segment_add_into(out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int) -> None:
    _reduce_into(out, x, starts, first, None, adds=True)


def _reduce_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None, adds: bool
) -> None:
    num_tokens, num_columns = x.shape
    assert x.stride(1) == 1 and out.is_contiguous() and out.shape[1] == num_columns
    grid = (triton.cdiv(num_columns, _SEGMENT_MAX_BLOCK), len(starts) - 1)
    _row_kernel[grid](
        out, x, starts, begins, first, num_tokens, num_columns, x.stride(0),
        ADDS=adds, BLOCK=_SEGMENT_MAX_BLOCK, num_warps=4,
    )  # fmt: skip


# grid: (blocks of columns, rows)
@triton.jit(do_not_specialize=["first", "num_tokens"])
def _row_kernel(
    out, x, starts, begins, first, num_tokens, num_columns, stride, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    begin = tl.load(starts + row).to(tl.int32)
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row).to(tl.int32))
    begin = tl.maximum(begin - first, 0)
    end = tl.minimum(tl.load(starts + row + 1).to(tl.int32) - first, num_tokens)
    if begin < end:
        target = out + row * num_columns + column
        result = tl.load(target, mask=inside, other=0.0)
        source = x + begin.to(tl.int64) * stride + column
        for _ in range(begin, end):
            value = tl.load(source, mask=inside, other=0.0).to(out.dtype.element_ty)
            source += stride
            if ADDS:
                result += value
            else:
                result = tl.maximum(result, value, propagate_nan=tl.PropagateNan.ALL)
        tl.store(target, result, mask=inside)


# Segment sum on CUDA: one program per row and block of columns, without atomics.

_TOKENS = 32  # per loop iteration
_COLUMNS = 128  # per program


def segment_sum(
    x: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference. Tokens are added in blocks counted from the row's first token, so the batch does not matter."""
    num_columns, num_rows = x.shape[1], len(starts) - 1
    assert x.stride(1) == 1, f"columns of x must be contiguous, their stride is {x.stride(1)}"
    assert begins is None or begins.is_contiguous()
    assert origins is None or origins.is_contiguous()
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = (triton.cdiv(num_columns, _COLUMNS), num_rows)
        _sum_kernel[grid](
            x, starts, begins, origins, out, num_columns, x.stride(0), TOKENS=_TOKENS, COLUMNS=_COLUMNS, num_warps=4
        )  # fmt: skip
    return out


# grid: (blocks of columns, rows)
@triton.jit
def _sum_kernel(x, starts, begins, origins, out, num_columns, stride, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    begin = tl.load(starts + row).to(tl.int64)
    end = tl.load(starts + row + 1).to(tl.int64)
    shift = begin - 1
    if origins is not None:
        shift = begin - 1 - tl.load(origins + row).to(tl.int64)
    if begins is not None:
        begin = tl.maximum(begin, tl.load(begins + row).to(tl.int64))
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < end
        mask = there[:, None] & inside[None, :]
        values = tl.load(x + token[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if origins is not None:
            values *= (token - shift).to(tl.float32)[:, None]
        total += tl.sum(values, 0)
    tl.store(out + row * num_columns + column, total, mask=inside)

"""RMS norm on CUDA, computed in float32 and rounded once. A sum with a residual is rounded before its norm is
computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square over the last dimension, times weight: [size], or [heads, size] for x [T, heads, size]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual."""
    assert x.shape == residual.shape
    residual = residual.contiguous()
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, eps)
    return out, total


def sum_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual [rows, size] + the sum of parts [num, rows, size], and the sum, which is the next residual.
    Parts are added in their order."""
    num_parts, num_rows, size = parts.shape
    assert parts.is_contiguous() and residual.is_contiguous() and residual.shape == (num_rows, size)
    out, total = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _launch(parts[0], residual, weight, out, total, eps, num_parts)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    num_parts: int = 1,
) -> None:
    """`num_parts`: x is the first of so many tensors, one behind the other, that are added first."""
    size = x.shape[-1]
    if x.dim() != 3 or x.stride(2) != 1:
        assert weight.dim() == 1, f"a weight [heads, size] needs x [tokens, heads, size], got {tuple(x.shape)}"
        x = x.reshape(-1, 1, size).contiguous() if x.stride(-1) != 1 else x.reshape(-1, 1, size)
    num, heads, _ = x.shape
    if not num * heads:
        return
    assert weight.is_contiguous() and weight.shape[-1] == size
    block = triton.next_power_of_2(size)
    rows = max(1, min(16, 1024 // block))
    _norm_kernel[(triton.cdiv(num * heads, rows),)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        num * heads,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        SIZE=size,
        PARTS=num_parts,
        PER_HEAD=weight.dim() == 2,
        ROWS=rows,
        BLOCK=block,
        num_warps=max(1, min(32, block // 128) if num_parts > 1 else min(8, rows * block // 256)),
        **dependent(x.device, num),
    )


# grid: (groups of rows,); a row is one head of one token
@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    num_rows,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,  # tensors at x, one behind the other, that are added first
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    head = row % HEADS
    # the weights are in memory, x most likely in the L2 cache: they are loaded before x is ready
    if PER_HEAD:
        factor = tl.load(weight + head[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    else:
        factor = tl.load(weight + column, mask=column < SIZE, other=0.0)[None, :]
    wait_for_previous(DEPENDENT)
    source = (row // HEADS) * token_stride + head * head_stride
    target = row[:, None] * SIZE + column[None, :]
    source_offset = source[:, None] + column[None, :]
    value = tl.load(x + source_offset, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + source_offset + num_rows.to(tl.int64) * (SIZE * part), mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + target, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    value = value * scale[:, None] * factor.to(tl.float32)
    tl.store(out + target, value.to(out.dtype.element_ty), mask=mask)


# Layer norm on CUDA, computed in float32 and rounded once. A sum that is stored is rounded before its norm is
# computed.


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _layer_norm_launch(x, None, weight, bias, None, eps)


def layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _layer_norm_launch(x, residual, weight, bias, None, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _layer_norm_launch(x, residual, weight, bias, total, eps), total


def _layer_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    size = x.shape[-1]
    assert residual is None or residual.shape == x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, size).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    if not len(x):
        return out
    block = triton.next_power_of_2(size)
    rows = max(1, min(16, 2048 // block))
    _layer_norm_kernel[(triton.cdiv(len(x), rows),)](
        x,
        residual,
        weight,
        bias,
        out,
        total,
        eps,
        len(x),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        num_warps=max(1, min(8, rows * block // 512)),
    )
    return out


# grid: (groups of rows,)
@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < SIZE)[None, :]
    mask = (row < num_rows)[:, None] & inside
    at = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        if total is not None:
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=mask)
            value = rounded.to(tl.float32)
    mean = tl.sum(value, 1) / SIZE
    value = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    value = value * scale[:, None] * tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        value += tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


# Gated norms on CUDA in one launch, computed in float32 and rounded once.


def gated_group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    num_groups: int = 1,
    norm_first: bool = False,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    size = x.shape[1]
    # without a norm any division into groups gives the same
    groups = max(1, size // 1024) if weight is None and size % 1024 == 0 else num_groups
    grouped = x.view(-1, groups, size // groups), gate.unflatten(1, (groups, size // groups))
    return _gated_norm_launch(*grouped, weight, eps, norm_first, True).flatten(1)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    return _gated_norm_launch(x, gate, weight, eps, True, False)


def _gated_norm_launch(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float, norm_first: bool, per_group: bool
) -> torch.Tensor:
    """x, gate [T, groups, size]; weight [groups * size] if `per_group`, else [size]."""
    num_tokens, groups, size = x.shape
    assert x.is_contiguous() and gate.stride()[1:] == (size, 1) and (weight is None or weight.is_contiguous())
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if not out.numel():
        return out
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block)
    _gated_norm_kernel[(triton.cdiv(num_tokens * groups, rows),)](
        x,
        gate,
        weight,
        out,
        eps,
        num_tokens * groups,
        gate.stride(0),
        GROUPS=groups,
        SIZE=size,
        PER_GROUP=per_group,
        NORM_FIRST=norm_first,
        ROWS=rows,
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )
    return out


# grid: (blocks of rows,), a row being one group of one token
@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    num_rows,
    gate_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_GROUP: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = row % GROUPS
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    value = tl.load(x + row[:, None] * SIZE + column[None, :], mask=mask, other=0.0).to(tl.float32)
    source = (row // GROUPS) * gate_stride + group * SIZE
    opened = tl.load(gate + source[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if weight is not None:
        if PER_GROUP:
            factor = tl.load(weight + (group * SIZE)[:, None] + column[None, :], mask=mask, other=0.0)
        else:
            factor = tl.load(weight + column, mask=column < SIZE, other=0.0)[None, :]
        if not NORM_FIRST:
            value *= opened
        value *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None] * factor.to(tl.float32)
        if NORM_FIRST:
            value *= opened
    else:
        value *= opened
    tl.store(out + row[:, None] * SIZE + column[None, :], value.to(out.dtype.element_ty), mask=mask)

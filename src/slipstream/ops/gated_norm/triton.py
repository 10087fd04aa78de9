"""Gated norms on CUDA in one launch, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
    return _launch(*grouped, weight, eps, norm_first, True).flatten(1)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    return _launch(x, gate, weight, eps, True, False)


def _launch(
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

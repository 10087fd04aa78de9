"""Sums a token's experts, and the shared expert, on CUDA: in float32, in routing order, rounded once.

The RMS norm after the experts may be part of the sum: then one program has a whole token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.moe.reference import Routing, SharedOutput
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

_COLUMNS = 1024  # of one program


def combine(
    made: torch.Tensor,
    positions: torch.Tensor | None,
    routing: Routing,
    num_experts: int,
    shared: SharedOutput | None,
    x: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """made [.., hidden]: the weighted outputs of the pairs, at their `positions` [tokens * top_k] (None: in order).
    Pairs of no expert may have any values. `gate_weight` [1, hidden]: the gate of the shared expert is computed from x
    [tokens, hidden] here."""
    out = torch.empty(len(routing.ids), made.shape[1], dtype=made.dtype, device=made.device)
    _launch(made, positions, routing, num_experts, shared, x, gate_weight, out)
    return out


def combine_and_norm(
    made: torch.Tensor,
    positions: torch.Tensor | None,
    routing: Routing,
    num_experts: int,
    shared: SharedOutput | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of residual [tokens, hidden] + `combine`, and that sum; rounded as by kernels of their own."""
    assert residual.is_contiguous() and residual.shape == (len(routing.ids), made.shape[1])
    out, total = (torch.empty(residual.shape, dtype=made.dtype, device=made.device) for _ in range(2))
    _launch(made, positions, routing, num_experts, shared, None, None, out, (residual, norm, total, eps))
    return out, total


def _launch(
    made: torch.Tensor,
    positions: torch.Tensor | None,
    routing: Routing,
    num_experts: int,
    shared: SharedOutput | None,
    x: torch.Tensor | None,
    gate_weight: torch.Tensor | None,
    out: torch.Tensor,
    after: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """`after`: the residual, the weights of a norm, the memory of the sum, and eps."""
    num_tokens, top_k = routing.ids.shape
    hidden = made.shape[1]
    whole = triton.next_power_of_2(hidden)
    columns = min(_COLUMNS, whole) if after is None else whole
    residual, norm, total, eps = (None, None, None, 0.0) if after is None else after
    beside, gate = (None, None) if shared is None else shared
    assert beside is None or (beside.is_contiguous() and beside.shape == out.shape)
    assert gate_weight is None or (x is not None and x.stride(1) == gate_weight.stride(1) == 1)
    _combine_kernel[(num_tokens, triton.cdiv(hidden, columns))](
        made,
        positions,
        routing.ids if routing.has_padding else None,
        beside,
        gate,
        None if gate_weight is None else x,
        gate_weight,
        residual,
        norm,
        out,
        total,
        eps,
        num_experts,
        hidden,
        0 if gate is None else gate.stride(0),
        0 if x is None else x.stride(0),
        TOP_K=top_k,
        COLUMNS=columns,
        HIDDEN=whole,
        num_warps=4 if columns <= 2048 else 8,
        **dependent(made.device, num_tokens),
    )


# grid: (tokens, blocks of columns)
@triton.jit
def _combine_kernel(
    made,
    positions,
    ids,
    shared,
    gate,
    x,
    gate_weight,
    residual,
    norm,
    out,
    sums,  # receives the sum with the residual
    eps,
    num_experts,
    hidden,
    gate_stride,
    x_stride,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    every = tl.arange(0, HIDDEN)
    if gate_weight is not None:
        factors = tl.load(gate_weight + every, mask=every < hidden, other=0.0).to(tl.float32)
    if norm is not None:
        norm_weights = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        mask = inside
        if ids is not None:
            mask = inside & (tl.load(ids + pair) < num_experts)
        row = pair if positions is None else tl.load(positions + pair).to(tl.int64)
        total += tl.load(made + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    if shared is not None:
        beside = tl.load(shared + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            beside *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        if gate_weight is not None:
            row = tl.load(x + token * x_stride + every, mask=every < hidden, other=0.0).to(tl.float32)
            beside *= tl.sigmoid(tl.sum(row * factors, 0).to(out.dtype.element_ty).to(tl.float32))
        total += beside
    if norm is not None:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(sums + token * hidden + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
        total = total * tl.rsqrt(tl.sum(total * total, 0) / hidden + eps) * norm_weights
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)

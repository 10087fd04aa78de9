"""AltUp on CUDA: each value of a token's copies is read once and written once; sums in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 512  # of one program


def route_copies(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    scale: float,
    router: torch.Tensor,
    coefficients: torch.Tensor,
) -> torch.Tensor:
    """As the reference, which describes the arguments."""
    (num_tokens, hidden), num_out = x.shape, len(coefficients)
    assert x.stride(1) == 1 and router.is_contiguous() and coefficients.is_contiguous()
    out = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            x,
            norm,
            router,
            coefficients,
            out,
            eps,
            scale,
            hidden,
            num_out,
            x.stride(0),
            COPIES=len(router),
            COLUMNS=triton.next_power_of_2(hidden),
            OUTPUTS=triton.next_power_of_2(num_out),
            num_warps=4,
        )
    return out


def predict_copies(copies: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = torch.empty_like(copies, memory_format=torch.contiguous_format)
    _launch(_predict_kernel, copies, out, weights)
    return out


def correct_copies(predicted: torch.Tensor, made: torch.Tensor, weights: torch.Tensor, active: int) -> torch.Tensor:
    """As the reference."""
    out = torch.empty_like(predicted, memory_format=torch.contiguous_format)
    assert made.is_contiguous()
    _launch(_correct_kernel, predicted, out, weights, made, ACTIVE=active)
    return out


def _launch(kernel, copies: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **constants: int) -> None:
    num_tokens, num, hidden = copies.shape
    assert copies.is_contiguous() and all(tensor.is_contiguous() for tensor in tensors)
    if not num_tokens:
        return
    columns = min(_COLUMNS, triton.next_power_of_2(hidden))
    grid = (num_tokens, triton.cdiv(hidden, columns))
    kernel[grid](copies, out, *tensors, hidden, COPIES=num, COLUMNS=columns, **constants, num_warps=2)


# grid: (tokens,)
@triton.jit
def _route_kernel(
    x,
    norm,
    router,
    coefficients,
    out,
    eps,
    scale,
    hidden,
    num_out,
    stride,
    COPIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < hidden
    output = tl.arange(0, OUTPUTS)
    value = tl.load(x + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = scale * tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    value *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for copy in tl.static_range(COPIES):
        weight = tl.load(router + copy * hidden + column, mask=inside, other=0.0).to(tl.float32)
        routed = 2.0 * tl.sigmoid(2.0 * factor * tl.sum(value * weight, 0)) - 1.0  # tanh
        total += routed * tl.load(coefficients + output * COPIES + copy, mask=output < num_out, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * num_out + output, total.to(out.dtype.element_ty), mask=output < num_out)


# grid: (tokens, blocks of columns)
@triton.jit
def _predict_kernel(copies, out, weights, hidden, COPIES: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    source = copies + token * (COPIES * hidden) + column
    for copy in tl.static_range(COPIES):
        total = tl.load(source + copy * hidden, mask=inside, other=0.0).to(tl.float32)
        for other in tl.static_range(COPIES):
            weight = tl.load(weights + (token * COPIES + copy) * COPIES + other).to(tl.float32)
            # read again: it is in the L1 cache
            total += weight * tl.load(source + other * hidden, mask=inside, other=0.0).to(tl.float32)
        target = out + (token * COPIES + copy) * hidden + column
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


# grid: (tokens, blocks of columns)
@triton.jit
def _correct_kernel(
    copies, out, weights, made, hidden, ACTIVE: tl.constexpr, COPIES: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    source = copies + token * (COPIES * hidden) + column
    error = tl.load(made + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    error -= tl.load(source + ACTIVE * hidden, mask=inside, other=0.0).to(tl.float32)
    for copy in tl.static_range(COPIES):
        weight = tl.load(weights + token * COPIES + copy).to(tl.float32) + 1.0
        total = tl.load(source + copy * hidden, mask=inside, other=0.0).to(tl.float32) + weight * error
        target = out + (token * COPIES + copy) * hidden + column
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)

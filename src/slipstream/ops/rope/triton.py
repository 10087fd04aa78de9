"""Queries, keys and values on CUDA, from their projection to the pages, in one pass over the heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.dependent import dependent, release_next, wait_for_previous


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rows: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim], normed per head by weight [heads, dim] if there is one, then turned by rows [T, 2, rotary]."""
    return _launch(x, None, weight, eps, rows, None, None, None)


def turn_and_write(
    query_key: torch.Tensor,  # [T, heads + kv heads, dim]
    value: torch.Tensor,  # [T, kv heads, dim]
    weight: torch.Tensor | None,  # [heads + kv heads, dim]
    eps: float,
    rotary: torch.Tensor,  # [T, 2, rotary dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + place
) -> torch.Tensor:
    """Queries and keys normed and turned; keys and values also at their slots. Slots of padding lie in page 0, where
    anything may be written."""
    assert keys.shape[2:] == value.shape[1:] and keys.stride() == values.stride(), f"{value.shape} into {keys.shape}"
    assert value.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    return _launch(query_key, value, weight, eps, rotary, keys, values, slots)


def _launch(
    x: torch.Tensor,
    value: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    rotary: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, num_turned, dim = x.shape
    num_kv_heads = 0 if value is None else value.shape[1]
    assert x.stride(2) == 1 and rotary.is_contiguous() and (weight is None or weight.is_contiguous())
    out = torch.empty((num_tokens, num_turned, dim), dtype=x.dtype, device=x.device)
    num_heads = num_turned + num_kv_heads
    few = num_tokens <= 64  # more programs, each with less
    block_heads = min(triton.next_power_of_2(num_heads), 4 if few else 8)
    _turn_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        x,
        value,
        weight,
        rotary,
        out,
        keys,
        values,
        slots,
        eps,
        x.stride(0),
        x.stride(1),
        0 if value is None else value.stride(0),
        0 if value is None else value.stride(1),
        0 if keys is None else keys.stride(0),
        0 if keys is None else keys.stride(1),
        0 if keys is None else keys.stride(2),
        TURNED=num_turned,
        KV_HEADS=num_kv_heads,
        PAGE=0 if keys is None else keys.shape[1],
        DIM=dim,
        ROTARY=rotary.shape[-1],
        BLOCK_H=block_heads,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=2 if few else 4,
        **dependent(x.device, num_tokens),
    )
    return out


# grid: (tokens, blocks of heads)
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _turn_kernel(
    x,
    value,
    weight,
    rotary,
    out,
    keys,
    values,
    slots,
    eps,
    token_stride,
    head_stride,
    value_token,
    value_head,
    page_stride,
    slot_stride,
    page_head,
    TURNED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    # queries, then keys, then values
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = ROTARY // 2
    # the dimension each one turns with; those past the rotary part stay
    other = tl.where(dim < half, dim + half, tl.where(dim < ROTARY, dim - half, dim))
    turned = (head < TURNED) & (dim < DIM)
    if weight is not None:
        factor = tl.load(weight + head * DIM + dim, mask=turned, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + head * DIM + other, mask=turned, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    start = x + token * token_stride + head * head_stride
    own = tl.load(start + dim, mask=turned, other=0.0).to(tl.float32)
    across = tl.load(start + other, mask=turned, other=0.0).to(tl.float32)
    row = rotary + token * (2 * ROTARY)
    cos = tl.load(row + dim, mask=dim < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(row + ROTARY + dim, mask=dim < ROTARY, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        own *= scale * factor
        across *= scale * other_factor
    result = (own * cos + across * sin).to(out.dtype.element_ty)
    tl.store(out + (token * TURNED + head) * DIM + dim, result, mask=turned)
    if keys is not None:
        slot = tl.load(slots + token)
        page = slot // PAGE * page_stride + slot % PAGE * slot_stride
        kv_head = head - (TURNED - KV_HEADS)
        is_key = turned & (kv_head >= 0)
        tl.store(keys + page + kv_head * page_head + dim, result.to(keys.dtype.element_ty), mask=is_key)
        kv_head = head - TURNED
        is_value = (kv_head >= 0) & (kv_head < KV_HEADS) & (dim < DIM)
        copied = tl.load(value + token * value_token + kv_head * value_head + dim, mask=is_value, other=0.0)
        tl.store(values + page + kv_head * page_head + dim, copied.to(values.dtype.element_ty), mask=is_value)

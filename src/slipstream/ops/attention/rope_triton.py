"""Norm per head, RoPE and KV cache write on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.attention.cache import FP8, MAX_FP8, scales_of
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

_MAX_SMALL_STEP = 80  # tokens
MAX_FORWARD_TOKENS = 2048  # of more tokens the last are the first: the GEMM before left them in the L2 cache
_MAX = tl.constexpr(MAX_FP8)


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rows: torch.Tensor) -> torch.Tensor:
    """RoPE of x [T, heads, dim] by rows [T, 2, rotary], after an RMS norm per head if weight [heads, dim] is given."""
    return _launch(x, None, weight, eps, rows, None, None, None)


def rope_and_write_cache(
    query_key: torch.Tensor,  # [T, heads + kv heads, dim]
    value: torch.Tensor,  # [T, kv heads, dim]
    weight: torch.Tensor | None,  # [heads + kv heads, dim]
    eps: float,
    rotary: torch.Tensor,  # [T, 2, rotary dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + position in the page
) -> tuple[torch.Tensor, None]:
    """Norm and RoPE of queries and keys. Returns queries; keys and values go to their slots only, where attention reads
    them. Slots of padding are in the null page."""
    assert keys.shape[2:] == value.shape[1:] and keys.stride() == values.stride(), f"{value.shape} into {keys.shape}"
    assert value.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    return _launch(query_key, value, weight, eps, rotary, keys, values, slots), None


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
    num_tokens, num_rotated, dim = x.shape
    num_kv_heads = 0 if value is None else value.shape[1]
    assert x.stride(2) == 1 and rotary.is_contiguous() and (weight is None or weight.is_contiguous())
    out = torch.empty((num_tokens, num_rotated - num_kv_heads, dim), dtype=x.dtype, device=x.device)
    rotary_dim = rotary.shape[-1]
    half = triton.next_power_of_2(rotary_dim // 2)
    block_tokens, block_heads, warps = _blocks(num_tokens, num_rotated, half)
    key_scales = value_scales = None
    if keys is not None and values is not None and keys.dtype is FP8:
        key_scales, value_scales = scales_of(keys), scales_of(values)
    num_blocks = triton.cdiv(num_rotated, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    _turn_kernel[(triton.cdiv(num_tokens, block_tokens), num_blocks)](
        x,
        value,
        weight,
        rotary,
        out,
        keys,
        values,
        slots,
        eps,
        num_tokens,
        x.stride(0),
        x.stride(1),
        0 if value is None else value.stride(0),
        0 if value is None else value.stride(1),
        0 if keys is None else keys.stride(0),
        0 if keys is None else keys.stride(1),
        0 if keys is None else keys.stride(2),
        key_scales,
        value_scales,
        0 if key_scales is None else key_scales.stride(0),
        ROTATED=num_rotated,
        KV_HEADS=num_kv_heads,
        PAGE=0 if keys is None else keys.shape[1],
        DIM=dim,
        ROTARY=rotary_dim,
        BLOCK_T=block_tokens,
        BLOCK_H=block_heads,
        BLOCK_HALF=half,
        SMALL=num_tokens <= _MAX_SMALL_STEP,
        REVERSED=num_tokens > MAX_FORWARD_TOKENS,
        num_warps=warps,
        **dependent(x.device, num_tokens),
    )
    return out


def _blocks(num_tokens: int, num_heads: int, half: int) -> tuple[int, int, int]:
    """Tokens, heads and warps per program. Small steps use more and smaller programs. A warp always has enough heads
    for eight elements per lane, so that the squares of a head are summed in the same order in every step."""
    heads_of_warp = max(4, 256 // half)
    if num_tokens <= _MAX_SMALL_STEP:
        return 1, heads_of_warp, 1
    heads = min(8, triton.next_power_of_2(num_heads))
    return 4 * max(8, heads_of_warp) // heads, heads, 4


# grid: (blocks of tokens, blocks of queries and keys, then of values)
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
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
    num_tokens,
    token_stride,
    head_stride,
    value_token,
    value_head,
    page_stride,
    slot_stride,
    page_head,
    key_scales,
    value_scales,
    scale_page,
    ROTATED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    SMALL: tl.constexpr,  # steps of few tokens: loads do not wait for each other
    REVERSED: tl.constexpr,  # the last tokens first
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    HALF: tl.constexpr = ROTARY // 2
    ROTATED_BLOCKS: tl.constexpr = (ROTATED + BLOCK_H - 1) // BLOCK_H
    QUERIES: tl.constexpr = ROTATED - KV_HEADS
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK_T * BLOCK_H)
    block = tl.program_id(0).to(tl.int64)
    if REVERSED:
        block = tl.num_programs(0) - 1 - block
    token = block * BLOCK_T + lane // BLOCK_H
    there = token < num_tokens
    # dimension i is rotated with i + half; dimensions past the rotary part do not change, and are handled in parts as
    # large as a half: one large block of them needs another layout and more registers than there are
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    PARTS: tl.constexpr = (DIM - ROTARY + BLOCK_HALF - 1) // BLOCK_HALF
    if part < ROTATED_BLOCKS:
        head = part * BLOCK_H + lane % BLOCK_H
        mine = (there & (head < ROTATED))[:, None]
        mask = mine & (dim < HALF)
        factors = None
        if weight is not None:
            factors = weight + (head * DIM)[:, None]
            low_factor = tl.load(factors + dim, mask=mask, other=0.0).to(tl.float32)
            high_factor = tl.load(factors + HALF + dim, mask=mask, other=0.0).to(tl.float32)
        # a load after a store waits until what is stored has been loaded: small steps load everything first
        others = ()  # dimensions past the rotary part, and their factors
        other_factors = ()
        if SMALL and weight is not None:
            for number in tl.static_range(PARTS):
                at = ROTARY + number * BLOCK_HALF + dim
                other_factor = tl.load(factors + at, mask=mine & (at < DIM), other=0.0)
                other_factors = other_factors + (other_factor,)  # type: ignore[assignment]
        wait_for_previous(DEPENDENT)
        source = x + (token * token_stride + head * head_stride)[:, None]
        low = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + HALF + dim, mask=mask, other=0.0).to(tl.float32)
        row = rotary + (token * (2 * ROTARY))[:, None] + dim
        cos = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(row + ROTARY + HALF, mask=mask, other=0.0).to(tl.float32)
        # explicit fma here and below: the compiler would contract differently for small and large steps, and the bits
        # of a token would depend on the batch
        square = tl.sum(tl.fma(low, low, high * high), 1)
        for number in tl.static_range(PARTS):
            at = ROTARY + number * BLOCK_HALF + dim
            stay = tl.load(source + at, mask=mine & (at < DIM), other=0.0)
            if SMALL:
                others = others + (stay,)  # type: ignore[assignment]
            stay = stay.to(tl.float32)
            square += tl.sum(stay * stay, 1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        if weight is not None:
            low *= scale * low_factor
            high *= scale * high_factor
        first = tl.fma(low, cos, -(high * sin)).to(out.dtype.element_ty)
        second = tl.fma(high, cos, low * sin).to(out.dtype.element_ty)
        query = (head < QUERIES)[:, None]
        target = out + ((token * QUERIES + head) * DIM)[:, None]
        tl.store(target + dim, first, mask=mask & query)
        tl.store(target + HALF + dim, second, mask=mask & query)
        for number in tl.static_range(PARTS):
            at = ROTARY + number * BLOCK_HALF + dim
            if SMALL:
                stay = others[number]
                if weight is not None:
                    stay = _normed(stay, other_factors[number], scale)
            else:
                stay = _unrotated(source, factors, scale, at, mine & (at < DIM))
            tl.store(target + at, stay, mask=mine & (at < DIM) & query)
        if keys is not None:  # noqa: SIM102 - a compile-time condition; the next is not
            if (part + 1) * BLOCK_H > QUERIES:
                kv_head = head - QUERIES
                cache_at = keys + _slot_offset(slots, token, there, page_stride, slot_stride, PAGE)
                cache_at = (cache_at + kv_head * page_head)[:, None]
                key = (kv_head >= 0)[:, None]
                if key_scales is not None:
                    # the largest number of a head becomes that of FP8
                    most = tl.maximum(_largest(first), _largest(second))
                    for number in tl.static_range(PARTS):
                        at = ROTARY + number * BLOCK_HALF + dim
                        most = tl.maximum(most, _largest(_unrotated(source, factors, scale, at, mine & (at < DIM))))
                    size = tl.maximum(most / _MAX, 1e-12)
                    where = _slot_offset(slots, token, there, scale_page, 1, PAGE) + kv_head * PAGE
                    tl.store(key_scales + where, size, mask=there & (kv_head >= 0) & (head < ROTATED))
                    factor = (1 / size)[:, None]
                    tl.store(cache_at + dim, _to_fp8(first, factor), mask=mask & key)
                    tl.store(cache_at + HALF + dim, _to_fp8(second, factor), mask=mask & key)
                    for number in tl.static_range(PARTS):
                        at = ROTARY + number * BLOCK_HALF + dim
                        stay = _unrotated(source, factors, scale, at, mine & (at < DIM))
                        tl.store(cache_at + at, _to_fp8(stay, factor), mask=mine & (at < DIM) & key)
                else:
                    tl.store(cache_at + dim, first, mask=mask & key)
                    tl.store(cache_at + HALF + dim, second, mask=mask & key)
                    for number in tl.static_range(PARTS):
                        at = ROTARY + number * BLOCK_HALF + dim
                        if SMALL:
                            stay = others[number]
                            if weight is not None:
                                stay = _normed(stay, other_factors[number], scale)
                        else:
                            stay = _unrotated(source, factors, scale, at, mine & (at < DIM))
                        tl.store(cache_at + at, stay, mask=mine & (at < DIM) & key)
    elif keys is not None:
        wait_for_previous(DEPENDENT)
        own = (part - ROTATED_BLOCKS) * BLOCK_H + lane % BLOCK_H
        has_key = (there & (own < KV_HEADS))[:, None]
        given = value + (token * value_token + own * value_head)[:, None]
        taken = values + _slot_offset(slots, token, there, page_stride, slot_stride, PAGE)
        taken = (taken + own * page_head)[:, None]
        half = has_key & (dim < HALF)
        early = tl.load(given + dim, mask=half, other=0.0)
        deferred = tl.load(given + HALF + dim, mask=half, other=0.0)
        if value_scales is not None:
            most = tl.maximum(_largest(early), _largest(deferred))
            for number in tl.static_range(PARTS):
                at = ROTARY + number * BLOCK_HALF + dim
                most = tl.maximum(most, _largest(tl.load(given + at, mask=has_key & (at < DIM), other=0.0)))
            size = tl.maximum(most / _MAX, 1e-12)
            where = _slot_offset(slots, token, there, scale_page, 1, PAGE) + own * PAGE
            tl.store(value_scales + where, size, mask=there & (own < KV_HEADS))
            factor = (1 / size)[:, None]
            early, deferred = _to_fp8(early, factor), _to_fp8(deferred, factor)
        rest = ()
        if SMALL:
            for number in tl.static_range(PARTS):
                at = ROTARY + number * BLOCK_HALF + dim
                given_part = tl.load(given + at, mask=has_key & (at < DIM), other=0.0)
                rest = rest + (given_part,)  # type: ignore[assignment]
        tl.store(taken + dim, early, mask=half)
        tl.store(taken + HALF + dim, deferred, mask=half)
        for number in tl.static_range(PARTS):
            at = ROTARY + number * BLOCK_HALF + dim
            if SMALL:
                last = rest[number]  # type: ignore[var-annotated]
            else:
                last = tl.load(given + at, mask=has_key & (at < DIM), other=0.0)
            if value_scales is not None:
                last = _to_fp8(last, factor)
            tl.store(taken + at, last, mask=has_key & (at < DIM))


@triton.jit
def _unrotated(source, factors, scale, at, mask):
    """Dimensions past the rotary part, normed if there are factors."""
    value = tl.load(source + at, mask=mask, other=0.0)
    if factors is not None:
        value = _normed(value, tl.load(factors + at, mask=mask, other=0.0), scale)
    return value


@triton.jit
def _normed(value, factor, scale):
    return (value.to(tl.float32) * (scale * factor.to(tl.float32))).to(value.dtype)


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _to_fp8(x, factor):
    return tl.minimum(tl.maximum(x.to(tl.float32) * factor, -_MAX), _MAX).to(tl.float8e4nv)


@triton.jit
def _slot_offset(slots, token, there, page_stride, slot_stride, PAGE: tl.constexpr):
    slot = tl.load(slots + token, mask=there, other=0)
    return slot // PAGE * page_stride + slot % PAGE * slot_stride

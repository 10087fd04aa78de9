"""Cache writes on CUDA: keys and values of a token in one go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_cache(
    key: torch.Tensor,  # [T, kv heads, head dim]
    value: torch.Tensor,  # [T, kv heads, head dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, head dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + place
) -> None:
    """Put each token's key and value at its slot. Slots of padding lie in page 0, where anything may be written."""
    num_tokens, num_heads, dim = key.shape
    assert keys.shape[2:] == key.shape[1:] and keys.stride() == values.stride(), f"{key.shape} into {keys.shape}"
    assert key.stride(2) == value.stride(2) == keys.stride(3) == 1, "head dims must be contiguous"
    _write_kernel[(num_tokens,)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        PAGE=keys.shape[1],
        HEADS=num_heads,
        DIM=dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )


# grid: (tokens,)
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    key,
    value,
    keys,
    values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    page_stride,
    slot_stride,
    head_stride,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    slot = tl.load(slots + token)
    place = slot // PAGE * page_stride + slot % PAGE * slot_stride + head * head_stride + dim
    k = tl.load(key + token * key_token + head * key_head + dim, mask=mask)
    v = tl.load(value + token * value_token + head * value_head + dim, mask=mask)
    tl.store(keys + place, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + place, v.to(values.dtype.element_ty), mask=mask)

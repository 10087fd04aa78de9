"""RoPE with the C kernel; with the reference for inputs that the kernel does not take."""

from __future__ import annotations

import torch

from slipstream.ops import native
from slipstream.ops.cache_write import write_cache
from slipstream.ops.norm.native import rms_norm
from slipstream.ops.rope import reference


def apply_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, dim = x.shape
    packed = x.stride(2) == 1 and x.stride(1) == dim and rows.is_contiguous() and rows.dtype is x.dtype
    if not packed or not native.serves(x):
        return reference.apply_rope(x, rows)
    library = native.library()
    assert library is not None
    out = torch.empty(num_tokens, num_heads, dim, dtype=torch.float32)
    library.slip_rope(
        x.data_ptr(), rows.data_ptr(), out.data_ptr(), num_tokens, num_heads, dim, rows.shape[-1], x.stride(0)
    )
    return out


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rows: torch.Tensor) -> torch.Tensor:
    """RoPE of x [T, heads, dim], after an RMS norm per head if weight [heads, dim] is given."""
    return apply_rope(x if weight is None else rms_norm(x, weight, eps), rows)


def rope_and_write_cache(
    query_key: torch.Tensor,  # [T, heads + kv heads, dim]
    value: torch.Tensor,  # [T, kv heads, dim]
    weight: torch.Tensor | None,  # [heads + kv heads, dim]
    eps: float,
    rotary: torch.Tensor,  # [T, 2, rotary dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [T] int64, page * page_size + position in the page
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norm and RoPE of queries and keys; writes keys and values to their slots. Returns queries, and keys, or None for
    keys if attention reads them from the pages only."""
    rotated = norm_rope(query_key, weight, eps, rotary)
    num_kv_heads = value.shape[1]
    query, key = rotated.split([rotated.shape[1] - num_kv_heads, num_kv_heads], 1)
    write_cache(key, value, keys, values, slots)
    return query, key

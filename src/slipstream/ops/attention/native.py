"""Attention with the C kernel, which reads the pages of each row in place, for single tokens and for chunks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.ops.attention import cache, reference
from slipstream.ops.attention.cache import FP8, write_fp8_cache
from slipstream.ops.elementwise.native import rms_norm
from slipstream.ops.platform import native

_TILE = 32  # tokens of a row per work item of a thread


def serves_pages(lengths: torch.Tensor, dtype: torch.dtype, build: bool) -> bool:
    """Whether `attend_in_place` takes rows with these lengths. `build`: start compiling missing kernels."""
    if dtype is not torch.float32 or type(lengths) is not torch.Tensor or not lengths.is_cpu:
        return False
    if native.library() is None:
        if build:
            native.build_in_background()
        return False
    return True


def cut_tiles(num_tokens: NDArray[np.int32]) -> torch.Tensor:
    """The tiles of rows with these numbers of tokens, [tiles, 3] int64: row, first token, number of tokens."""
    counts = num_tokens.astype(np.int64)
    per_row = -(-counts // _TILE)
    rows = np.repeat(np.arange(len(counts)), per_row)
    offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * _TILE
    starts = np.cumsum(counts) - counts
    return torch.from_numpy(np.stack([rows, starts[rows] + offsets, np.minimum(_TILE, counts[rows] - offsets)], 1))


def attend_in_place(
    query: torch.Tensor,  # [T, heads, dim]
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    table: torch.Tensor,  # [B, width] int64 pages
    lengths: torch.Tensor,  # [T] int64: visible positions per token
    tiles: torch.Tensor | None,  # from `cut_tiles`; None: one token per row
    scale: float,
    score_cap: float,  # 0: none
    window: int,  # visible keys including the token's own; 0: all
    sinks: torch.Tensor | None = None,  # [heads]: scores of a column that has no value
) -> torch.Tensor:
    """Returns [T, heads, dim]. The bits of a token's result do not depend on its tile, chunk or batch."""
    library = native.library()
    assert library is not None, "call serves_pages first"
    num_tokens, num_heads, dim = query.shape
    assert query.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    assert table.stride(1) == 1 and lengths.is_contiguous() and len(lengths) == num_tokens
    assert sinks is None or (sinks.is_contiguous() and sinks.dtype is torch.float32)
    out = torch.empty(num_tokens, num_heads, dim, dtype=torch.float32)
    library.slip_attend(
        query.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        lengths.data_ptr(),
        None if tiles is None else tiles.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        scale,
        score_cap,
        window,
        num_tokens if tiles is None else len(tiles),
        num_heads,
        keys.shape[2],
        dim,
        keys.shape[1],
        query.stride(0),
        table.stride(0),
    )
    return out


# RoPE with the C kernel; with the reference for inputs that the kernel does not take.


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


# Cache writes with the C kernel; with the reference for inputs that the kernel does not take.


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    if keys.dtype is FP8:
        write_fp8_cache(key, value, keys, values, slots)
        return
    num_tokens, num_heads, dim = key.shape
    packed = key.stride()[1:] == value.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    if not packed or keys.dtype is not key.dtype or not native.serves(key):
        cache.write_cache(key, value, keys, values, slots)
        return
    library = native.library()
    assert library is not None
    library.slip_write_cache(
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_heads * dim,
        key.stride(0),
        value.stride(0),
    )

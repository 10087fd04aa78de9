"""Decode attention by the C kernel: all rows of one token each in one call, their pages read where they lie."""

from __future__ import annotations

import torch

from slipstream.ops import native


def serves_decode(lengths: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `attend_decode` can take rows with these lengths. The first to ask has the kernels compiled."""
    if dtype is not torch.float32 or type(lengths) is not torch.Tensor or not lengths.is_cpu:
        return False
    if native.library() is None:
        native.build_in_background()
        return False
    return True


def attend_decode(
    query: torch.Tensor,  # [B, heads, dim], one token a row
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    table: torch.Tensor,  # [B, width] int64 pages
    lengths: torch.Tensor,  # [B] int64
    scale: float,
    score_cap: float,  # 0: none
    window: int,  # keys that are seen, the token's own among them; 0: all
) -> torch.Tensor:
    """Returns [B, heads, dim]."""
    library = native.library()
    assert library is not None, "ask serves_decode first"
    num_rows, num_heads, dim = query.shape
    assert query.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    assert table.stride(1) == 1 and lengths.is_contiguous()
    out = torch.empty(num_rows, num_heads, dim)
    library.slip_attend_decode(
        query.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        lengths.data_ptr(),
        scale,
        score_cap,
        window,
        num_rows,
        num_heads,
        keys.shape[2],
        dim,
        keys.shape[1],
        query.stride(0),
        table.stride(0),
    )
    return out

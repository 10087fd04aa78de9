"""Attention over pages by torch's scaled dot product.

Pages are gathered into one stretch of keys a row, the last page's unused slots are masked. Masks are added to the
scores, in the query's dtype: 0 where a key is seen, minus infinity where not. What lies in a masked slot must be
finite, nothing more: its weight is exactly 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_single(
    query: torch.Tensor,  # [B, heads, dim], one token a row
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    pages: torch.Tensor,  # [B * width] int64, the rows' page tables one after another
    mask: torch.Tensor,  # [B, 1, 1, width * page_size]
    scale: float,
) -> torch.Tensor:
    """One token of each row over all its keys. Returns [B, heads, dim]."""
    num_rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[2]
    # heads that share keys stand in for a sequence of queries: each key is read once, and nothing is repeated
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    out = F.scaled_dot_product_attention(
        grouped, _gather(keys, pages, num_rows), _gather(values, pages, num_rows), attn_mask=mask, scale=scale
    )
    return out.reshape(num_rows, num_heads, dim)


def attend_pages(
    query: torch.Tensor,  # [T, heads, dim], tokens of one row
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,  # [width] int64
    mask: torch.Tensor,  # [T, width * page_size]
    scale: float,
) -> torch.Tensor:
    """Several tokens of one row over its pages. Returns [T, heads, dim]."""
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        _gather(keys, pages, 1),
        _gather(values, pages, 1),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def attend_chunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Tokens of one row that begin at position 0: all their keys are at hand, [T, kv heads, dim]; no page is read."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _gather(cache: torch.Tensor, pages: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[rows, kv heads, keys, dim], a view of the gathered pages."""
    _, _, num_kv_heads, dim = cache.shape
    return cache.index_select(0, pages).view(num_rows, -1, num_kv_heads, dim).transpose(1, 2)

"""Attention over pages with torch's scaled_dot_product_attention, or in steps if scores have a soft cap.

Slots are gathered into one contiguous range of keys per row. Masks are added to the scores, in the query's dtype: 0 for
a visible key, -inf otherwise. The weight of a masked slot is exactly 0, but 0 times NaN is NaN: so a row gets only
slots that it has written, one of them repeated to pad the range to the common length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.ops.attention.cache import FP8, read_slots


def attend_single(
    query: torch.Tensor,  # [B, heads, dim], one token per row
    keys: torch.Tensor,  # [pages, page_size, kv heads, dim]
    values: torch.Tensor,
    slots: torch.Tensor,  # [B * K] int64, page * page_size + position in the page, row by row
    mask: torch.Tensor,  # [B, 1, 1, K]
    scale: float,
    score_cap: float = 0.0,  # soft cap of the scores (tanh); 0: none
    sinks: torch.Tensor | None = None,  # [heads]: one more score of each softmax, for which there is no value
) -> torch.Tensor:
    """One token per row over its keys. Returns [B, heads, dim]."""
    num_rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[2]
    # the query heads of a KV head act as a query sequence: each key is read once, without repetition
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    found, worth = _gather(keys, slots, num_rows, query), _gather(values, slots, num_rows, query)
    if score_cap or sinks is not None:
        columns = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        out = _attend_stepwise(grouped, found, worth, mask, scale, score_cap, columns)
    else:
        out = F.scaled_dot_product_attention(grouped, found, worth, attn_mask=mask, scale=scale)
    return out.reshape(num_rows, num_heads, -1)


def attend_pages(
    query: torch.Tensor,  # [T, heads, dim], tokens of one row
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,  # [K] int64
    mask: torch.Tensor,  # [T, K]
    scale: float,
    score_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Several tokens of one row over its pages. Returns [T, heads, dim of values]."""
    if values.shape[3] != keys.shape[3]:
        # latent attention: all heads share the one head of keys, so they are queries of one sequence
        num_tokens, num_heads, dim = query.shape
        rows, masks = query.reshape(1, -1, dim), mask.repeat_interleave(num_heads, 0, output_size=len(mask) * num_heads)
        found, worth = _gather(keys, slots, 1, query)[0], _gather(values, slots, 1, query)[0]
        out = _attend_stepwise(rows, found, worth, masks, scale, score_cap, None)
        return out.view(num_tokens, num_heads, -1)
    if score_cap or sinks is not None:
        num_tokens, num_heads, dim = query.shape
        # the query heads of a KV head are one more dimension: [kv heads, group, T, dim]
        grouped = query.view(num_tokens, keys.shape[2], -1, dim).permute(1, 2, 0, 3)
        found, worth = _gather(keys, slots, 1, query)[0].unsqueeze(1), _gather(values, slots, 1, query)[0].unsqueeze(1)
        columns = None if sinks is None else sinks.view(keys.shape[2], -1, 1, 1)
        out = _attend_stepwise(grouped, found, worth, mask, scale, score_cap, columns)
        return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, dim)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        _gather(keys, slots, 1, query),
        _gather(values, slots, 1, query),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def attend_chunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Tokens of one row from position 0 on, all of them or only the last. All keys are in `key` [T, kv heads, dim]; no
    page is read."""
    is_causal = len(query) > 1
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _attend_stepwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    score_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[..., Q, dim] by [..., K, dim]. Scores are bounded by tanh if there is a cap. `sinks`, broadcast to [..., Q, 1],
    are one more column of the softmax, which is dropped afterwards."""
    scores = query @ key.transpose(-1, -2)
    if score_cap:
        scores = scores.mul_(scale / score_cap).tanh_().mul_(score_cap).add_(mask)
    else:
        scores = scores.mul_(scale).add_(mask)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value


def _gather(cache: torch.Tensor, slots: torch.Tensor, num_rows: int, query: torch.Tensor) -> torch.Tensor:
    """[rows, kv heads, keys, dim], a view of the gathered slots; a cache in FP8 becomes the dtype of the query."""
    _, _, num_kv_heads, dim = cache.shape
    if cache.dtype is FP8:
        return read_slots(cache, slots, query.dtype).view(num_rows, -1, num_kv_heads, dim).transpose(1, 2)
    return cache.flatten(0, 1).index_select(0, slots).view(num_rows, -1, num_kv_heads, dim).transpose(1, 2)


# RoPE in plain torch. Dimension i is rotated with dimension i + half, as in checkpoints of Hugging Face layout.
#
# A table row holds, for one position, the cosines of all rotary dimensions, then the sines, the first half of the sines
# negated. A rotation is then x * cos + (x with its halves swapped) * sin.


def rope_table(frequencies: torch.Tensor, num_positions: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """[num_positions, 2, rotary dim] from the frequencies [rotary dim / 2], computed in float32 as in training."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


def apply_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, dim] by the table rows [T, 2, rotary dim]. Dimensions past the rotary ones do not change."""
    num_tokens, num_heads, dim = x.shape
    rotary = rows.shape[-1]
    rotated = x if rotary == dim else x[..., :rotary]
    halves = rotated.unflatten(-1, (2, rotary // 2))
    cos, sin = rows.view(num_tokens, 2, 1, 2, rotary // 2).unbind(1)
    out = (halves * cos).addcmul_(halves.flip(2), sin).view(num_tokens, num_heads, rotary)
    return out if rotary == dim else torch.cat((out, x[..., rotary:]), -1)

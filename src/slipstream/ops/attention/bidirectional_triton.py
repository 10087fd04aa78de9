"""Bidirectional attention on CUDA over packed rows: each token attends to all tokens of its row.

Rows are split along their queries into tiles, which a kernel lists once per step. The launches depend only on the
numbers of tokens and rows, so they can be captured; the row starts are read on the device. The tiles of a row and the
order of its sums do not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_RECORD = tl.constexpr(4)  # int32s per tile: first query, end of queries, first key, end of keys


@dataclass(frozen=True, slots=True)
class Tiles:
    records: torch.Tensor  # [capacity, _RECORD] int32; unused tiles have no queries
    size: int  # queries per tile


@dataclass(frozen=True, slots=True)
class Cut:
    """Tile sizes; measured with benchmarks/ops/bidirectional_attention.py."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_cut(head_dim: int, dtype: torch.dtype) -> Cut:
    if dtype is torch.float32:
        return Cut(32, 32, 4, 2)
    return Cut(64, 64, 4, 3) if head_dim <= 128 else Cut(64, 32, 4, 2)


def list_tiles(starts: torch.Tensor, num_tokens: int, cut: Cut, num_seen: torch.Tensor | None = None) -> Tiles:
    """The tiles of rows with starts [rows + 1] on the device. num_seen [rows]: the tokens of each row that are attended
    to; None: all. Tokens after the last row are padding and have no keys."""
    num_rows = len(starts) - 1
    capacity = num_tokens // cut.queries + num_rows + 2
    records = torch.empty(capacity, _RECORD.value, dtype=torch.int32, device=starts.device)
    _list_tiles_kernel[(num_rows + 1,)](
        records, starts, num_seen, num_rows, num_tokens, capacity, SIZE=cut.queries, BLOCK=256, num_warps=4
    )
    return Tiles(records, cut.queries)


# grid: (rows + 1,); the last program writes the tiles of padding and the unused tiles
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "capacity"])
def _list_tiles_kernel(
    records, starts, num_seen, num_rows, num_tokens, capacity, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, row, BLOCK):
        at = first + offset
        begin = tl.load(starts + at, mask=at < row, other=0).to(tl.int32)
        end = tl.load(starts + at + 1, mask=at < row, other=0).to(tl.int32)
        before += (end - begin + SIZE - 1) // SIZE
    tile = tl.sum(before, 0)
    begin = tl.load(starts + row).to(tl.int32)
    is_row = row < num_rows
    end = tl.load(starts + row + 1, mask=is_row, other=num_tokens).to(tl.int32)
    last_key = end
    if num_seen is not None:
        last_key = begin + tl.load(num_seen + row, mask=is_row, other=0)
    count = (end - begin + SIZE - 1) // SIZE
    last = tl.where(is_row, count, capacity - tile)
    for first in range(0, last, BLOCK):
        own = first + offset
        target = records + (tile + own) * _RECORD
        there = own < last
        query = tl.minimum(begin + own * SIZE, end)
        tl.store(target, query, mask=there)
        tl.store(target + 1, tl.minimum(query + SIZE, end), mask=there)
        tl.store(target + 2, tl.where(is_row, begin, 0), mask=there)
        tl.store(target + 3, tl.where(is_row, last_key, 0), mask=there)


def attend_bidirectional(
    query: torch.Tensor,  # [T, heads, head dim]
    key: torch.Tensor,  # [T, kv heads, head dim]
    value: torch.Tensor,
    scale: float,
    tiles: Tiles,
    cut: Cut,
    reach: int = 0,
    bias: torch.Tensor | None = None,  # [heads, 2 n - 1]
    of_queries: torch.Tensor | None = None,  # [T, heads, 2 n - 1]
    of_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `AttentionBackend.bidirectional`; the last two arguments are the fields of `RelativeScores`."""
    num_tokens, num_heads, head_dim = query.shape
    assert tiles.size == cut.queries
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "head dims must be contiguous"
    assert bias is None or bias.is_contiguous()
    assert of_queries is None or of_queries.is_contiguous()
    assert of_keys is None or (of_queries is not None and of_keys.is_contiguous())
    widths = [x.shape[-1] for x in (bias, of_queries) if x is not None]
    assert len(set(widths)) < 2, "bias and relative scores must have the same width"
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _attend_kernel[(len(tiles.records), num_heads)](
        out,
        query,
        key,
        value,
        tiles.records,
        bias,
        of_queries,
        of_keys,
        widths[0] if widths else 0,
        scale * 1.4426950408889634,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=num_heads,
        GROUP=num_heads // key.shape[1],
        REACH=reach,
        DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=cut.queries,
        BLOCK_N=cut.keys,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out


# grid: (tiles, heads)
@triton.jit
def _attend_kernel(
    out,
    query,
    key,
    value,
    records,
    bias,
    of_queries,
    of_keys,
    width,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    REACH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    record = records + tl.program_id(0) * _RECORD
    first_query = tl.load(record)
    last_query = tl.load(record + 1)
    if first_query >= last_query:
        return
    first_key = tl.load(record + 2)
    last_key = tl.load(record + 3)
    head = tl.program_id(1)
    kv_head = head // GROUP
    m = first_query + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m < last_query)[:, None] & (d < DIM)[None, :]
    source = query + m.to(tl.int64)[:, None] * query_stride + head * query_head_stride + d[None, :]
    q = tl.load(source, mask=inside, other=0.0)
    keys = key + kv_head.to(tl.int64) * key_head_stride
    values = value + kv_head.to(tl.int64) * value_head_stride
    head_bias = bias
    if bias is not None:
        head_bias = bias + head * width + width // 2
    # one vector per token and head; bias_stride is the stride between tokens
    query_bias, key_bias, bias_stride = of_queries, of_keys, 0
    if of_queries is not None:
        bias_stride = HEADS * width
        query_bias = of_queries + head * width + width // 2
    if of_keys is not None:
        key_bias = of_keys + head * width + width // 2

    # online softmax in base 2: maximum score, sum of weights, weighted sum of values
    most = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    low, high = first_key, last_key
    if REACH > 0:
        # blocks are counted from the row's first key, so that the order of sums does not depend on the tile
        low = first_key + (tl.maximum(first_query - REACH - first_key, 0) // BLOCK_N) * BLOCK_N
        high = tl.minimum(last_query + REACH, last_key)
    full = low + (high - low) // BLOCK_N * BLOCK_N
    for n in range(low, full, BLOCK_N):
        acc, total, most = _attend_block(
            acc, total, most, q, keys, values, head_bias, query_bias, key_bias, bias_stride, n, m, last_query,
            last_key, scale, key_stride, value_stride,
            REACH, DIM, BLOCK_D, BLOCK_N, bias is not None, of_queries is not None, of_keys is not None, False,
        )  # fmt: skip
    if full < high:
        acc, total, most = _attend_block(
            acc, total, most, q, keys, values, head_bias, query_bias, key_bias, bias_stride, full, m, last_query,
            last_key, scale, key_stride, value_stride,
            REACH, DIM, BLOCK_D, BLOCK_N, bias is not None, of_queries is not None, of_keys is not None, True,
        )  # fmt: skip
    # padding has no keys
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (m.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_block(
    acc,
    total,
    most,
    q,
    keys,
    values,
    head_bias,
    query_bias,
    key_bias,
    bias_stride,
    first,
    m,
    last_query,
    last_key,
    scale,
    key_stride,
    value_stride,
    REACH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIASED: tl.constexpr,
    BY_QUERY: tl.constexpr,
    BY_KEY: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    key_at = keys + n.to(tl.int64)[None, :] * key_stride + d[:, None]
    value_at = values + n.to(tl.int64)[:, None] * value_stride + d[None, :]
    there = n < last_key
    if PARTIAL:
        k = tl.load(key_at, mask=there[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(value_at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    elif BLOCK_D == DIM:
        k = tl.load(key_at)
        v = tl.load(value_at)
    else:
        k = tl.load(key_at, mask=(d < DIM)[:, None], other=0.0)
        v = tl.load(value_at, mask=(d < DIM)[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee")
    if BY_QUERY:
        distance = (n[None, :] - m[:, None]).to(tl.int64)
        seen = (m < last_query)[:, None] & there[None, :]
        at = m.to(tl.int64)[:, None] * bias_stride + distance
        scores += tl.load(query_bias + at, mask=seen, other=0.0).to(tl.float32)
        if BY_KEY:
            at = n.to(tl.int64)[None, :] * bias_stride + distance
            scores += tl.load(key_bias + at, mask=seen, other=0.0).to(tl.float32)
    if BIASED:
        distance = n[None, :] - m[:, None]
        # lanes outside the row load the bias of distance 0
        near = tl.where((m < last_query)[:, None] & there[None, :], distance, 0)
        scores = scores * scale + 1.4426950408889634 * tl.load(head_bias + near).to(tl.float32)
    else:
        scores = scores * scale
    if PARTIAL:
        scores = tl.where(there[None, :], scores, -1e30)
    if REACH > 0:
        distance = n[None, :] - m[:, None]
        scores = tl.where((distance <= REACH) & (distance >= -REACH), scores, -1e30)
    higher = tl.maximum(most, tl.max(scores, 1))
    weights = tl.math.exp2(scores - higher[:, None])
    shrink = tl.math.exp2(most - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, higher

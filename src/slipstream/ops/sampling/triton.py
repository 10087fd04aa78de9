"""Logprobs of some tokens in one pass over the logits, without a tensor of [R, V]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sampling.choose import argmax_rows, draw_by_row
from slipstream.ops.sampling.edit import (
    add_entries_,
    count_,
    drop_below_,
    fetch_masks_,
    forbid_,
    forbid_matched_,
    mask_bits_,
    penalize_,
)
from slipstream.ops.sampling.floor import find_floor, noise_bits, step_keys
from slipstream.ops.sampling.reference import TopLogprobs

_CHUNK = 4096
_MAX_PICKED = 32  # tokens per chunk that the kernel selects; torch.topk selects more


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> TopLogprobs:
    """As the reference; equal logprobs are in order of their ids."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and k <= size
    picked = k if k <= _MAX_PICKED else 0
    padded_k = 0 if not picked else 8 if picked <= 8 else _MAX_PICKED
    num_chunks = triton.cdiv(size, _CHUNK)
    device = logits.device
    stats = torch.empty(num_rows, 2, num_chunks, dtype=torch.float32, device=device)
    counts = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    picks = torch.empty(num_rows, num_chunks, padded_k, dtype=torch.int64, device=device)
    total = torch.empty(num_rows, dtype=torch.float32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, picked, dtype=torch.int64, device=device)
    top = torch.empty(num_rows, picked, dtype=torch.float32, device=device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits,
        tokens,
        stats,
        counts,
        picks,
        logits.stride(0),
        size,
        picked,
        PADDED_K=padded_k,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        logits,
        tokens,
        stats,
        counts,
        picks,
        total,
        chosen,
        rank,
        top_ids,
        top,
        logits.stride(0),
        num_chunks,
        picked,
        PADDED_K=padded_k,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )
    if picked < k:
        top, top_ids = logits.float().topk(k, -1)
        top = top - total[:, None]
    return TopLogprobs(chosen, rank, top_ids, top)


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[R, V] logits and [R, J] ids to [R, J]: log-softmax at the ids."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(size, _CHUNK)
    stats = torch.empty(num_rows, 2, num_chunks, dtype=torch.float32, device=logits.device)
    total = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits, None, stats, None, None, logits.stride(0), size, 0, PADDED_K=0, CHUNK=_CHUNK, num_warps=4
    )
    _row_kernel[(num_rows,)](
        logits,
        None,
        stats,
        None,
        None,
        total,
        None,
        None,
        None,
        None,
        logits.stride(0),
        num_chunks,
        0,
        PADDED_K=0,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )
    return logits.gather(1, ids).float() - total[:, None]


@triton.jit
def _pack(x, index):
    """An int64 that orders by x, then by descending index, and contains both."""
    bits = x.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _unpack(packed):
    rising = (packed >> 32).to(tl.int32)
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (packed & 0x7FFFFFFF)


_NOTHING = tl.constexpr(-(2**63))  # less than any packed value


# grid: (chunks, rows)
@triton.jit(do_not_specialize=["k"])
def _chunk_kernel(logits, tokens, stats, counts, picks, stride, size, k, PADDED_K: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < size
    x = tl.load(logits + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - tl.where(top > float("-inf"), top, 0.0)))
    where = stats + row * 2 * num_chunks + chunk
    tl.store(where, top)
    tl.store(where + num_chunks, tl.sum(weight, 0))
    if tokens is not None:
        chosen = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
        tl.store(counts + row * num_chunks + chunk, tl.sum((inside & (x >= chosen)).to(tl.int32), 0))
    if PADDED_K > 0:
        packed = tl.where(inside, _pack(x, index), _NOTHING)
        out = picks + (row * num_chunks + chunk) * PADDED_K
        for rank in range(k):
            best = tl.max(packed, 0)
            tl.store(out + rank, best)
            packed = tl.where(packed == best, _NOTHING, packed)


# grid: (rows,)
@triton.jit(do_not_specialize=["num_chunks", "k"])
def _row_kernel(
    logits,
    tokens,
    stats,
    counts,
    picks,
    total,
    chosen,
    rank,
    top_ids,
    top,
    stride,
    num_chunks,
    k,
    PADDED_K: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    where = stats + row * 2 * num_chunks + chunk
    tops = tl.load(where, mask=inside, other=float("-inf"))
    sums = tl.load(where + num_chunks, mask=inside, other=0.0)
    best = tl.max(tops, 0)
    rescale = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - tl.where(best > float("-inf"), best, 0.0)))
    log_total = best + tl.log(tl.sum(sums * rescale, 0))
    tl.store(total + row, log_total)
    if tokens is not None:
        x = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
        tl.store(chosen + row, x - log_total)
        count = tl.load(counts + row * num_chunks + chunk, mask=inside, other=0)
        tl.store(rank + row, tl.sum(count, 0).to(tl.int64))
    if PADDED_K > 0:
        order = tl.arange(0, PADDED_K)
        pick = (row * num_chunks + chunk)[:, None] * PADDED_K + order[None, :]
        packed = tl.load(picks + pick, mask=inside[:, None] & (order < k)[None, :], other=_NOTHING)
        for index in range(k):
            best_pack = tl.max(tl.max(packed, 1), 0)
            packed = tl.where(packed == best_pack, _NOTHING, packed)
            x, token = _unpack(best_pack)
            tl.store(top + row * k + index, x - log_total)
            tl.store(top_ids + row * k + index, token)


__all__ = [
    "add_entries_",
    "argmax_rows",
    "count_",
    "draw_by_row",
    "drop_below_",
    "fetch_masks_",
    "find_floor",
    "forbid_",
    "forbid_matched_",
    "logprobs_of",
    "mask_bits_",
    "noise_bits",
    "penalize_",
    "step_keys",
    "top_logprobs",
]
